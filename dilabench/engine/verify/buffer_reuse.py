"""The check that no later call writes into a returned tensor, even if several buffers are used in rotation."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dilabench.engine.verify.call import Call, digest
from dilabench.record import Check, CheckName

# The most buffers in rotation that are looked for, and the time for it.
MAX_CALLS, MAX_SECONDS = 32, 5.0


def buffer_reuse_check(call: Call, inputs: Sequence[Tensor], out: Tensor, before: Tensor) -> Check:
    """Check that `out` keeps its values, also after more calls than there may be buffers in rotation.

    `before`: digest of `out` when it was returned. If only the caller holds the storage, no later call can reach it.
    Otherwise calls are made until one writes into it, or returns memory that an earlier result still has.
    """
    reused = not torch.equal(digest(out), before) or (
        _held_elsewhere(out) and _is_reused(lambda: call.unwatched(inputs), out, before)
    )
    detail = "a later call wrote into the result of an earlier one: out must be a fresh tensor" if reused else None
    return Check(name=CheckName.RESULT_KEPT, passed=not reused, detail=detail)


def _held_elsewhere(out: Tensor) -> bool:
    """Return True if the storage has other owners, garbage not counted, or if torch cannot count them."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return True

    def owners(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        return int(count(storage._cdata))

    usual = owners(torch.zeros(1, device=out.device))
    if owners(out) <= usual:
        return False
    gc.collect()
    return owners(out) > usual


def _is_reused(again: Callable[[], Tensor], out: Tensor, before: Tensor) -> bool:
    started = time.monotonic()
    results = [out]
    for _ in range(MAX_CALLS):
        results.append(again())
        known = {result.untyped_storage().data_ptr() for result in results if result.numel()}
        if len(known) < len(results) or not torch.equal(digest(out), before):
            return out.numel() > 0
        if time.monotonic() - started > MAX_SECONDS:
            break
    return False

"""Is a returned tensor the caller's own? A buffer that a later call writes into is not, however many take turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dilabench.engine.verify.call import Call, digest
from dilabench.record import Check, CheckName

# Buffers that may take turns where something suggests that there are any, and how long is spent on looking for them.
MAX_CALLS, MAX_SECONDS = 32, 5.0


def kept_check(call: Call, inputs: Sequence[Tensor], out: Tensor, before: Tensor) -> Check:
    """The result still holds what it held when it was returned, also after more calls than there may be buffers.

    `before`: its digest then. Where nothing but the caller holds the storage, no later call can reach it. Where
    something does, calls are made until one of them writes into it, or gets memory that an earlier result still has.
    """
    reused = not torch.equal(digest(out), before) or (
        _held_elsewhere(out) and _is_reused(lambda: call.unwatched(inputs), out, before)
    )
    detail = "a later call wrote into the result of an earlier one: out must be a fresh tensor" if reused else None
    return Check(name=CheckName.RESULT_KEPT, passed=not reused, detail=detail)


def _held_elsewhere(out: Tensor) -> bool:
    """Whether the storage has other owners. True where torch does not tell; garbage is no owner."""
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
    living = [out]
    for _ in range(MAX_CALLS):
        living.append(again())
        known = {one.untyped_storage().data_ptr() for one in living if one.numel()}
        if len(known) < len(living) or not torch.equal(digest(out), before):
            return out.numel() > 0
        if time.monotonic() - started > MAX_SECONDS:
            break
    return False

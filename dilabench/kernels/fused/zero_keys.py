# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The logarithms of how many zero keys rows of packed sequences see, by one launch on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launch_cache import COPY_BYTES, Launch, LaunchCache
from dilabench.kernels.streams import on_a_stream_of_its_own

_ROWS = 128


class ZeroKeysOfDocuments:
    """Zero keys of packed sequences without a causal mask.

    branches: segment length and rate of each. residues: of each branch, the residue of each head, -1 of heads that have
    no part in it. A row of a segment sees the same number of zero keys in every head that has it: only the set of heads
    differs.
    """

    def __init__(
        self, branches: Sequence[tuple[int, int]], residues: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._branches, self._heads = len(branches), len(residues[0])
        numbers = [n for branch, own in zip(branches, residues, strict=True) for n in (*branch, *own)]
        here = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        # From pinned memory, on another stream, so that no call waits for the launches before it.
        with on_a_stream_of_its_own(device):
            pinned = here.pin_memory() if device.type == "cuda" and torch.cuda.is_available() else here
            self._numbers = pinned.to(device, non_blocking=True)
        self._cache = LaunchCache()

    def __call__(self, bounds: Tensor, tokens: int, apart: bool) -> tuple[Tensor, ...]:
        """[1, H, T] of sequences from ``bounds[i]`` to ``bounds[i + 1]``, or with `apart` [H, T] of each branch.

        float32, -inf for no zero key. bounds: int32 on the device, of which several may be equal.
        """
        size, parts = self._heads * tokens, self._branches if apart else 1
        # Kernels are compiled for addresses that are multiples of 16 bytes.
        step = size + -size % (COPY_BYTES // 4)
        counts = torch.empty(parts * step, dtype=torch.float32, device=bounds.device)

        def prepare() -> list[Launch]:
            arguments = {
                "bounds_ptr": bounds,
                "branches_ptr": self._numbers,
                "counts_ptr": counts,
                "n_bounds": len(bounds),
                "tokens": tokens,
                "n_branches": self._branches,
                "n_heads": self._heads,
                "step": step,
                "APART": apart,
                "HEADS": triton.next_power_of_2(self._heads),
                "ROWS": _ROWS,
            }
            return [Launch(_zero_keys_kernel, lambda _: ((triton.cdiv(tokens, _ROWS),), arguments))]

        key = len(bounds), bounds.data_ptr() % COPY_BYTES, tokens, apart
        self._cache.launch(key, [{"bounds": bounds, "counts": counts}], prepare)
        if apart:
            return counts.as_strided((parts, self._heads, tokens), (step, tokens, 1)).unbind()
        return (counts.as_strided((1, self._heads, tokens), (size, tokens, 1)),)


@triton.jit(do_not_specialize=("n_bounds", "tokens", "n_branches", "n_heads", "step"))
def _zero_keys_kernel(
    bounds_ptr,
    branches_ptr,
    counts_ptr,
    n_bounds,
    tokens,
    n_branches,
    n_heads,
    step,
    APART: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, HEADS)
    # The last bound that is not behind the row.
    document = row * 0
    width = 1
    while width < n_bounds:
        width *= 2
    while width > 1:
        width = width // 2
        further = document + width
        at = tl.load(bounds_ptr + further, further < n_bounds, 0x7FFFFFFF)
        document = tl.where(at <= row, further, document)
    start = tl.load(bounds_ptr + document)
    stop = tl.load(bounds_ptr + document + 1, document + 1 < n_bounds, tokens)
    place = head[:, None].to(tl.int64) * tokens + row[None, :]
    inside = (head[:, None] < n_heads) & (row[None, :] < tokens)
    total = tl.zeros((HEADS, ROWS), tl.float32)
    for _ in range(n_branches):
        whole = tl.load(branches_ptr)
        rate = tl.load(branches_ptr + 1)
        offset = tl.load(branches_ptr + 2 + head, head < n_heads, -1)
        segment = tl.minimum(whole, stop - start)
        # Rows that pad the last program are in no sequence.
        from_start = (row - start) % tl.maximum(segment, 1)
        left = stop - (row - from_start)
        kept = tl.minimum(segment, left)
        residue = from_start % rate
        # The rows of a padded segment on a residue, minus the existing ones; if the rate divides the segment, only the
        # last one of a sequence can lack rows.
        lacking = (segment + rate - 1) // rate - (kept - residue + rate - 1) // rate
        lacking = tl.where((whole % rate == 0) & (kept < left), 0, lacking)
        seen = tl.where(residue[None, :] == offset[:, None], lacking[None, :].to(tl.float32), 0.0)
        if APART:
            tl.store(counts_ptr + place, _logarithm(seen), inside)
            counts_ptr += step
        else:
            total += seen
        branches_ptr += 2 + n_heads
    if not APART:
        tl.store(counts_ptr + place, _logarithm(total), inside)


@triton.jit
def _logarithm(count):
    return tl.where(count > 0.0, tl.log(tl.maximum(count, 1.0)), float("-inf"))

# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""dK and dV of single tokens: blocks of one key have no tile, so that queries add up what they have for each key.

The query form, which walks over a token's keys for dQ, also writes what the token adds to dK and dV of each of them. A
program per key then sums its list in order. Tokens are taken in parts, as many as the memory for that allows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launch_cache import LaunchCache
from dilabench.kernels.selected.lists import KeyLists
from dilabench.kernels.selected.operands import launch
from dilabench.kernels.tuning import TileConfig

# Entries of a list that a program reads at a time.
_ROWS = 16
_SUM = TileConfig(0, 0, 4, 1)


@triton.jit
def _sum_kernel(
    parts_ptr,
    sums_ptr,
    places_ptr,
    starts_ptr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # Both of dK / scale and dV are COLUMNS numbers of a row.
    number = tl.program_id(0)
    start, end = tl.load(starts_ptr + number), tl.load(starts_ptr + number + 1)
    column = tl.arange(0, WIDTH)
    sums_ptr += number.to(tl.int64) * COLUMNS + column
    total = tl.load(sums_ptr, column < COLUMNS, 0.0)
    for first in range(0, (end - start) * PARTS, ROWS):
        row = first + tl.arange(0, ROWS)
        there = row < (end - start) * PARTS
        place = tl.load(places_ptr + start + row // PARTS, there, 0).to(tl.int64) * PARTS + row % PARTS
        inside = there[:, None] & (column < COLUMNS)[None, :]
        part = tl.load(parts_ptr + place[:, None] * COLUMNS + column[None, :], inside, 0.0)
        total += tl.sum(part.to(tl.float32), 0)
    tl.store(sums_ptr, total, column < COLUMNS)


def add_token_gradients(parts: Tensor, sums: Tensor, lists: KeyLists, cache: LaunchCache) -> None:
    """Add ``parts`` [K, tokens, S, PARTS, 2, D] of the tokens of ``lists`` to ``sums`` [K, T, 2, D] float32."""
    columns = 2 * sums.shape[-1]

    def arguments() -> dict[str, int]:
        width = triton.next_power_of_2(columns)
        return {"PARTS": parts.shape[3], "ROWS": _ROWS, "COLUMNS": columns, "WIDTH": width}

    tensors = {"parts": parts, "sums": sums, "places": lists.places, "starts": lists.starts}
    launch(_sum_kernel, lists.starts.shape[0] - 1, tensors, arguments, _SUM, cache, ("sums", parts.shape))

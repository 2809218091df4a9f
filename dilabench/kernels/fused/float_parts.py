# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""float32 as three bfloat16 numbers, whose products tensor cores compute.

A float32 x is the sum of x0 = bf16(x), x1 = bf16(x - x0) and x2 = bf16(x - x0 - x1) up to its last bit, and of the nine
products of two such sums six reach it (`tile_walk.scores`): what tensor cores call bf16x6. Split once, tiles are copied
and multiplied as those of bfloat16 are; split where they are multiplied, every tile is split again for each tile that
it meets, and goes through registers and back into shared memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.row_layout import common_modulus, is_row_addressable, is_whole, whole_classes
from dilabench.kernels.launches import Launches, run
from dilabench.kernels.tuning import LARGEST_IN_PARTS, PARTS

# Numbers that a program splits.
_TILE = 4096
# Strides are counted in so many elements, so that the compiler knows that 16 bytes can be read at a time.
_UNIT = 4
# Hopper copies rows that are no multiple of 32 bytes at half speed (`wider_rows`).
_COLUMNS = 16
_LARGEST = tl.constexpr(3.3895313892515355e38)


def come_in_parts(x: Tensor) -> bool:
    """Whether kernels read ``x [B, N, H, D]`` in parts: float32 on a GPU, up to a width."""
    return x.dtype == torch.float32 and x.device.type == "cuda" and x.shape[-1] <= LARGEST_IN_PARTS


def is_readable(x: Tensor, groups: Sequence[BranchGroup]) -> bool:
    """Whether kernels read ``x [B, N, H, D]``, or its parts, as it is; `readable` makes of another one that they do."""
    return is_whole(x, groups) and not come_in_parts(x)


def readable(x: Tensor, groups: Sequence[BranchGroup], known: Launches | None = None, name: object = None) -> Tensor:
    """``x [B, N, H, D]`` as kernels read it: its `parts` where it comes in such, else `whole_classes`."""
    return parts(x, common_modulus(groups), known, name) if come_in_parts(x) else whole_classes(x, groups)


def all_readable(given: dict[str, Tensor], groups: Sequence[BranchGroup], known: Launches) -> dict[str, Tensor]:
    """All of these as kernels read them, each by its name. known: launches of the pass."""
    if known.once("whole", lambda: all(is_readable(x, groups) for x in given.values())):
        return given
    return {name: readable(x, groups, known, f"parts of {name}") for name, x in given.items()}


def parts(x: Tensor, modulus: int, known: Launches | None = None, name: object = None) -> Tensor:
    """The parts of float32 ``x [B, N, H, D]`` as bfloat16 [3B, N', H, D'], those of a batch element one after another.

    ``modulus`` divides N' and 16 divides D'; what is beyond N and D is zeros. known: launches of the pass, which may
    have this one under this name.
    """
    if not is_row_addressable(x):
        x = x.contiguous()
    batch, length, heads, dim = x.shape
    longer, wider = length + -length % modulus, dim + -dim % _COLUMNS
    found = torch.empty((PARTS * batch, longer, heads, wider), dtype=torch.bfloat16, device=x.device)
    tensors = {"x": x, "parts": found}
    if known is not None and known.repeat(name, tensors):
        return found
    rows, columns = batch * longer * heads, triton.next_power_of_2(wider)
    strides = (stride // _UNIT for stride in x.stride()[:3])
    arguments = {
        "x_ptr": x,
        "parts_ptr": found,
        **dict(zip(("batch_units", "token_units", "head_units"), strides, strict=True)),
        "length": length,
        "longer": longer,
        "heads": heads,
        "rows": rows,
        "DIM": dim,
        "WIDTH": wider,
        "COLUMNS": columns,
        "ROWS": _TILE // columns,
        "UNIT": _UNIT,
    }
    launched = run(_split_kernel, (triton.cdiv(rows, _TILE // columns),), arguments)
    if known is not None:
        known.keep(name, launched, tensors)
    return found


@triton.jit(do_not_specialize=["batch_units", "token_units", "head_units", "length", "longer", "heads", "rows"])
def _split_kernel(
    x_ptr,
    parts_ptr,
    batch_units,
    token_units,
    head_units,
    length,
    longer,
    heads,
    rows,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = row // heads
    batch = token // longer
    token = token % longer
    start = batch * batch_units + token * token_units + row % heads * head_units
    there = ((row < rows) & (token < length))[:, None] & (column < DIM)[None, :]
    x = tl.load(x_ptr + (start * UNIT)[:, None] + column[None, :], there, 0.0)
    first, second, third = split(x)
    # Parts of a batch element follow one another.
    apart = longer.to(tl.int64) * heads * WIDTH
    place = (row * WIDTH + 2 * batch * apart)[:, None] + column[None, :]
    kept = (row < rows)[:, None] & (column < WIDTH)[None, :]
    tl.store(parts_ptr + place, first, kept)
    tl.store(parts_ptr + place + apart, second, kept)
    tl.store(parts_ptr + place + 2 * apart, third, kept)


@triton.jit
def split(x):
    """Three bfloat16 tiles that sum up to a float32 one. Of infinity and NaN the first is that, the others are 0."""
    # The largest float32 numbers would round to infinity.
    first = tl.where(tl.abs(x) < float("inf"), tl.clamp(x, -_LARGEST, _LARGEST), x).to(tl.bfloat16)
    left = x - first.to(tl.float32)
    left = tl.where(left == left, left, 0.0)
    second = left.to(tl.bfloat16)
    return first, second, (left - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def split_small(x):
    """As `split` for numbers that are far from the largest."""
    first = x.to(tl.bfloat16)
    left = x - first.to(tl.float32)
    second = left.to(tl.bfloat16)
    return first, second, (left - second.to(tl.float32)).to(tl.bfloat16)

# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""How the Gluon kernels read a list entry and find its tile: what `tile_walk` does for the others."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.extra import libdevice
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dilabench.kernels.fused.branch_group import CLASS_BITS, TILE_BITS, VISIT_COLUMNS

_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
_TILE_BITS = gl.constexpr(TILE_BITS)
_TILE_MASK = gl.constexpr((1 << TILE_BITS) - 1)
_CLASS_MASK = gl.constexpr((1 << CLASS_BITS) - 1)
_COUNT_SHIFT = gl.constexpr(TILE_BITS + CLASS_BITS)
_VISIT_COLUMNS = gl.constexpr(VISIT_COLUMNS)


@lru_cache(maxsize=64)
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of a tile in shared memory: the widest swizzle that its rows allow."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENTS[dtype])


def tile_descriptor(x: torch.Tensor, view: tuple[list[int], list[int]], tile: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor of a ``view`` (shape, strides) of ``x``, in tiles whose leading sides are 1."""
    shape, strides = view
    block = [*[1] * (len(shape) - len(tile)), *tile]
    return TensorDescriptor(x, shape, strides, block, shared_layout(tuple(block), x.dtype))


@gluon.constexpr_function
def tiles_of(count, sides, rows, columns):
    """The shape of that many tiles of rows and columns, which descriptors show with leading ``sides`` of 1."""
    return [count, *[1] * sides, rows, columns]


@gluon.jit
def view_place(batch, row, column, BATCHED: gl.constexpr):
    """The place of a tile in `row_layout.residue_view`."""
    of_one = (row, column)
    return (batch, row, column) if BATCHED else of_one


@gluon.jit
def turned(u, shift, R):
    """Class ``u`` of a frame as a token class: (u + shift) mod R for both below R."""
    residue = u + shift
    return gl.where(residue < R, residue, residue - R)


@gluon.jit
def tile_of(entry):
    """The tile of a list entry."""
    return entry & _TILE_MASK


@gluon.jit
def class_of(entry, shift, R):
    """Its token class."""
    return turned((entry >> _TILE_BITS) & _CLASS_MASK, shift, R)


@gluon.jit
def bias_of(entry):
    """log2 of its multiplicity, by one instruction for thirty: exact at powers of 2 and else off by at most 2^-22."""
    return libdevice.fast_log2f((entry >> _COUNT_SHIFT).to(gl.float32))


@gluon.jit
def find_work(item, block, visits_ptr, n_items, n_supers, full_supers, n_heads):
    """As `tile_walk.find_work`, of an item and a block."""
    super_index = block % n_supers
    head = (block // n_supers) % n_heads
    batch = block // n_supers // n_heads
    variant = (super_index >= full_supers).to(gl.int32)
    if visits_ptr is not None:
        super_index = item
        variant = gl.load(visits_ptr + super_index * _VISIT_COLUMNS + 4)
        item = gl.load(visits_ptr + super_index * _VISIT_COLUMNS + 5)
        n_items = gl.load(visits_ptr + super_index * _VISIT_COLUMNS + 6)
    return item, super_index, head, batch, variant, n_items


@gluon.jit
def segment_of(super_index, sizes, R, SHIFTED: gl.constexpr):
    """As `tile_walk.segment_of`: first row, place of the first token in it, and `end_of`'s ends of a super-segment."""
    super_rows, super_tokens, whole_rows, longer_classes, length, visits_ptr = sizes
    first_row = super_index * super_rows
    first_place = 0
    rows = whole_rows - first_row
    if SHIFTED:
        first_token = super_index * super_tokens
        tokens = gl.minimum(super_tokens, length - first_token)
        if visits_ptr is not None:
            first_token = gl.load(visits_ptr + super_index * _VISIT_COLUMNS)
            tokens = gl.load(visits_ptr + super_index * _VISIT_COLUMNS + 1)
        first_row = first_token // R
        first_place = first_token % R
        rows = tokens // R
        longer_classes = tokens % R
    return first_row, first_place, (rows, longer_classes, super_rows)


@gluon.jit
def stored_rows(super_index, sizes, R):
    """As `tile_walk.stored_rows`."""
    super_rows, super_tokens, _, _, length, visits_ptr = sizes
    if visits_ptr is None:
        first = super_index * super_rows
        rows = length // super_tokens * super_rows + (length % super_tokens + R - 1) // R
    else:
        first = gl.load(visits_ptr + super_index * _VISIT_COLUMNS + 3)
        rows = gl.load(visits_ptr + 7)
    return first, rows


@gluon.jit
def stats_row(super_index, visits_ptr, stats_rows):
    """As `tile_walk.stats_row`."""
    row = super_index * stats_rows
    if visits_ptr is not None:
        row = gl.load(visits_ptr + super_index * _VISIT_COLUMNS + 2)
    return row


@gluon.jit
def end_of(residue, ends):
    """Rows of a class in a super-segment; ``ends``: rows of all classes from its beginning on, how many classes have
    one more, and rows of the longest ones.
    """
    rows, longer_classes, super_rows = ends
    return gl.minimum(super_rows, rows + (residue < longer_classes).to(gl.int32))


@gluon.jit
def window_rows(query_row, apart, window, R):
    """As `tile_walk.window_rows`."""
    window_left, window_right = window
    return query_row + 1 - (window_left - apart + R) // R, query_row - 1 + (window_right + apart + R) // R


@gluon.jit
def seen_queries(query_row, rows, partner, key_row, residue, window, R, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr):
    """As `tile_walk.seen_queries`, of the ``rows`` of a tile that begins with ``query_row``: added last, for the loop
    around it takes other instructions otherwise.
    """
    if WINDOWED:
        first_row, last_row = window_rows(query_row + rows, partner - residue, window, R)
    if CAUSAL:
        last_row = query_row - (residue > partner).to(gl.int32) + rows
    seen = key_row[:, None] <= last_row[None, :]
    if WINDOWED:
        seen = seen & (key_row[:, None] >= first_row[None, :])
    return seen


@gluon.jit
def shifted(residue, row, first_place, R):
    """(place among the tokens of a row, row) of a class and a row that count from another token of a row."""
    place = residue + first_place
    next_row = (place >= R).to(gl.int32)
    return place - next_row * R, row + next_row


@gluon.jit
def box_place(residue, row, box, R, ROWS: gl.constexpr, SHIFTED: gl.constexpr):
    """As `tile_walk.box_place`; ``box``: the place of the super-segment's first token in a row, whole rows of the box,
    and tokens left over.
    """
    first_place, whole_rows, left_over = box
    if SHIFTED:
        residue, row = shifted(residue, row, first_place, R)
    moved = ((residue < left_over) & (row + ROWS > whole_rows)).to(gl.int32)
    return residue + moved * R, row - moved


@gluon.jit
def entry_place(entry, route, ROWS: gl.constexpr, SHIFTED: gl.constexpr):
    """`box_place` of the tile (this many rows) in a list entry. ``route``: first row of the super-segment, class
    shift, `box_place`'s box, and R.
    """
    base_row, shift, box, R = route
    row = base_row + tile_of(entry) * ROWS
    return box_place(class_of(entry, shift, R), row, box, R, ROWS, SHIFTED)

# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""How a program of a fused kernel finds its tile and reads its list: device functions shared by all of them."""

from __future__ import annotations

import triton
import triton.language as tl

from dilabench.kernels.fused.branch_group import CLASS_BITS, SPAN_COLUMNS, TILE_BITS, VISIT_COLUMNS

_TILE_BITS = tl.constexpr(TILE_BITS)
_TILE_MASK = tl.constexpr((1 << TILE_BITS) - 1)
_CLASS_MASK = tl.constexpr((1 << CLASS_BITS) - 1)
_COUNT_SHIFT = tl.constexpr(TILE_BITS + CLASS_BITS)
_ONLY_TILE_MASK = tl.constexpr((1 << (TILE_BITS + CLASS_BITS)) - 1)
_SPAN_COLUMNS = tl.constexpr(SPAN_COLUMNS)
_VISIT_COLUMNS = tl.constexpr(VISIT_COLUMNS)


@triton.jit
def split_program(n_items, n_blocks, item_major):
    """(item, block) of this program. Item-major order starts the heaviest tiles of all heads first; head-major order
    keeps one head's keys of one super-segment in the L2 cache.
    """
    pid = tl.program_id(0)
    if item_major:
        item = pid // n_blocks
        block = pid % n_blocks
    else:
        item = pid % n_items
        block = pid // n_items
    return item, block


@triton.jit
def split_block(block, n_supers, n_heads):
    """(super-segment, head, batch element) of a block."""
    return block % n_supers, (block // n_supers) % n_heads, block // n_supers // n_heads


@triton.jit
def find_work(visits_ptr, n_items, n_blocks, item_major, n_supers, full_supers, n_heads):
    """(item, super-segment, head, batch element, variant of lists, items of a variant) of this program. For documents
    the super-segment is the number of a visit, which says where it is and all else (`packing`).
    """
    item, block = split_program(n_items, n_blocks, item_major)
    super_index, head, batch = split_block(block, n_supers, n_heads)
    variant = (super_index >= full_supers).to(tl.int32)
    if visits_ptr is not None:
        super_index = item
        variant = tl.load(visits_ptr + super_index * _VISIT_COLUMNS + 4)
        item = tl.load(visits_ptr + super_index * _VISIT_COLUMNS + 5)
        n_items = tl.load(visits_ptr + super_index * _VISIT_COLUMNS + 6)
    return item, super_index, head, batch, variant, n_items


@triton.jit
def find_spans(spans_ptr, first, x, n_spans, COUNT: tl.constexpr, COLUMN: tl.constexpr):
    """For COUNT numbers x from ``first`` >= 0 on the last super-segment of documents whose column of the spans
    (`packing`) is at most x; most of them have the same.
    """
    begin = _last_span(spans_ptr, first, 0, n_spans, COLUMN)
    stop = begin + 1
    while tl.load(spans_ptr + stop * _SPAN_COLUMNS + COLUMN, stop < n_spans, 0x7FFFFFFF) < first + COUNT:
        stop += 1
    return _last_span(spans_ptr, x, begin, stop, COLUMN)


@triton.jit
def _last_span(spans_ptr, x, begin, stop, COLUMN: tl.constexpr):
    """The last one before ``stop`` whose column is at most x; that of ``begin`` is."""
    span = x * 0 + begin
    width = 1
    while width < stop - begin:
        width *= 2
    while width > 1:
        width = width // 2
        further = span + width
        at = tl.load(spans_ptr + further * _SPAN_COLUMNS + COLUMN, further < stop, 0x7FFFFFFF)
        span = tl.where(at <= x, further, span)
    return span


@triton.jit
def frame_of(head, heads_ptr, n_heads, n_kinds, ONE_CLASS: tl.constexpr):
    """(kind, class shift) of a head; of ONE_CLASS successive heads share a kind."""
    if ONE_CLASS:
        kind, shift = head // (n_heads // n_kinds), 0
    else:
        kind, shift = tl.load(heads_ptr + head * 2), tl.load(heads_ptr + head * 2 + 1)
    return kind, shift


@triton.jit
def query_item(item, variant, head, items_ptr, heads_ptr, n_kinds, n_items, n_heads, ONE_CLASS: tl.constexpr):
    """(address of the item's header, class shift of the head)."""
    kind, shift = frame_of(head, heads_ptr, n_heads, n_kinds, ONE_CLASS)
    return items_ptr + ((variant * n_kinds + kind) * n_items + item) * 5, shift


@triton.jit
def segment_of(
    super_index, visits_ptr, super_rows, super_tokens, whole_rows, longer_classes, length, R, SHIFTED: tl.constexpr
):
    """(first row, place of the first token in it, rows of all classes from there on, how many classes have one more) of
    a super-segment. SHIFTED: it may begin at another token than the first of a row, as all of documents do; else the
    place is 0, and rows go on to the end of the sequence.
    """
    first_row = super_index * super_rows
    first_place = 0
    rows = whole_rows - first_row
    if SHIFTED:
        first_token = super_index * super_tokens
        tokens = tl.minimum(super_tokens, length - first_token)
        if visits_ptr is not None:
            first_token = tl.load(visits_ptr + super_index * _VISIT_COLUMNS)
            tokens = tl.load(visits_ptr + super_index * _VISIT_COLUMNS + 1)
        first_row = first_token // R
        first_place = first_token % R
        rows = tokens // R
        longer_classes = tokens % R
    return first_row, first_place, rows, longer_classes


@triton.jit
def stored_rows(super_index, visits_ptr, super_rows, super_tokens, length, R):
    """(first row of a super-segment, rows of all) where rows of one class are stored one after another, as
    `branch_group.BranchGroup.stored_rows`.
    """
    if visits_ptr is None:
        first = super_index * super_rows
        rows = length // super_tokens * super_rows + (length % super_tokens + R - 1) // R
    else:
        first, rows = tl.load(visits_ptr + super_index * _VISIT_COLUMNS + 3), tl.load(visits_ptr + 7)
    return first, rows


@triton.jit
def stats_row(super_index, visits_ptr, stats_rows):
    """The first row of a super-segment in the statistics of a class."""
    row = super_index * stats_rows
    if visits_ptr is not None:
        row = tl.load(visits_ptr + super_index * _VISIT_COLUMNS + 2)
    return row


@triton.jit
def box_place(
    residue, row, first_place, whole_rows, left_over, R, ROWS: tl.constexpr, CUT: tl.constexpr, SHIFTED: tl.constexpr
):
    """The place of a tile of ROWS rows of a class in the box of `row_layout.residue_rows`: (place among the tokens of a
    row, row). CUT: ``left_over`` tokens may stand behind the whole rows. SHIFTED: classes count from ``first_place``.
    """
    if SHIFTED:
        residue += first_place
        next_row = (residue >= R).to(tl.int32)
        residue -= next_row * R
        row += next_row
    if CUT:
        moved = ((residue < left_over) & (row + ROWS > whole_rows)).to(tl.int32)
        residue += moved * R
        row -= moved
    return residue, row


@triton.jit
def load_tile(desc, tail_desc, batch, row, residue, head, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """[rows, HEAD] of a descriptor over [B, places, H, rows, D] (`box_place`), and the TAIL columns behind them (where
    there are none, the same again, unused); beyond the sequence and the head dim are zeros.
    """
    tile = desc.load([batch, residue, head, row, 0]).reshape([desc.block_shape[3], HEAD])
    tail = tile
    if TAIL:
        tail = tail_desc.load([batch, residue, head, row, HEAD]).reshape([desc.block_shape[3], TAIL])
    return tile, tail


@triton.jit
def scores(a, a_tail, b, b_tail, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    """a . b^T over all columns."""
    products = tl.dot(a, b.T, input_precision=PRECISION)
    if TAIL:
        products = tl.dot(a_tail, b_tail.T, products, input_precision=PRECISION)
    return products


@triton.jit
def capped(products, cap, PRECISION: tl.constexpr):
    """tanh(products * cap), to the last bits; near 0 in float32 by a polynomial (Cephes), where the other form
    cancels.
    """
    x = products * cap
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.math.exp2(size * 2.8853900817779268) + 1.0)
    far = tl.where(x < 0, -far, far)
    if PRECISION == "tf32":
        # Half precision.
        return far
    z = x * x
    near = -5.70498872745e-3 * z + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = near * z - 3.33332819422e-1
    return tl.where(size < 0.625, near * z * x + x, far)


@triton.jit
def slopes_of_cap(tanh):
    """The derivative of `capped`, 1 - tanh², and 0 for hidden pairs, whose tanh is -inf."""
    return tl.where(tanh >= -1.0, 1.0 - tanh * tanh, 0.0)


@triton.jit
def add_weighted(acc, acc_tail, weights, x, x_tail, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    """acc + weights . x for both parts of the columns."""
    weights = weights.to(x.dtype)
    acc = tl.dot(weights, x, acc, input_precision=PRECISION)
    if TAIL:
        acc_tail = tl.dot(weights, x_tail, acc_tail, input_precision=PRECISION)
    return acc, acc_tail


@triton.jit
def scaled(x, tail, by, TAIL: tl.constexpr):
    """Both parts of the columns, row by row times ``by``."""
    x = x * by[:, None]
    if TAIL:
        tail = tail * by[:, None]
    return x, tail


@triton.jit
def zero_tail(ROWS: tl.constexpr, TAIL: tl.constexpr):
    """An accumulator of TAIL columns; of none, a number."""
    tail = 0.0
    if TAIL:
        tail = tl.zeros([ROWS, TAIL], tl.float32)
    return tail


@triton.jit
def place_of(row, place, batch, head, length, n_heads, R, HEAD_DIM: tl.constexpr):
    """The offset of the token at a place of a row, or beyond it, in a contiguous [B, N, H, D]."""
    token = batch.to(tl.int64) * length + row * R + place
    return (token * n_heads + head) * HEAD_DIM


@triton.jit
def store_tile(
    x,
    tail,
    ptr,
    rows,
    kept,
    n_heads,
    R,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Write both parts of the columns of the first ``rows`` rows of a class, from ``ptr`` on; ADD: to
    what is there times ``kept``.
    """
    store_columns(x, ptr, rows, kept, n_heads, R, ADD, ROWS, HEAD_DIM, 0, HEAD)
    if TAIL:
        store_columns(tail, ptr, rows, kept, n_heads, R, ADD, ROWS, HEAD_DIM, HEAD, TAIL)


@triton.jit
def store_columns(
    x,
    ptr,
    rows,
    kept,
    n_heads,
    R,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write columns FIRST, FIRST + 1, ... of rows of a class; ADD: to what is there times ``kept``."""
    column = FIRST + tl.arange(0, COLUMNS)
    at = ptr + tl.arange(0, ROWS)[:, None] * (n_heads * R * HEAD_DIM) + column[None, :]
    there = (tl.arange(0, ROWS) < rows)[:, None] & (column < HEAD_DIM)[None, :]
    if ADD:
        x += tl.load(at, there, 0.0).to(tl.float32) * kept
    tl.store(at, x.to(ptr.dtype.element_ty), there)


@triton.jit
def end_of(residue, rows, longer_classes, super_rows):
    """Rows of a class in a super-segment (`segment_of`)."""
    return tl.minimum(super_rows, rows + (residue < longer_classes).to(tl.int32))


@triton.jit
def turned(u, shift, R):
    """Class ``u`` of a frame as a token class: (u + shift) mod R for both below R."""
    residue = u + shift
    return tl.where(residue < R, residue, residue - R)


@triton.jit
def unpack(entry, shift, R, ONE_CLASS: tl.constexpr):
    """(tile, token class, log2 of the multiplicity) of a list entry; of ONE_CLASS it has the tile alone."""
    if ONE_CLASS:
        tile, partner, bias = entry & _ONLY_TILE_MASK, 0, 0.0
    else:
        partner = turned((entry >> _TILE_BITS) & _CLASS_MASK, shift, R)
        tile, bias = entry & _TILE_MASK, tl.log2((entry >> _COUNT_SHIFT).to(tl.float32))
    return tile, partner, bias


@triton.jit
def window_rows(query_row, apart, window, R):
    """First and last row of keys that a query sees, which is the class ``apart`` of them ahead in a row. window: tokens
    before and behind it.
    """
    window_left, window_right = window
    return query_row + 1 - (window_left - apart + R) // R, query_row - 1 + (window_right + apart + R) // R


@triton.jit
def seen_keys(
    query_row,
    residue,
    key_tile,
    partner,
    end,
    window,
    R,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Which keys of a tile of class ``partner`` the queries of class ``residue`` see; rows count from the start of the
    super-segment. ``end`` is that of the partner's rows; causal queries before it see no key beyond it anyway.
    """
    key_row = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if CAUSAL:
        # Equal rows of two classes are ordered by class: a later class is a later token.
        last_row = query_row - (partner > residue).to(tl.int32)
        seen = key_row[None, :] <= last_row[:, None]
    else:
        seen = (key_row < end)[None, :]
    if WINDOWED:
        first_row, last_row = window_rows(query_row, residue - partner, window, R)
        seen = seen & (key_row[None, :] >= first_row[:, None])
        if not CAUSAL:
            seen = seen & (key_row[None, :] <= last_row[:, None])
    return seen


@triton.jit
def seen_queries(query_row, partner, key_row, residue, window, R, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """[keys, queries]: which queries of class ``partner`` see keys of class ``residue``, by `seen_keys`."""
    seen = (key_row >= 0)[:, None]
    if WINDOWED:
        first_row, last_row = window_rows(query_row, partner - residue, window, R)
    if CAUSAL:
        last_row = query_row - (residue > partner).to(tl.int32)
    if CAUSAL or WINDOWED:
        seen = key_row[:, None] <= last_row[None, :]
    if WINDOWED:
        seen = seen & (key_row[:, None] >= first_row[None, :])
    return seen


@triton.jit
def hiding_ranges(bounds_ptr, key_row, key_rows, RANGES: tl.constexpr):
    """(start, stop) of each range of rows that these keys are hidden from, one after the other."""
    ranges = ()
    for index in tl.static_range(RANGES):
        at = bounds_ptr + 2 * index * key_rows + key_row
        # Triton has no unpacking.
        ranges = ranges + (tl.load(at, key_row < key_rows, 0), tl.load(at + key_rows, key_row < key_rows, 0))  # type: ignore[assignment]  # noqa: RUF005
    return ranges


@triton.jit
def outside(seen, query_row, ranges, RANGES: tl.constexpr):
    """The pairs in ``seen`` whose key no range of rows (`hiding_ranges`) hides."""
    for index in tl.static_range(RANGES):
        seen = seen & ((query_row < ranges[2 * index]) | (query_row >= ranges[2 * index + 1]))
    return seen

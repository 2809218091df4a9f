# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The kernel that writes where documents lie and which programs visit them, for all lists of a pass (`packing`)."""

from __future__ import annotations

import triton
import triton.language as tl

# Documents, super-segments or visits that a program handles at a time.
AT_ONCE = 128
# Numbers that the kernel reads of a request: the tokens of a whole super-segment, R, the rows of a tile, of a tile of
# statistics, and all stored rows; the items of a variant; where visits begin, and how many there are; where its tails
# begin, and how many there are. The items of each variant follow the tails.
REQUEST_COLUMNS = 10
# Tokens of a block.
BLOCK_TOKENS = 64


@triton.jit(
    do_not_specialize=("n_bounds", "n_documents", "n_spans", "n_requests", "tokens", "blocks_at", "documents_at")
)
def lists_kernel(
    bounds_ptr,
    requests_ptr,
    lists_ptr,
    n_bounds,
    n_documents,
    n_spans,
    n_requests,
    tokens,
    blocks_at,
    documents_at,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    VISIT: tl.constexpr,
    REQUEST: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the spans and visits of one document for one request (`DocumentLists`): whole super-segments of all
    documents are visited first, then the shorter last ones, the longest first. The program behind the last document
    writes those that pad. ``blocks_at``, ``documents_at``: where these of `PassLists` begin.
    """
    index = tl.program_id(0) // (n_documents + 1)
    document = tl.program_id(0) % (n_documents + 1)
    request = requests_ptr + index * REQUEST
    most = tl.load(request)
    modulus = tl.load(request + 1)
    tile = tl.load(request + 2)
    stats_tile = tl.load(request + 3)
    stored_rows = tl.load(request + 4)
    listed = tl.load(request + 5)
    visits_ptr = lists_ptr + tl.load(request + 6)
    n_visits = tl.load(request + 7)
    tails_ptr = requests_ptr + tl.load(request + 8)
    n_tails = tl.load(request + 9)
    items_ptr = tails_ptr + n_tails
    blocks_ptr = lists_ptr + blocks_at
    documents_ptr = lists_ptr + documents_at
    pads = document == n_documents
    begin, length = _extent_of(document, bounds_ptr, n_bounds, tokens)
    whole = length // most
    rest = length % most
    rows_of_whole = (most + modulus - 1) // modulus
    stats_of_whole = (rows_of_whole + stats_tile - 1) // stats_tile * stats_tile
    items_of_whole = tl.load(items_ptr)
    # Sums over all documents, and over those before this one.
    all_whole = whole * 0
    whole_before = whole * 0
    supers_before = whole * 0
    rows_before = whole * 0
    stats_before = whole * 0
    visits_before = whole * 0
    for first in range(0, n_documents, BLOCK):
        other = first + tl.arange(0, BLOCK)
        _, other_length = _extent_of(other, bounds_ptr, n_bounds, tokens)
        other_whole = other_length // most
        other_rest = other_length % most
        before = (other < document).to(tl.int32)
        rows = (other_rest + modulus - 1) // modulus
        stats = (rows + stats_tile - 1) // stats_tile * stats_tile
        all_whole += tl.sum(other_whole)
        whole_before += tl.sum(before * other_whole)
        supers_before += tl.sum(before * (other_whole + (other_rest > 0).to(tl.int32)))
        rows_before += tl.sum(before * (other_whole * rows_of_whole + rows))
        stats_before += tl.sum(before * (other_whole * stats_of_whole + stats))
        sooner = (other_rest > 0) & ((other_rest > rest) | ((other_rest == rest) & (before > 0)))
        variant = _variant_of(other_rest, most, modulus, tile, tails_ptr, n_tails)
        visits_before += tl.sum(tl.load(items_ptr + variant, sooner, 0))
    variant = _variant_of(rest, most, modulus, tile, tails_ptr, n_tails)
    n_supers = whole + (rest > 0).to(tl.int32)
    if pads:
        n_supers = n_spans - supers_before
    spans_ptr = lists_ptr + (index * n_spans + supers_before) * SPAN
    for first in range(0, n_supers, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < n_supers
        span = spans_ptr + place * SPAN
        tl.store(span, tl.where(pads, 0x7FFFFFFF, begin + place * most), inside)
        tl.store(span + 1, tl.where(pads, 0x7FFFFFFF, tl.minimum(most, length - place * most)), inside)
        tl.store(span + 2, tl.where(pads, 0x7FFFFFFF, stats_before + place * stats_of_whole), inside)
        tl.store(span + 3, tl.where(pads, 0x7FFFFFFF, rows_before + place * rows_of_whole), inside)
    of_document = documents_ptr + document * (n_requests + 1)
    tl.store(of_document + 1 + index, rows_before)
    if index == 0:
        tl.store(of_document, begin)
        first_block = (begin + TOKENS - 1) // TOKENS
        n_blocks = (begin + length + TOKENS - 1) // TOKENS - first_block
        for first in range(0, n_blocks, BLOCK):
            place = first + tl.arange(0, BLOCK)
            tl.store(blocks_ptr + first_block + place, place * 0 + document, place < n_blocks)
    n_items = whole * items_of_whole
    at = visits_ptr + whole_before * items_of_whole * VISIT
    for first in range(0, n_items, BLOCK):
        place = first + tl.arange(0, BLOCK)
        visit, inside = at + place * VISIT, place < n_items
        number = place // items_of_whole
        tl.store(visit, begin + number * most, inside)
        tl.store(visit + 1, number * 0 + most, inside)
        tl.store(visit + 2, stats_before + number * stats_of_whole, inside)
        tl.store(visit + 3, rows_before + number * rows_of_whole, inside)
        tl.store(visit + 4, number * 0, inside)
        tl.store(visit + 5, place % items_of_whole, inside)
        tl.store(visit + 6, number * 0 + listed, inside)
        tl.store(visit + 7, number * 0 + stored_rows, inside)
    visits_before += all_whole * items_of_whole
    n_items = tl.load(items_ptr + variant, rest > 0, 0)
    if pads:
        n_items = n_visits - visits_before
    at = visits_ptr + visits_before * VISIT
    for first in range(0, n_items, BLOCK):
        place = first + tl.arange(0, BLOCK)
        visit, inside = at + place * VISIT, place < n_items
        # An item that does not exist visits nothing.
        tl.store(visit, place * 0 + tl.where(pads, 0, begin + whole * most), inside)
        tl.store(visit + 1, place * 0 + rest, inside)
        tl.store(visit + 2, place * 0 + tl.where(pads, 0, stats_before + whole * stats_of_whole), inside)
        tl.store(visit + 3, place * 0 + tl.where(pads, 0, rows_before + whole * rows_of_whole), inside)
        tl.store(visit + 4, place * 0 + tl.where(pads, 0, variant), inside)
        tl.store(visit + 5, tl.where(pads, listed - 1, place), inside)
        tl.store(visit + 6, place * 0 + listed, inside)
        tl.store(visit + 7, place * 0 + stored_rows, inside)


@triton.jit
def _extent_of(document, bounds_ptr, n_bounds, tokens):
    """The first token of documents, and their tokens: none behind the last bound."""
    begin = tl.load(bounds_ptr + document, document < n_bounds, tokens)
    return begin, tl.load(bounds_ptr + document + 1, document + 1 < n_bounds, tokens) - begin


@triton.jit
def _variant_of(rest, most, modulus, tile, tails_ptr, n_tails):
    """The variant of lists of super-segments of ``rest`` < ``most`` tokens: 1 and the number of tails below their tail
    (`BranchGroup.tails_in_tiles`).
    """
    rows = (rest + modulus - 1) // modulus
    in_tiles = (rows + tile - 1) // tile * tile
    tail = tl.minimum(modulus * in_tiles - (rest // modulus < in_tiles).to(tl.int32), most - 1)
    below = rest * 0
    width = 1
    while width <= n_tails:
        width *= 2
    while width > 1:
        width = width // 2
        further = below + width
        is_below = tl.load(tails_ptr + further - 1, further <= n_tails, 0x7FFFFFFF) < tail
        below = tl.where(is_below, further, below)
    return tl.minimum(below + 1, n_tails)

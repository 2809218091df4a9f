# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The softmax of the Hopper kernels in the forward pass: one online step, and the end.

``form`` holds the compile-time constants: ROWS (of queries that share a softmax), BLOCK_N, CAUSAL, RAGGED, WINDOWED,
RANGES (of rows that hide each key), LARGEST (of `LARGEST_SUM`, or 0), MERGE (with the stored results), COMPACT (only
covered rows are stored), DIM and TAIL (the last columns, in separate tiles).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from dilabench.kernels.fused.sm90.tile_walk import bias_of, class_of, end_of, stored_rows, tile_of, window_rows

# Steps between two that renew the running maximum, at most.
KEPT = gl.constexpr(15)
# Largest sum of a row's weights in one step without a new maximum: then no weight is rounded to infinity, nor a sum of
# many with values below 2^60.
LARGEST_SUM = {torch.float16: 65504.0, torch.bfloat16: 2.0**64}


@gluon.jit
def _hidden(logits, entry, place, bounds, R, form: gl.constexpr, LAYOUT: gl.constexpr):
    """Logits, -inf for keys that a query does not see; arguments as of `weigh`. ``bounds``: the ranges of rows
    that each key is hidden from, the number of keys, and the window.
    """
    ROWS: gl.constexpr = form.value.ROWS
    BLOCK_N: gl.constexpr = form.value.BLOCK_N
    CAUSAL: gl.constexpr = form.value.CAUSAL
    RANGES: gl.constexpr = form.value.RANGES
    first_row, residue, shift, ends = place
    # All keys of a tile, or its first ones.
    KEYS: gl.constexpr = logits.shape[1]
    key_row = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    partner = class_of(entry, shift, R)
    if CAUSAL:
        ahead = first_row - (partner > residue).to(gl.int32) - tile_of(entry) * BLOCK_N
        last = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + ahead
        seen = key_row[None, :] <= last[:, None]
    else:
        seen = (key_row < end_of(partner, ends) - tile_of(entry) * BLOCK_N)[None, :]
    bounds_ptr, key_rows, window = bounds
    if form.value.WINDOWED:
        query_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + (first_row - tile_of(entry) * BLOCK_N)
        first_key, last_key = window_rows(query_row, residue - partner, window, R)
        seen = seen & (key_row[None, :] >= first_key[:, None])
        if not CAUSAL:
            seen = seen & (key_row[None, :] <= last_key[:, None])
    logits = gl.where(seen, logits, float("-inf"))
    for index in gl.static_range(RANGES):
        # Ranges of rows that a key is hidden from (block_sparse), key by key.
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + first_row
        at = bounds_ptr + 2 * index * key_rows + tile_of(entry) * BLOCK_N + key_row
        start, stop = gl.load(at), gl.load(at + key_rows)
        hidden = (row[:, None] >= start[None, :]) & (row[:, None] < stop[None, :])
        logits = gl.where(hidden, float("-inf"), logits)
    return logits


@gluon.jit
def weigh(
    logits,
    sums,
    entry,
    scale_log2,
    place,
    bounds,
    MASK: gl.constexpr,
    RENEWS: gl.constexpr,
    R,
    form: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Weights, ``sums`` with them, and the decay of what was summed before. ``place``: first row, class and class shift
    of the queries, and `end_of`'s ends.

    sums: running maximum, running sum, and the largest sum of weights of a step that does not RENEW the maximum but
    leaves it as it was, finite; its weights may exceed 1. For the maximum of a softmax is any number that keeps the
    weights in range (Hong et al. 2023, FlashDecoding++, section 3): that of some keys serves for the following ones, as
    long as what is summed shows that no weight overflowed.
    """
    top, total, largest = sums
    bias = bias_of(entry)
    if MASK:
        logits = _hidden(logits, entry, place, bounds, R, form, LAYOUT)
    decay = 1.0
    if RENEWS:
        new_top = gl.maximum(top, gl.max(logits, 1) * scale_log2 + bias)
        safe_top = new_top
        if MASK:
            safe_top = gl.where(new_top == float("-inf"), 0.0, new_top)
        p = gl.exp2(logits * scale_log2 - (safe_top - bias)[:, None])
        decay = gl.exp2(top - safe_top)
        top, total = new_top, total * decay + gl.sum(p, 1)
    else:
        p = gl.exp2(logits * scale_log2 - (top - bias)[:, None])
        added = gl.sum(p, 1)
        total, largest = total + added, gl.maximum(largest, added)
    return p, (top, total, largest), decay


@gluon.jit
def walk(
    STEP: gl.constexpr,
    n_full,
    n,
    kept,
    state,
    given,
    form: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):
    """Take all steps of a list but the first; ``STEP`` is given its number and whether it masks and renews the maximum.

    Up to ``kept`` steps leave the running maximum before one renews it. In float16, where weights overflow soon, they
    increase to this number, because the maximum still rises much after the first keys.
    """
    CAUSAL: gl.constexpr = form.value.CAUSAL
    LARGEST: gl.constexpr = form.value.LARGEST
    RANGES: gl.constexpr = form.value.RANGES
    # Without a whole tile the maximum of some rows may still be that of no key.
    kept = gl.where(n_full > 0, kept, 0)
    between = gl.minimum(kept, KEPT if LARGEST > 65504.0 else 0)
    for masked in gl.static_range(2 if CAUSAL or form.value.RAGGED or form.value.WINDOWED or RANGES > 0 else 1):
        begin = 1 if masked == 0 else gl.maximum(1, n_full)
        end = n_full if masked == 0 else n
        # Few tiles are cut by the end of a sequence.
        if LARGEST > 0 and (masked == 0 or (CAUSAL and RANGES == 0)):
            while begin < end:
                renewed = gl.minimum(begin + between, end)
                for j in range(begin, renewed):
                    state = STEP(j, state, given, masked == 1, False, form, S_LAYOUT, O_LAYOUT)
                for j in range(renewed, gl.minimum(renewed + 1, end)):
                    state = STEP(j, state, given, masked == 1, True, form, S_LAYOUT, O_LAYOUT)
                begin = renewed + 1
                between = gl.minimum(2 * between + 1, kept)
        else:
            for j in range(begin, end):
                state = STEP(j, state, given, masked == 1, True, form, S_LAYOUT, O_LAYOUT)
    return state


@gluon.jit
def _inside(rows, columns, end, COLUMNS: gl.constexpr, THERE: gl.constexpr):
    """Which elements of COLUMNS columns are before row ``end`` and in the first THERE columns."""
    inside = (rows < end)[:, None]
    if THERE < COLUMNS:
        inside = inside & (columns < THERE)[None, :]
    return inside


@gluon.jit
def _store_columns(
    acc,
    out_ptr,
    row_stride,
    end,
    mine,
    theirs,
    MERGE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    THERE: gl.constexpr,
):
    """Write rows before ``end`` of ``acc * mine``, and with MERGE what is there times ``theirs`` added."""
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = acc.type.layout
    acc = acc * gl.convert_layout(mine, gl.SliceLayout(1, LAYOUT))[:, None]
    if MERGE:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
        at = out_ptr + rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
        old = gl.load(at, _inside(rows, columns, end, COLUMNS, THERE), 0.0).to(gl.float32)
        acc += old * gl.convert_layout(theirs, gl.SliceLayout(1, LAYOUT))[:, None]
    result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), STORE_LAYOUT)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE_LAYOUT))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, STORE_LAYOUT))
    at = out_ptr + rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
    gl.store(at, result, _inside(rows, columns, end, COLUMNS, THERE))


@gluon.jit
def finish(acc, tail, top, total, results, whose, place, R, form: gl.constexpr, LAYOUT: gl.constexpr):
    """Write out and lse of ROWS queries from the accumulators, the running maximum and the running sum. ``whose``:
    batch item, head and number of heads, super-segment, `segment_of`'s sizes, first row of the super-segment and the
    place of its first token in that; ``place`` as in `weigh`.
    """
    DIM: gl.constexpr = form.value.DIM
    TAIL: gl.constexpr = form.value.TAIL
    HEAD: gl.constexpr = form.value.HEAD
    ROWS: gl.constexpr = form.value.ROWS
    MERGE: gl.constexpr = form.value.MERGE
    out_ptr, lse_ptr, mass_ptr = results
    batch, head, n_heads, super_index, sizes, base_row, first_place = whose
    length = sizes[4]
    first_row, residue, _, ends = place
    token = ((base_row + first_row).to(gl.int64)) * R + residue + first_place
    # Rows beyond the end of the segment are another's, or none.
    end = end_of(residue, ends) - first_row
    lse_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    mine = 1.0
    if mass_ptr is not None:
        mass_at = mass_ptr + head.to(gl.int64) * length + token + lse_rows * R
        mass = gl.load(mass_at, lse_rows < end, float("-inf")) * 1.4426950408889634
        higher = gl.maximum(top, mass)
        mine = gl.exp2(top - higher)
        total = total * mine + gl.exp2(mass - higher)
        top = higher
    if form.value.RANGES > 0:
        # A row may see no key at all: its out is 0 and its lse -inf.
        top = gl.where(total == 0.0, float("-inf"), top)
        total = gl.where(total == 0.0, 1.0, total)
    mine = mine / total
    theirs = mine
    lse = (top + gl.log2(total)) * 0.6931471805599453
    # Rows are stored at their tokens, or those that the class has one after another.
    first, step, stored = token, R, length
    if form.value.COMPACT:
        first_stored, stored = stored_rows(super_index, sizes, R)
        first, step = (first_stored + first_row).to(gl.int64), 1
    lse_at = lse_ptr + (batch * n_heads + head).to(gl.int64) * stored + first + lse_rows * step
    # Until here programs of this launch may run together with the last programs of the launch before, which may write
    # the results that these merge with. Waiting for this launch waits for both.
    gdc_wait()
    if MERGE:
        old_lse = gl.load(lse_at, lse_rows < end, float("-inf"))
        higher = gl.maximum(old_lse, lse)
        ours = gl.exp(lse - higher)
        theirs = gl.exp(old_lse - higher)
        lse = higher + gl.log(ours + theirs)
        mine = mine * ours / (ours + theirs)
        theirs = theirs / (ours + theirs)
    out_at = out_ptr + ((batch.to(gl.int64) * stored + first) * n_heads + head) * DIM
    row_stride = n_heads * step * DIM
    _store_columns(acc, out_at, row_stride, end, mine, theirs, MERGE, ROWS, HEAD, DIM)
    if TAIL:
        _store_columns(tail, out_at + HEAD, row_stride, end, mine, theirs, MERGE, ROWS, TAIL, DIM - HEAD)
    gl.store(lse_at, lse, lse_rows < end)

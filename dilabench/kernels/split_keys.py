# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Few queries, the last rows of many keys: keys are split between programs, whose results are merged.

Heads that read the same keys are rows of one tile, so that each key is read once. The keys of a row are strided
segments (`patterns.StridedSegments`): dense attention is one of all keys, a branch of LongNet one of every r-th key.
Numbers of keys, and bounds of packed sequences, are read by the kernels: the host need not know them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import e, log2
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.fused.row_layout import product_precision
from dilabench.kernels.key_segments import KeyBranches, Split, columns_for, processors, split_for
from dilabench.kernels.launch_cache import COPY_BYTES, Launch, LaunchCache, Tensors, stride_unit
from dilabench.kernels.softmax import finite
from dilabench.workload.spec import Window

_NUMBERS = (
    *("q_b", "q_n", "q_h", "k_b", "k_n", "k_h", "v_b", "v_n", "v_h", "out_b", "lse_b", "lse_h", "first_lse"),
    *("n_queries", "n_keys", "n_rows", "n_heads", "heads_per_kv", "n_branches", "n_sequences"),
    *("n_splits", "n_items", "left", "right"),
)
# They lie anywhere in a caller's memory.
_ANYWHERE = ("lengths_ptr", "spans_ptr", "bounds_ptr", "key_bounds_ptr", "lse_ptr")


@triton.jit
def _sequence(sequence, lengths_ptr, spans_ptr, bounds_ptr, key_bounds_ptr, n_queries, n_keys):
    # The first query and key of a sequence in its item of the batch, and how many of both there are.
    first_query, first_key, rows, length = sequence * 0, sequence * 0, n_queries, n_keys
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + sequence), 0), n_keys).to(tl.int32)
    if spans_ptr is not None:
        first_key = tl.minimum(tl.maximum(tl.load(spans_ptr + 2 * sequence), 0), n_keys).to(tl.int32)
        end = tl.minimum(tl.load(spans_ptr + 2 * sequence + 1), n_keys).to(tl.int32)
        length = tl.maximum(end - first_key, 0)
    if bounds_ptr is not None:
        first_query = tl.load(bounds_ptr + sequence).to(tl.int32)
        rows = tl.load(bounds_ptr + sequence + 1).to(tl.int32) - first_query
        first_key = tl.load(key_bounds_ptr + sequence).to(tl.int32)
        length = tl.load(key_bounds_ptr + sequence + 1).to(tl.int32) - first_key
    return first_query, first_key, rows, length


@triton.jit
def _until(place, rate):
    # How far it is from a place, which may be before 0, to the next multiple of the rate.
    return ((-place) % rate + rate) % rate


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    branches_ptr,
    lengths_ptr,
    spans_ptr,
    bounds_ptr,
    key_bounds_ptr,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    out_b,
    lse_b,
    lse_h,
    first_lse,
    n_queries,
    n_keys,
    n_rows,
    n_heads,
    heads_per_kv,
    n_branches,
    n_splits,
    n_items,
    left,
    right,
    scale,
    HEADS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs of the same keys are neighbours, then those of neighbouring heads.
    rest = tl.program_id(0)
    item = rest % n_items
    rest = rest // n_items
    n_sets = n_heads // HEADS
    first_head = rest % n_sets * HEADS
    rest = rest // n_sets
    split = rest % n_splits
    rest = rest // n_splits
    branch = rest % n_branches
    sequence = rest // n_branches
    first_query, first_key, rows, length = _sequence(
        sequence, lengths_ptr, spans_ptr, bounds_ptr, key_bounds_ptr, n_queries, n_keys
    )
    segment_length = tl.load(branches_ptr + branch * (2 + n_heads))
    rate = tl.load(branches_ptr + branch * (2 + n_heads) + 1)
    residue = tl.load(branches_ptr + branch * (2 + n_heads) + 2 + first_head)
    # An item of a batch, of which packed sequences have one.
    batch = sequence.to(tl.int64)
    if bounds_ptr is not None:
        batch = batch * 0
    slot = branch * n_splits + split
    # Of queries and keys, in one or two products, and of values and out.
    columns = tl.arange(0, COLUMNS)
    inside = columns < DIM
    value_columns = tl.arange(0, VALUE_COLUMNS)
    value_inside = value_columns < VALUE_DIM
    kv_head = first_head // heads_per_kv
    # Queries before the first key see nothing under a mask; without one they are of the first segment.
    start = length - rows
    first_segment = tl.maximum(start, 0) // segment_length
    stop_segment = tl.where((residue < 0) | (rows <= 0), first_segment, tl.maximum(length - 1, 0) // segment_length + 1)
    for segment in range(first_segment, stop_segment):
        place = segment * segment_length
        n_here = (tl.minimum(segment_length, length - place) - residue + rate - 1) // rate
        n_here = tl.maximum(n_here, 0)
        # Queries on the residue: from `first` in the segment on, every `rate`-th.
        lowest = tl.where(segment == first_segment, start - place, 0)
        first = lowest + _until(lowest - residue, rate)
        count = tl.maximum(tl.minimum(segment_length, start + rows - place) - first + rate - 1, 0) // rate
        for block in range(item, tl.cdiv(count * HEADS, ROWS), n_items):
            row = block * ROWS + tl.arange(0, ROWS)
            valid = row < count * HEADS
            query = place + first + row // HEADS * rate - start
            head = first_head + row % HEADS
            # Of each row, and of the first and the last: its number among the keys.
            own = (first - residue) // rate + row // HEADS
            begin, end = 0, n_here
            if LEFT:
                begin = tl.maximum((first - residue) // rate + block * ROWS // HEADS - left // rate, 0)
            if RIGHT:
                last = (tl.minimum((block + 1) * ROWS, count * HEADS) - 1) // HEADS
                end = tl.minimum((first - residue) // rate + last + right // rate + 1, n_here)
            step = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), KEYS), n_splits) * KEYS
            begin += split * step
            end = tl.minimum(begin + step, end)

            q_row = (batch * q_b + (first_query + query).to(tl.int64) * q_n + head * q_h) * UNIT
            q = tl.load(q_ptr + q_row[:, None] + columns[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            if REST:
                rest_columns = COLUMNS + tl.arange(0, REST)
                rest_inside = rest_columns < DIM
                rest_there = valid[:, None] & rest_inside[None, :]
                q_rest = tl.load(q_ptr + q_row[:, None] + rest_columns[None, :], mask=rest_there, other=0.0)
            token = (first_key + place + residue + (begin + tl.arange(0, KEYS)) * rate).to(tl.int64)
            k_at = k_ptr + (batch * k_b + kv_head * k_h + token * k_n)[None, :] * UNIT + columns[:, None]
            v_at = v_ptr + (batch * v_b + kv_head * v_h + token * v_n)[:, None] * UNIT + value_columns[None, :]
            if REST:
                k_rest_at = k_ptr + (batch * k_b + kv_head * k_h + token * k_n)[None, :] * UNIT + rest_columns[:, None]
            k_step = (rate * KEYS).to(tl.int64) * k_n * UNIT
            v_step = (rate * KEYS).to(tl.int64) * v_n * UNIT
            top = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            out = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
            for at in range(begin, end, KEYS):
                key = at + tl.arange(0, KEYS)
                there = key < end
                if COLUMNS <= DIM:
                    k = tl.load(k_at, mask=there[None, :], other=0.0)
                else:
                    k = tl.load(k_at, mask=there[None, :] & inside[:, None], other=0.0)
                scores = tl.dot(q, k, input_precision=PRECISION)
                if REST:
                    if COLUMNS + REST == DIM:
                        k_rest = tl.load(k_rest_at, mask=there[None, :], other=0.0)
                    else:
                        k_rest = tl.load(k_rest_at, mask=there[None, :] & rest_inside[:, None], other=0.0)
                    scores = tl.dot(q_rest, k_rest, scores, input_precision=PRECISION)
                    k_rest_at += k_step
                scores *= scale
                seen = there[None, :]
                if LEFT:
                    seen = seen & (key[None, :] >= (own - left // rate)[:, None])
                if RIGHT:
                    seen = seen & (key[None, :] <= (own + right // rate)[:, None])
                scores = tl.where(seen, scores, float("-inf"))
                new_top = tl.maximum(top, tl.max(scores, 1))
                safe = finite(new_top)
                weights = tl.exp2(scores - safe[:, None])
                kept = tl.exp2(top - safe)
                total = total * kept + tl.sum(weights, 1)
                if VALUE_COLUMNS == VALUE_DIM:
                    v = tl.load(v_at, mask=there[:, None], other=0.0)
                else:
                    v = tl.load(v_at, mask=there[:, None] & value_inside[None, :], other=0.0)
                out = tl.dot(weights.to(v.dtype), v, out * kept[:, None], input_precision=PRECISION)
                top = new_top
                k_at += k_step
                v_at += v_step
            out = out / tl.where(total == 0.0, 1.0, total)[:, None]
            lse = top + tl.log2(total)
            stored = (first_query + query).to(tl.int64)
            if WHOLE:
                # The only part: the result itself.
                lse = lse * 0.6931471805599453
            else:
                stored += slot.to(tl.int64) * n_rows
            out_at = out_ptr + (batch * out_b + (stored * n_heads + head) * VALUE_DIM)[:, None] + value_columns[None, :]
            # The merge does not read what weighs nothing.
            filled = valid if WHOLE else valid & (total > 0.0)
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=filled[:, None] & value_inside[None, :])
            lse_row = stored * n_heads + head if not WHOLE else head * lse_h + stored
            tl.store(lse_ptr + first_lse + batch * lse_b + lse_row, lse, mask=valid)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def _merge_kernel(
    out_ptr,
    lse_ptr,
    parts_ptr,
    branches_ptr,
    lengths_ptr,
    spans_ptr,
    bounds_ptr,
    key_bounds_ptr,
    out_b,
    lse_b,
    lse_h,
    first_lse,
    n_queries,
    n_keys,
    n_rows,
    n_heads,
    n_branches,
    n_splits,
    n_items,
    n_sequences,
    VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    rest = tl.program_id(0)
    head = rest % n_heads
    rest = rest // n_heads
    item = rest % n_items
    sequence = rest // n_items
    columns = tl.arange(0, VALUE_COLUMNS)
    inside = columns < VALUE_DIM
    if bounds_ptr is None:
        batch = sequence.to(tl.int64)
        first_query, _, rows, length = _sequence(sequence, lengths_ptr, spans_ptr, None, None, n_queries, n_keys)
    else:
        batch = sequence.to(tl.int64) * 0
        # Behind the last sequence there may be rows of none, which see nothing.
        in_one = tl.minimum(sequence, n_sequences - 1)
        first_query, _, rows, length = _sequence(in_one, None, None, bounds_ptr, key_bounds_ptr, n_queries, n_keys)
        if sequence == n_sequences:
            first_query += rows
            rows = n_queries - first_query
            length = 0
    for query in range(item, rows, n_items):
        position = length - rows + query
        row = (batch * n_queries + first_query + query) * n_heads + head
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        out = tl.zeros((VALUE_COLUMNS,), tl.float32)
        for branch in range(n_branches):
            segment_length = tl.load(branches_ptr + branch * (2 + n_heads))
            rate = tl.load(branches_ptr + branch * (2 + n_heads) + 1)
            residue = tl.load(branches_ptr + branch * (2 + n_heads) + 2 + head)
            place = tl.maximum(position, 0) // segment_length * segment_length
            if (residue >= 0) & (length > 0) & (_until(position - place - residue, rate) == 0):
                for first in range(0, n_splits, PARTS):
                    split = first + tl.arange(0, PARTS)
                    slot = (branch * n_splits + split).to(tl.int64)
                    at = slot * n_rows * n_heads + row
                    lse = tl.load(parts_ptr + first_lse + at, mask=split < n_splits, other=float("-inf"))
                    new_top = tl.maximum(top, tl.max(lse, 0))
                    safe = finite(new_top)
                    weights = tl.exp2(lse - safe)
                    part_at = parts_ptr + at[:, None] * VALUE_DIM + columns[None, :]
                    part = tl.load(part_at, mask=(weights > 0.0)[:, None] & inside[None, :], other=0.0)
                    kept = tl.exp2(top - safe)
                    total = total * kept + tl.sum(weights, 0)
                    out = out * kept + tl.sum(part * weights[:, None], 0)
                    top = new_top
        out = out / tl.where(total == 0.0, 1.0, total)
        token = (first_query + query).to(tl.int64)
        out_at = out_ptr + batch * out_b + (token * n_heads + head) * VALUE_DIM + columns
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
        lse = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + batch * lse_b + head * lse_h + token, lse)


# Numbers of parts that a program of the merge reads at once.
_MERGED = 8192


class Bounds(NamedTuple):
    """Bounds of packed sequences, int [S + 1], of their queries and of their keys, on their device."""

    queries: Tensor
    keys: Tensor


class _Plan(NamedTuple):
    """The launches of tensors of one layout, and the numbers of float32 that parts take between them, 0 if there is one
    part, the result.
    """

    cache: LaunchCache
    parts: int
    split: Callable[[Tensors], list[Launch]]
    merge: Callable[[Tensors], list[Launch]]


# Each takes a few kilobytes. A cache that grows without room behind its keys makes one for each length.
_MOST_PLANS = 256


def attend_few_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branches: KeyBranches,
    window: Window,
    scale: float,
    lengths: Tensor | None = None,
    bounds: Bounds | None = None,
    split: Split | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, M, H, Dv] and lse [B, H, M] (float32) of q [B, M, H, D], the last rows of k [B, N, K, D] and of
    v [B, N, K, Dv].

    lengths: int [B], how many keys of an item are there, or [B, 2], the first of them and their end. bounds: of packed
    sequences, B is 1. window: keys behind and ahead that a query sees, -1 for all; (-1, 0) is causal. split: instead of
    the default. The last dim of all is contiguous. A row that sees no key is 0 and -inf. Numbers on the device are not
    checked; keys beyond N are not read.
    """
    read = {} if lengths is None else {"lengths" if lengths.ndim == 1 else "spans": lengths}
    if bounds is not None:
        read = {"bounds": bounds.queries, "key_bounds": bounds.keys}
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % COPY_BYTES
    kinds = tuple((name, x.shape, x.dtype) for name, x in read.items())
    key = window, scale, split, q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), aligned, kinds
    plan = branches.plans.get(key)
    if plan is None:
        if len(branches.plans) >= _MOST_PLANS:
            branches.plans.clear()
        branches.plans[key] = plan = _plan(q, k, v, branches, window, scale, read, split)
    B, M, H, _ = q.shape
    tensors = {"q": q, "k": k, "v": v, **read}
    if plan.parts:
        # The GPU begins before the host makes the results.
        parts = q.new_empty(plan.parts, dtype=torch.float32)
        tensors |= {"out": parts, "lse": parts}
        plan.cache.launch("split", [tensors], partial(plan.split, tensors))
    out, lse = q.new_empty((B, M, H, v.shape[3])), q.new_empty((B, H, M), dtype=torch.float32)
    if plan.parts:
        tensors = {"out": out, "lse": lse, "parts": parts, **read}
        plan.cache.launch("merge", [tensors], partial(plan.merge, tensors))
    else:
        tensors |= {"out": out, "lse": lse}
        plan.cache.launch("split", [tensors], partial(plan.split, tensors))
    return out, lse


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branches: KeyBranches,
    window: Window,
    scale: float,
    read: Tensors,
    split: Split | None,
) -> _Plan:
    """The plan of `attend_few_rows` for tensors like these. It keeps none of them."""
    B, M, H, D = q.shape
    N, K, Dv = v.shape[1:]
    is_packed = "bounds" in read
    sequences = len(read["bounds"]) - 1 if is_packed else B
    rows = triton.cdiv(M, sequences) if is_packed else M
    of_keys = sequences * len(branches.segments) * (H // branches.heads)
    if split is None:
        reach = sum(window) + rows if min(window) >= 0 else None
        keys = branches.most_keys(N, reach)
        split = split_for(of_keys, rows * branches.heads, keys, (D, Dv), q.element_size(), processors(q.device))
    tile, splits, items = split
    whole = branches.every and splits == 1 and not is_packed
    outs = len(branches.segments) * splits * B * M * H * Dv
    (columns, rest, value_columns), unit, (left, right) = columns_for(D, Dv), stride_unit(q, k, v), window
    common = {
        **dict.fromkeys(("lengths_ptr", "spans_ptr", "bounds_ptr", "key_bounds_ptr")),
        "branches_ptr": branches.table,
        "n_branches": len(branches.segments),
        "n_splits": splits,
        "n_queries": M,
        "n_keys": N,
        "n_rows": B * M,
        "n_heads": H,
        "VALUE_DIM": Dv,
        "VALUE_COLUMNS": value_columns,
        "out_b": M * H * Dv,
        "lse_b": H * M,
        "lse_h": M,
        "first_lse": 0 if whole else outs,
    }
    of_split = {
        **common,
        **{
            f"{name}_{axis}": x.stride(at) // unit
            for name, x in zip("qkv", (q, k, v), strict=True)
            for at, axis in enumerate("bnh")
        },
        "heads_per_kv": H // K,
        "n_items": items,
        "left": left,
        "right": right,
        "LEFT": left >= 0,
        "RIGHT": right >= 0,
        # Exponentials are of base two.
        "scale": scale * log2(e),
        "HEADS": branches.heads,
        "WHOLE": whole,
        "UNIT": unit,
        "DIM": D,
        "COLUMNS": columns,
        "REST": rest,
        "PRECISION": product_precision(q),
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    merged = min(triton.next_power_of_2(splits), max(1, _MERGED // value_columns))
    of_merge = {**common, "n_items": rows, "n_sequences": sequences, "PARTS": merged, "num_warps": 4}
    programs = of_keys * splits * items, (sequences + is_packed) * rows * H
    if max(programs) >= 2**31:
        raise ValueError(f"{max(programs)} programs pass the 2^31 - 1 of one launch: give fewer batch items at a time")
    launches = (
        partial(_launches, *kernel)
        for kernel in zip((_split_kernel, _merge_kernel), programs, (of_split, of_merge), strict=True)
    )
    return _Plan(LaunchCache(), 0 if whole else outs + outs // Dv, *launches)


def _launches(kernel: Any, programs: int, numbers: Mapping[str, Any], tensors: Tensors) -> list[Launch]:
    arguments = {**numbers, **{f"{name}_ptr": x for name, x in tensors.items()}}
    return [Launch(kernel, lambda _: ((programs,), arguments))]

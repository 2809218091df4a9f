# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Forward of dilated attention over the union of branches: one online softmax per query, each distinct pair once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.packing import ListRequest, Packing, PassLists, PassRequests, query_lists
from dilabench.kernels.fused.partials import Partials, partial_places
from dilabench.kernels.fused.residue_plan import ResiduePlan
from dilabench.kernels.fused.row_layout import (
    PER_LENGTH,
    Results,
    checked_scale,
    is_whole,
    launch_arguments,
    on_hopper,
    whole_classes,
)
from dilabench.kernels.fused.tile_walk import (
    add_weighted,
    box_place,
    capped,
    end_of,
    find_work,
    hiding_ranges,
    load_tile,
    outside,
    place_of,
    query_item,
    scaled,
    scores,
    seen_keys,
    segment_of,
    store_tile,
    stored_rows,
    turned,
    unpack,
    zero_tail,
)
from dilabench.kernels.fused.wider_rows import make_ready, with_columns
from dilabench.kernels.launch_cache import Arguments, Beside, Launch, LaunchCache, layout
from dilabench.kernels.lse import add_null_mass_
from dilabench.kernels.softmax import finite, weights_of_two
from dilabench.kernels.tuning import Selected, TileConfig, columns_to_add, select_kernel


@triton.jit(do_not_specialize=PER_LENGTH)
def _forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    q_tail_desc,
    k_tail_desc,
    v_tail_desc,
    out_ptr,
    lse_ptr,
    mass_ptr,
    items_ptr,
    entries_ptr,
    heads_ptr,
    bounds_ptr,
    visits_ptr,
    cap,
    scale_log2,
    n_supers,
    full_supers,
    n_kinds,
    n_items,
    n_heads,
    heads_per_kv,
    length,
    whole_rows,
    longer_classes,
    left_over,
    super_rows,
    super_tokens,
    window_left,
    window_right,
    n_blocks,
    item_major,
    key_rows,
    R,
    HEAD_DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    RAGGED: tl.constexpr,
    RANGES: tl.constexpr,
    ONE_CLASS: tl.constexpr,
    MERGE: tl.constexpr,
    COMPACT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # One program: one query tile of one class. ONE_CLASS: of block masks, with only some visible tiles, and keys that
    # may be other rows, hidden from RANGES of rows.
    item, super_index, head, batch, variant, n_items = find_work(
        visits_ptr, n_items, n_blocks, item_major, n_supers, full_supers, n_heads
    )
    item_ptr, shift = query_item(item, variant, head, items_ptr, heads_ptr, n_kinds, n_items, n_heads, ONE_CLASS)
    u = tl.load(item_ptr)
    if u < 0:
        return
    tile = tl.load(item_ptr + 1)
    first = tl.load(item_ptr + 2)
    n_full = tl.load(item_ptr + 3)
    n_masked = tl.load(item_ptr + 4)

    residue = turned(u, shift, R)
    base_row, first_place, rows_left, longer_classes = segment_of(
        super_index, visits_ptr, super_rows, super_tokens, whole_rows, longer_classes, length, R, SHIFTED
    )
    kv_head = head // heads_per_kv
    place, row = box_place(
        residue, base_row + tile * BLOCK_M, first_place, whole_rows, left_over, R, BLOCK_M, RAGGED, SHIFTED
    )
    q, q_tail = load_tile(q_desc, q_tail_desc, batch, row, place, head, HEAD, TAIL)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    acc_tail = zero_tail(BLOCK_M, TAIL)

    entry_ptr = entries_ptr + first
    query_row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    for masked in tl.static_range(2 if CAUSAL or RAGGED or WINDOWED else 1):
        for _ in tl.range(0, n_masked if masked else n_full, num_stages=STAGES):
            entry = tl.load(entry_ptr)
            entry_ptr += 1
            key_tile, partner, bias = unpack(entry, shift, R, ONE_CLASS)
            key_row = base_row + key_tile * BLOCK_N
            place, key_row = box_place(
                partner,
                key_row,
                first_place,
                whole_rows,
                left_over,
                R,
                BLOCK_N,
                RAGGED if masked else SHIFTED,
                SHIFTED,
            )
            k, k_tail = load_tile(k_desc, k_tail_desc, batch, key_row, place, kv_head, HEAD, TAIL)
            logits = scores(q, q_tail, k, k_tail, TAIL, PRECISION)
            if cap is not None:
                logits = capped(logits, cap, PRECISION)
            if masked:
                end = key_rows if ONE_CLASS else end_of(partner, rows_left, longer_classes, super_rows)
                window = (window_left, window_right)
                seen = seen_keys(query_row, residue, key_tile, partner, end, window, R, BLOCK_N, CAUSAL, WINDOWED)
                ranges = hiding_ranges(bounds_ptr, (key_row + tl.arange(0, BLOCK_N))[None, :], key_rows, RANGES)
                logits = tl.where(outside(seen, query_row[:, None], ranges, RANGES), logits, float("-inf"))
            new_top = tl.maximum(top, tl.max(logits, 1) * scale_log2 + bias)
            # A row may have seen no key yet.
            safe_top = finite(new_top) if masked else new_top
            p = tl.math.exp2(logits * scale_log2 - (safe_top - bias)[:, None])
            decay = tl.math.exp2(top - safe_top)
            total = total * decay + tl.sum(p, 1)
            acc, acc_tail = scaled(acc, acc_tail, decay, TAIL)
            v, v_tail = load_tile(v_desc, v_tail_desc, batch, key_row, place, kv_head, HEAD, TAIL)
            acc, acc_tail = add_weighted(acc, acc_tail, p, v, v_tail, TAIL, PRECISION)
            top = new_top

    rows = end_of(residue, rows_left, longer_classes, super_rows) - tile * BLOCK_M
    inside = tl.arange(0, BLOCK_M) < rows
    row = base_row + tile * BLOCK_M
    token = row.to(tl.int64) * R + residue + first_place + tl.arange(0, BLOCK_M) * R
    mine = tl.full([BLOCK_M], 1.0, tl.float32)
    if mass_ptr is not None:
        mass = tl.load(mass_ptr + head.to(tl.int64) * length + token, inside, float("-inf")) * 1.4426950408889634
        higher = tl.maximum(top, mass)
        mine = tl.math.exp2(top - higher)
        total = total * mine + tl.math.exp2(mass - higher)
        top = higher
    mine = mine / total
    if ONE_CLASS:
        # A row that sees no key has out 0 and lse -inf.
        mine = tl.where(total == 0.0, 0.0, mine)
    theirs = mine
    lse = (top + tl.log2(total)) * 0.6931471805599453
    # Rows are stored at their tokens, or those that the class has one after another.
    first_stored, place, step, stored = row, residue + first_place, R, length
    if COMPACT:
        first_stored, stored = stored_rows(super_index, visits_ptr, super_rows, super_tokens, length, R)
        first_stored, place, step = first_stored + tile * BLOCK_M, 0, 1
    lse_at = lse_ptr + (batch * n_heads + head).to(tl.int64) * stored + first_stored.to(tl.int64) * step + place
    lse_at += tl.arange(0, BLOCK_M) * step
    if MERGE:
        higher, ours, theirs = weights_of_two(lse, tl.load(lse_at, inside, float("-inf")))
        both = ours + theirs
        mine = mine * (ours / both)
        theirs = theirs / both
        lse = higher + tl.log(both)
    acc, acc_tail = scaled(acc, acc_tail, mine, TAIL)
    out_ptr += place_of(first_stored, place, batch, head, stored, n_heads, step, HEAD_DIM)
    store_tile(acc, acc_tail, out_ptr, rows, theirs[:, None], n_heads, step, MERGE, BLOCK_M, HEAD_DIM, HEAD, TAIL)
    if MERGE:
        # As in `merge`: other threads may read what one of them overwrites.
        tl.debug_barrier()
    tl.store(lse_at, lse, inside)


def fused_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ResiduePlan,
    *,
    scale: float | None = None,
    log_mass: Tensor | None = None,
    config: TileConfig | None = None,
    beside: Beside | None = None,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out [B, N, H, D], lse [B, H, N] float32)`` of the branches in ``plan.groups``, merged in place group by group.

    Rows that no branch covers get out 0 and lse -inf. ``log_mass`` [1, H, N] float32, contiguous: the logarithm of a
    null mass of each row (zero keys), -inf for none. ``config`` overrides the shipped tile shapes. Any token and head
    strides are taken as they are when regular (packed qkv included). ``beside``: launches that are compiled together
    with these if new. ``packing``: the documents of a plan for documents. Raises ValueError on shapes that do not fit
    ``plan`` or a scale that is not positive.
    """
    cache = LaunchCache.of("forward", plan, scale, config, log_mass is None, layout(q), layout(k), layout(v))
    scale, more, as_they_are = cache.once("operands", lambda: _operands(q, k, v, plan, scale))
    batch, length, num_heads, _ = q.shape
    covered = plan.groups[0].covers_every_row
    if covered:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty((batch, num_heads, length), dtype=torch.float32, device=q.device)
    else:
        out = q.new_zeros(q.shape)
        lse = torch.full((batch, num_heads, length), float("-inf"), dtype=torch.float32, device=q.device)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    if more or not as_they_are:
        tensors |= _as_read(q, k, v, plan, more, cache)
    if covered and log_mass is not None:
        tensors["mass"] = log_mass
    own = [tensors] * len(plan.groups)
    if packing is not None:
        own = [tensors | lists.by_query for lists in _lists(q, plan, packing, config, cache).of_groups]

    def prepare() -> Iterator[Launch]:
        for index, (given, group) in enumerate(zip(own, plan.groups, strict=True)):
            mass = None if index else tensors.get("mass")
            results = Results(out, lse, mass, merge=index > 0, follows=index > 0)
            yield _launch_of(given, results, group, plan.causal, scale, config)

    cache.launch("groups", own, prepare, beside)
    if log_mass is not None and not covered:
        add_null_mass_(out, lse, log_mass)
    return out, lse


def fused_forward_partials(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ResiduePlan,
    *,
    scale: float | None = None,
    log_masses: Sequence[Tensor] = (),
    config: TileConfig | None = None,
    beside: Beside | None = None,
    packing: Packing | None = None,
    cache: LaunchCache | None = None,
) -> tuple[Tensor, Tensor, Partials]:
    """As `fused_forward` for a plan of single branches, with a separate result for each. ``log_masses``: a null mass of
    each branch, [H, N] float32 as above, by its index; -inf also where the branch does not cover a row. ``cache``:
    instead of the one for these tensors.
    """
    if cache is None:
        cache = LaunchCache.of(
            "forward partials", plan, scale, config, bool(log_masses), layout(q), layout(k), layout(v)
        )
    scale, more, as_they_are = cache.once("operands", lambda: _operands(q, k, v, plan, scale))
    operands = {"q": q, "k": k, "v": v}
    if more or not as_they_are:
        operands = _as_read(q, k, v, plan, more, cache)
    places = partial_places(plan, q.shape, q.device, type(q))
    partials = places.empty(q)
    tensors = []
    for group, (own, own_lse) in zip(plan.groups, places.views(partials), strict=True):
        mass = {"mass": log_masses[group.branches[0]]} if log_masses else {}
        tensors.append({"out": own, "lse": own_lse, **operands, **mass})
    batch, length, num_heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((batch, num_heads, length), dtype=torch.float32, device=q.device)
    merged = {"outs": partials.outs, "lses": partials.lses, "out": out, "lse": lse}
    if packing is not None:
        lists = _lists(q, plan, packing, config, cache)
        tensors = [own | of_group.by_query for own, of_group in zip(tensors, lists.of_groups, strict=True)]
        merged |= {"documents": lists.documents, "blocks": lists.blocks}

    def prepare() -> Iterator[Launch]:
        for index, (own, group) in enumerate(zip(tensors, plan.groups, strict=True)):
            results = Results(own["out"], own["lse"], own.get("mass"), follows=index > 0, compact=True)
            yield _launch_of(own, results, group, plan.causal, scale, config)
        yield places.merge(merged)

    cache.launch("groups", [*tensors, merged], prepare, beside)
    return out, lse, partials


def _lists(q: Tensor, plan: ResiduePlan, packing: Packing, config: TileConfig | None, cache: LaunchCache) -> PassLists:
    """Lists of documents for each group."""

    def requests() -> PassRequests:
        tiles = (_selected(q, group, plan.causal, config, cut=True).tiles for group in plan.groups)
        return PassRequests(
            *(ListRequest(group, own.block_m, own.block_n) for group, own in zip(plan.groups, tiles, strict=True))
        )

    return packing.lists(cache.once("lists", requests), plan.causal, q)


def _operands(q: Tensor, k: Tensor, v: Tensor, plan: ResiduePlan, scale: float | None) -> tuple[float, int, bool]:
    """The scale, how many columns keys and values are given, and whether kernels read all three as they are."""
    scale = checked_scale(q, k, v, plan, scale)
    return scale, _columns_to_add(k, plan), all(is_whole(x, plan.groups) for x in (q, k, v))


def _as_read(q: Tensor, k: Tensor, v: Tensor, plan: ResiduePlan, more: int, cache: LaunchCache) -> dict[str, Tensor]:
    """q, k and v as kernels read them, with that many more columns."""
    read = {name: whole_classes(x, plan.groups) for name, x in (("q", q), ("k", k), ("v", v))}
    if more:
        # A program copies its queries once.
        read |= {name: with_columns(read[name], more, cache, f"columns of {name}") for name in "kv"}
    return read


def _columns_to_add(k: Tensor, plan: ResiduePlan) -> int:
    """How many keys and values are given; what other lengths may ask for is compiled, too."""
    of_dim = k.shape[-1], k.element_size(), on_hopper(k.device)
    queries = sum(group.queries_of_a_key(plan.causal) for group in plan.groups)
    more, most = columns_to_add(*of_dim, queries, k.numel() // k.shape[-1]), columns_to_add(*of_dim, inf, inf)
    if most > more:
        make_ready(k.shape[-1], most, k.dtype, k.device)
    return more


def _launch_of(
    operands: Mapping[str, Tensor],
    results: Results,
    group: BranchGroup,
    causal: bool,
    scale: float,
    config: TileConfig | None,
) -> Launch:
    """The launch of a group by the kernel that `select_kernel` gives, or by the plain one with a ``config``."""
    kernel, tiles = _selected(operands["q"], group, causal, config, cut=group.documents > 0)
    # The modules of these kernels need a Triton with Gluon's Hopper instructions.
    if kernel == "specialized":
        from dilabench.kernels.fused.sm90 import forward

        return forward.group_launch(operands, results, group, causal, scale, tiles)
    if kernel == "narrow":
        from dilabench.kernels.fused.sm90 import narrow_forward

        return narrow_forward.group_launch(operands, results, group, causal, scale, tiles)

    def tiles_of(cut: bool) -> TileConfig:
        return tiles if group.documents else _selected(operands["q"], group, causal, config, cut).tiles

    return _group_launch(operands, results, group, causal, scale, tiles_of)


def _selected(q: Tensor, group: BranchGroup, causal: bool, config: TileConfig | None, cut: bool) -> Selected:
    """The kernel of a group and its tiles, where the sequence ends inside a key tile or not."""
    if config is not None:
        return Selected("plain", config.fitted(group.largest_tile))
    return select_kernel(
        "forward",
        q.shape[-1],
        causal=causal,
        largest_tile=group.largest_tile,
        itemsize=q.element_size(),
        # The other kernels cap no scores.
        hopper=on_hopper(q.device) and not group.softcap,
        windowed=group.is_windowed,
        keys=group.keys_of_a_query(causal),
        cut=cut,
    )


def _group_launch(
    operands: Mapping[str, Tensor],
    results: Results,
    group: BranchGroup,
    causal: bool,
    scale: float,
    tiles_of: Callable[[bool], TileConfig],
) -> Launch:
    """The launch of the plain kernel. tiles_of: its tiles, where the sequence ends inside a key tile or not."""
    q, k, v = (operands[name] for name in "qkv")

    def arguments(ragged: bool) -> Arguments:
        chosen = tiles_of(ragged)
        tiles = {"q": (q, chosen.block_m), "k": (k, chosen.block_n), "v": (v, chosen.block_n)}
        n_items, lists = query_lists(operands, group, chosen, causal)
        grid, shared = launch_arguments(tiles, n_items, group, q.shape[2], causal, scale, chosen)
        own = {
            **lists,
            "out_ptr": results.out,
            "lse_ptr": results.lse,
            "mass_ptr": results.mass,
            "bounds_ptr": None,
            "heads_per_kv": group.heads_per_kv,
            "key_rows": group.length,
            "RANGES": 0,
            "ONE_CLASS": False,
            "MERGE": results.merge,
            "COMPACT": results.compact,
            "RAGGED": ragged or group.documents > 0,
        }
        return grid, shared | own

    whole = tiles_of(False)
    ragged = group.cuts_tiles(whole.longest)
    kind = (*results.out.shape[2:], causal, whole, *results.compiled_for, *group.compiled_for)
    return Launch(_forward_kernel, arguments, ragged, kind)

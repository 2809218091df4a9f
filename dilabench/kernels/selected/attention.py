"""Attention over key blocks that each query token selects per key/value head, on a GPU: forward and backward.

A pass has two forms, by query (`by_query`) and gathered (`gathered`); `tiles.select_form` gives the cheaper. dK and dV
come from lists by key (`by_key`), of single tokens from lists by token (`by_token`). No pass adds atomically, so that
each gives the same bits from call to call.

What follows from options and layouts is in a plan, made at the first pass of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from dilabench.kernels.bwd_preprocess import StatsLayout, bwd_preprocess
from dilabench.kernels.launch_cache import LaunchCache, layout
from dilabench.kernels.selected import tiles as tuned
from dilabench.kernels.selected.by_key import entries_of_share, key_gradients
from dilabench.kernels.selected.by_query import QueryTiles, query_form
from dilabench.kernels.selected.by_token import add_token_gradients
from dilabench.kernels.selected.gathered import GatheredPart, gathered_form, keys_of_tile
from dilabench.kernels.selected.lists import (
    KeptLists,
    KeyLists,
    QueryLists,
    Shares,
    are_alike,
    key_lists,
    query_lists,
    shares_of,
)
from dilabench.kernels.selected.operands import in_rows, operand_arguments
from dilabench.kernels.selected.selection import TokenSelection
from dilabench.kernels.selected.tiles import (
    Direction,
    Form,
    Kernel,
    QueryRows,
    UnionRows,
    query_rows,
    rules_of,
    select_form,
    tiles_of,
    union_rows,
)
from dilabench.kernels.tuning import TileConfig
from dilabench.patterns.selected_blocks import check_block
from dilabench.workload.spec import UNBOUNDED, Window, check_window

LARGEST_HEAD_DIM = 256


def selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block: int,
    causal: bool,
    scale: float,
    *,
    window: Window = UNBOUNDED,
    cu_seqlens: Tensor | None = None,
    form: Form | None = None,
    tiles: Mapping[Kernel, TileConfig] | None = None,
    kept: KeptLists | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out [B, N, H, D], lse [B, H, N] float32)``: lse is natural; a row that sees nothing has out 0 and lse -inf.

    q [B, N, H, D]; k, v [B, N, K, D] with H a multiple of K; ``indices`` int32 [B, N, K, S]: blocks of ``block`` keys
    in any order, of which one outside of the sequence stands for none and a repeated one counts once. ``cu_seqlens``
    int [documents + 1] on the device, from 0 to T: q [T, H, D], k, v [T, K, D], indices [T, K, S] count from the first
    block of each document, and results are [T, H, D] and [H, T]. ``window``: how many positions (back, ahead) a token
    sees, -1 for all. ``form``, ``tiles``: override `tiles`.
    ``kept``: lists that an earlier pass over these indices on this stream left there, or that this one leaves.

    Raises ValueError on shapes, dtypes, blocks and scales that the kernels do not take.
    """
    options = _Options(block, causal, scale, window, None if cu_seqlens is None else cu_seqlens.shape[0] - 1, form)
    lists = _Lists.of("forward", options, tiles, {"q": q, "k": k, "v": v}, (), indices, cu_seqlens, kept)
    plan = lists.plan
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32, device=q.device)
    if indices.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    tensors = plan.as_read({"q": q, "k": k, "v": v}) | {"out": out, "lse": lse}
    alike = lists.alike() if plan.united else None
    if plan.forms[alike] == "query":
        query_form("forward", tensors, plan.given, lists.query_tiles(alike), lists.cache)
    else:
        _gathered(tensors, lists)
    return out, lse


def selected_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    block: int,
    causal: bool,
    scale: float,
    *,
    window: Window = UNBOUNDED,
    cu_seqlens: Tensor | None = None,
    form: Form | None = None,
    tiles: Mapping[Kernel, TileConfig] | None = None,
    kept: KeptLists | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in the shapes and dtypes of q, k, v.

    ``out`` and ``lse`` are of `selected_forward`, or of a larger softmax. A row with lse -inf has zero gradient.
    ``form``: of dq; the rest as there. Raises ValueError as it does.
    """
    options = _Options(block, causal, scale, window, None if cu_seqlens is None else cu_seqlens.shape[0] - 1, form)
    given = {"q": q, "k": k, "v": v, "dout": dout}
    lists = _Lists.of("gradient", options, tiles, given, (out, lse), indices, cu_seqlens, kept)
    plan, cache = lists.plan, lists.cache
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if indices.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    # The rows of a token are adjacent, so that the rows of a group are read together.
    in_order = lse.transpose(-1, -2).reshape(1, 1, -1)
    by_row = 1, in_order.shape[-1], 1, q.shape[-1]
    layout_of_stats = cache.once("stats", lambda: StatsLayout.of(by_row[1]))
    stats = bwd_preprocess(out.reshape(by_row), dout.reshape(by_row), in_order, layout_of_stats, cache, "row sums")
    tensors = plan.as_read(given) | {"stats": stats, "dq": dq}
    if block == 1:
        _token_gradients(tensors, dk, dv, lists)
        return dq, dk, dv
    if plan.forms[None] == "query":
        # The host does not wait a second time: it knows this from the forward pass, or not.
        alike = lists.known_alike() if plan.united else None
        query_form("gradient", tensors, plan.given, lists.query_tiles(alike), cache)
    else:
        _gathered(tensors, lists)
    tensors |= {"dk": dk, "dv": dv}
    by_key, shares = lists.by_key(lists.selection), lists.shares(plan.entries_by_key)
    key_gradients(tensors, plan.given, lists.selection, by_key, shares, plan.by_key, cache)
    return dq, dk, dv


class _Options(NamedTuple):
    """The options of a pass besides its tensors. documents: of how many there are bounds."""

    block: int
    causal: bool
    scale: float
    window: Window
    documents: int | None
    form: Form | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a pass over tensors of these layouts is computed.

    given: `operands.operand_arguments`. is_in_rows: kernels read the operands as they are. forms: by whether neighbours
    select alike, None if that is not known. each: tiles of single tokens, or of as many as fill one. united: of
    neighbours, if more of them fit into one. gathered: tiles of the gathered form, over ``at_a_time`` tokens, whose
    programs take ``entries`` queries of a list. by_key: of dK and dV, whose programs take ``entries_by_key``; of single
    tokens, of dQ.
    """

    scale: float
    given: dict[str, Any]
    is_in_rows: bool
    forms: Mapping[bool | None, Form]
    each: tuple[QueryRows, TileConfig]
    united: UnionRows | None
    gathered: TileConfig
    at_a_time: int
    entries: int
    by_key: TileConfig
    entries_by_key: int

    @classmethod
    def of(
        cls,
        direction: Direction,
        options: _Options,
        requested: Mapping[Kernel, TileConfig],
        operands: Mapping[str, Tensor],
        indices: Tensor,
    ) -> _Plan:
        """Raises ValueError for what the kernels do not take."""
        q, k, block = operands["q"], operands["k"], options.block
        _check(options, q, k, operands["v"], indices)
        heads, kv_heads, dim, slots = q.shape[-2], k.shape[-2], q.shape[-1], indices.shape[-1]
        kind = heads // kv_heads, block, dim, q.element_size()

        def tiles(kernel: Kernel) -> TileConfig:
            return requested.get(kernel) or tiles_of(kernel, *kind)

        forward = direction == "forward"
        config = tiles("query_forward" if forward else "query_gradient")
        each = query_rows(kind[0], max(1, slots), config), config
        union: Kernel = "union_forward" if forward else "union_gradient"
        united = None
        if slots and (union in requested or rules_of(union, *kind)):
            united = union_rows(kind[0], block, slots, tiles(union))
            united = united if united and united.shape.queries > each[0].queries else None
        gathered, by_key = tiles("gathered_forward" if forward else "gathered_gradient"), tiles("key_gradient")
        if block == 1:
            by_key = tiles("token_gradient")
        many = tuned.TILES_OF_A_BLOCK if block <= keys_of_tile(block, gathered) else 1
        rows = {name: in_rows(x) for name, x in operands.items()}
        return cls(
            options.scale,
            operand_arguments(rows, options.scale),
            all(rows[name].data_ptr() == x.data_ptr() for name, x in operands.items()),
            {alike: options.form or select_form(direction, *kind, alike) for alike in (None, False, True)},
            each,
            united,
            gathered,
            _tokens_at_a_time(slots * heads * (dim * q.element_size() + 4)),
            max(1, many * gathered.block_m // kind[0]),
            by_key,
            entries_of_share(indices.numel(), block, kind[0], by_key),
        )

    def as_read(self, operands: dict[str, Tensor]) -> dict[str, Tensor]:
        """The operands in memory that kernels read: copies only where they must be."""
        return operands if self.is_in_rows else {name: in_rows(x) for name, x in operands.items()}


def _check(options: _Options, q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> None:
    """Raise ValueError for what the kernels do not take."""
    axes = 4 if options.documents is None else 3
    if q.dim() != axes or k.shape != v.shape or k.dim() != axes:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be [B, N, H, D] and twice "
            "[B, N, K, D]; with cu_seqlens [T, H, D] and twice [T, K, D]"
        )
    heads, kv_heads, dim = q.shape[-2], k.shape[-2], q.shape[-1]
    if k.shape[:-2] != q.shape[:-2] or k.shape[-1] != dim or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"k {tuple(k.shape)} does not fit q {tuple(q.shape)}: rows and D must be equal, H a multiple of K"
        )
    if indices.shape[:-1] != k.shape[:-1] or indices.dtype != torch.int32:
        raise ValueError(
            f"indices {tuple(indices.shape)} of {indices.dtype} must be int32 of shape {tuple(k.shape[:-1])} and S"
        )
    check_block(options.block)
    check_window(options.window, options.causal)
    if not 0 < dim <= LARGEST_HEAD_DIM:
        raise ValueError(f"head dim {dim} must be 1 to {LARGEST_HEAD_DIM}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"q is {q.dtype}: it must be bfloat16, float16 or float32")
    if not options.scale > 0:
        raise ValueError(f"scale {options.scale} must be positive: fold the sign into q")
    form = options.form
    if form is not None and form not in get_args(Form):
        raise ValueError(f"form {form!r} must be one of {', '.join(get_args(Form))}, or None for the cheaper one")
    if form == "gathered" and options.block == 1:
        raise ValueError("blocks of one token have no gathered form: give a block of 16 or more, or form='query'")
    if max(indices.numel(), tuned.MOST_QUERIES * q.numel() // max(1, heads * dim)) >= 2**31:
        raise ValueError(f"indices {tuple(indices.shape)} pass the 2^31 of one call: give fewer batch items at a time")


class _Lists(NamedTuple):
    """The data that passes over tensors of one layout and one selection share, and their lists, kept or made now."""

    kept: KeptLists
    direction: Direction
    plan: _Plan
    cache: LaunchCache
    selection: TokenSelection

    @classmethod
    def of(
        cls,
        direction: Direction,
        options: _Options,
        tiles: Mapping[Kernel, TileConfig] | None,
        operands: Mapping[str, Tensor],
        results: tuple[Tensor, ...],
        indices: Tensor,
        cu_seqlens: Tensor | None,
        kept: KeptLists | None,
    ) -> _Lists:
        """Raises ValueError for what the kernels do not take."""
        if kept is None:
            kept = KeptLists()
        requested = tuple(tiles.items()) if tiles else ()
        kind = direction, options, requested, *map(layout, (*operands.values(), *results))

        def made() -> tuple[_Plan, LaunchCache, TokenSelection]:
            cache = LaunchCache.of(*kind, layout(indices))
            plan = cache.once("plan", lambda: _Plan.of(direction, options, dict(requested), operands, indices))
            return plan, cache, kept.once("selection", selection)

        def selection() -> TokenSelection:
            of_all = options.block, options.causal
            if cu_seqlens is None:
                return TokenSelection.of_batch(indices, *of_all, options.window)
            return TokenSelection.of_documents(indices, *of_all, cu_seqlens, options.window)

        return cls(kept, direction, *kept.once(kind, made))

    def by_query(self, part: TokenSelection, queries: int) -> QueryLists:
        name = ("by query", queries, *_tokens(part))
        return self.kept.once(name, lambda: query_lists(part, queries, self.cache, ("lists", *name)))

    def query_tiles(self, alike: bool | None) -> Sequence[QueryTiles]:
        """Tiles of single tokens, or of as many as fill one, after those of neighbours, whose tokens they leave out."""
        return self.kept.once((self.direction, self.plan.each, self.plan.united, alike), lambda: self._tiles(alike))

    def _tiles(self, alike: bool | None) -> Sequence[QueryTiles]:
        (shape, config), united = self.plan.each, self.plan.united
        lists = self.by_query(self.selection, shape.queries)
        if united is None or alike is False:
            return (QueryTiles.of(self.selection, lists, shape, config),)
        of_neighbours = self.by_query(self.selection, united.shape.queries)
        unions = of_neighbours.counts, united.shape.queries, united.most_blocks
        return (
            QueryTiles.of(self.selection, of_neighbours, united.shape, united.tiles, unions),
            QueryTiles.of(self.selection, lists, shape, config, unions),
        )

    def alike(self) -> bool | None:
        """Whether neighbours select alike, for which the host may wait once."""
        assert self.plan.united
        name, forms = _alike(self.plan.united), self.plan.forms
        # Lists by query are needed, whether neighbours are alike or not.
        needed = "gathered" not in (forms[True], forms[False])
        meanwhile = partial(self.query_tiles, None) if needed else lambda: None
        return self.kept.once(name, lambda: are_alike(self.selection, *name[1:], self.cache, name, meanwhile))

    def known_alike(self) -> bool | None:
        """The result of `alike` if it was called before, else None."""
        assert self.plan.united
        known: bool | None = self.kept.get(_alike(self.plan.united))
        return known

    def by_key(self, part: TokenSelection) -> KeyLists:
        name = ("by key", *_tokens(part))
        return self.kept.once(name, lambda: key_lists(part, self.cache, ("lists", *name)))

    def shares(self, entries: int, at_a_time: int = 0) -> Shares:
        return self.kept.once(
            ("shares", entries, at_a_time),
            lambda: shares_of(self.by_key(self.selection), self.selection, entries, self.cache, at_a_time),
        )

    def parts(self, at_a_time: int) -> list[TokenSelection]:
        """The selections of this many tokens at a time."""
        firsts = range(0, self.selection.rows, at_a_time)
        return self.kept.once(("parts", at_a_time), lambda: [self.selection.part(first, at_a_time) for first in firsts])

    def gathered_parts(self) -> list[GatheredPart]:
        """The same for the gathered form. The parts are equal in both passes, so that these share lists."""
        entries, at_a_time = self.plan.entries, self.plan.at_a_time

        def made() -> list[GatheredPart]:
            lists, shares = self.by_key(self.selection), self.shares(entries, at_a_time)
            parts = enumerate(self.parts(at_a_time))
            return [GatheredPart.of(part, number, lists, shares) for number, part in parts]

        return self.kept.once(("gathered", entries, at_a_time), made)


def _alike(united: UnionRows) -> tuple[str, int, int]:
    """The name of what is known of neighbours."""
    return "alike", united.shape.queries, united.most_blocks


def _tokens(part: TokenSelection) -> tuple[int, int]:
    """The first token of a part, and how many tokens it has."""
    return part.first_row, part.rows


def _gathered(tensors: dict[str, Tensor], lists: _Lists) -> None:
    """`gathered_form` over parts of the tokens, whose partial results each fit into `tiles.PARTIAL_BYTES`."""
    q, plan = tensors["q"], lists.plan
    for part in lists.gathered_parts():
        shape = *part.slots, plan.given["GROUP"]
        own = tensors | part.tables
        own["partial"] = q.new_empty((*shape, q.shape[-1]))
        if "dout" in tensors:
            own["result"] = own["dq"]
        else:
            own["result"] = own["out"]
            own["partial_lse"] = q.new_empty(shape, dtype=torch.float32)
        gathered_form(own, plan.given, part, plan.gathered, lists.cache)


def _tokens_at_a_time(bytes_of_token: int) -> int:
    """How many tokens' partial results fit into `tiles.PARTIAL_BYTES`."""
    return max(1, tuned.PARTIAL_BYTES // max(1, bytes_of_token))


def _token_gradients(tensors: dict[str, Tensor], dk: Tensor, dv: Tensor, lists: _Lists) -> None:
    """Write dq, dk and dv of blocks of one key."""
    q, k, plan = tensors["q"], tensors["k"], lists.plan
    rows, (kv_heads, dim) = lists.selection.rows, k.shape[-2:]
    shape = query_rows(plan.given["GROUP"], 1, plan.by_key, most_queries=1)
    sums = torch.zeros((kv_heads, lists.selection.n_blocks, 2, dim), dtype=torch.float32, device=q.device)
    slots = lists.selection.indices.shape[-1]
    for part in lists.parts(_tokens_at_a_time(slots * kv_heads * shape.parts * 2 * dim * q.element_size())):
        parts = q.new_empty((kv_heads, part.rows, slots, shape.parts, 2, dim))
        each = QueryTiles.of(part, lists.by_query(part, 1), shape, plan.by_key)
        query_form("gradient", tensors | {"parts": parts}, plan.given, (each,), lists.cache)
        add_token_gradients(parts, sums, lists.by_key(part), lists.cache)
    gradient_k, gradient_v = sums[:, :rows].transpose(0, 1).unbind(2)
    dk.view(rows, kv_heads, dim).copy_(gradient_k * plan.scale)
    dv.view(rows, kv_heads, dim).copy_(gradient_v)

"""Attention over key blocks that each query token selects per key/value head, on a GPU: forward and backward.

A pass has two forms, by query (`by_query`) and gathered (`gathered`); `tiles.select_form` gives the cheaper. dK and dV
come from lists by key (`by_key`), of single tokens from lists by token (`by_token`). No pass adds atomically, so that
each gives the same bits from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from dilabench.kernels.bwd_preprocess import StatsLayout, bwd_preprocess
from dilabench.kernels.launch_cache import LaunchCache, layout
from dilabench.kernels.selected import tiles as tuned
from dilabench.kernels.selected.by_key import entries_of_share, key_gradients
from dilabench.kernels.selected.by_query import QueryTiles, query_form
from dilabench.kernels.selected.by_token import add_token_gradients
from dilabench.kernels.selected.gathered import gathered_form, keys_of_tile
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
    ``kept``: lists that an earlier pass over these indices left there, or that this one leaves.

    Raises ValueError on shapes, dtypes, blocks and scales that the kernels do not take.
    """
    kept = kept or KeptLists()
    problem = _Problem.of(q, k, v, indices, block, causal, scale, window, cu_seqlens, form, tiles)
    operands = {"q": in_rows(q), "k": in_rows(k), "v": in_rows(v)}
    rows, heads, dim = operands["q"].shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((*q.shape[:-3], heads, q.shape[-3]), dtype=torch.float32, device=q.device)
    if indices.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    cache = problem.cache("forward", operands)
    given = cache.once("operands", lambda: operand_arguments(operands, scale))
    lists = _Lists(problem.selection(indices, cu_seqlens, kept), kept, cache)
    results = operands | {"out": out.view(rows, heads, dim), "lse": lse}
    unions = problem.unions("forward", q, indices.shape[-1])
    alike = None
    if unions:
        # Lists by query are needed, whether neighbours are alike or not.
        by_query = "gathered" not in (problem.form("forward", q, alike) for alike in (True, False))
        make_lists = partial(problem.query_tiles, "forward", q, lists, unions) if by_query else lambda: None
        alike = lists.alike(unions, make_lists)
    if problem.form("forward", q, alike) == "query":
        tiles_of_query = problem.query_tiles("forward", q, lists, None if alike is False else unions)
        query_form("forward", results, given, lists.selection, *tiles_of_query, cache)
        return out, lse
    _gathered(results, given, lists, problem.tiles("gathered_forward", q), cache)
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
    kept = kept or KeptLists()
    problem = _Problem.of(q, k, v, indices, block, causal, scale, window, cu_seqlens, form, tiles)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if indices.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    operands = {name: in_rows(x) for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items()}
    rows, heads, dim = operands["q"].shape
    # The rows of a token are adjacent, so that the rows of a group are read together.
    in_order = lse.transpose(-1, -2).reshape(1, 1, -1)
    flat, flat_dout = (x.reshape(1, rows * heads, 1, dim) for x in (out, dout))
    cache = problem.cache("backward", operands | {"out": flat, "flat dout": flat_dout, "lse": in_order})
    given = cache.once("operands", lambda: operand_arguments(operands, scale))
    lists = _Lists(problem.selection(indices, cu_seqlens, kept), kept, cache)
    stats = bwd_preprocess(flat, flat_dout, in_order, StatsLayout.of(rows * heads), cache, "row sums")
    tensors = operands | {"stats": stats, "dq": dq.view(rows, heads, dim)}
    if block == 1:
        _token_gradients(tensors, dk, dv, given, lists, problem)
        return dq, dk, dv
    if problem.form("gradient", q) == "query":
        unions = problem.unions("gradient", q, indices.shape[-1])
        # The host does not wait a second time: it knows this from the forward pass, or not.
        unlike = unions is not None and lists.known_alike(unions) is False
        tiles_of_query = problem.query_tiles("gradient", q, lists, None if unlike else unions)
        query_form("gradient", tensors, given, lists.selection, *tiles_of_query, cache)
    else:
        _gathered(tensors, given, lists, problem.tiles("gathered_gradient", q), cache)
    tensors |= {"dk": dk.view(rows, -1, dim), "dv": dv.view(rows, -1, dim)}
    config = problem.tiles("key_gradient", q)
    entries = entries_of_share(lists.selection, given["GROUP"], config)
    shares = lists.shares(entries)
    key_gradients(tensors, given, lists.selection, lists.by_key(lists.selection), shares, config, cache)
    return dq, dk, dv


@dataclass(frozen=True)
class _Problem:
    """The options of a pass besides its tensors."""

    block: int
    causal: bool
    scale: float
    window: Window
    documents: int | None
    requested_form: Form | None
    requested_tiles: tuple[tuple[Kernel, TileConfig], ...]
    group: int
    indices: tuple[object, ...]

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        block: int,
        causal: bool,
        scale: float,
        window: Window,
        cu_seqlens: Tensor | None,
        form: Form | None,
        tiles: Mapping[Kernel, TileConfig] | None,
    ) -> _Problem:
        """Raises ValueError for what the kernels do not take."""
        axes = 4 if cu_seqlens is None else 3
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
        check_block(block)
        check_window(window, causal)
        if not 0 < dim <= LARGEST_HEAD_DIM:
            raise ValueError(f"head dim {dim} must be 1 to {LARGEST_HEAD_DIM}")
        if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"q is {q.dtype}: it must be bfloat16, float16 or float32")
        if not scale > 0:
            raise ValueError(f"scale {scale} must be positive: fold the sign into q")
        if form is not None and form not in get_args(Form):
            raise ValueError(f"form {form!r} must be one of {', '.join(get_args(Form))}, or None for the cheaper one")
        if form == "gathered" and block == 1:
            raise ValueError("blocks of one token have no gathered form: give a block of 16 or more, or form='query'")
        if max(indices.numel(), tuned.MOST_QUERIES * q.numel() // max(1, heads * dim)) >= 2**31:
            raise ValueError(
                f"indices {tuple(indices.shape)} pass the 2^31 of one call: give fewer batch items at a time"
            )
        documents = None if cu_seqlens is None else len(cu_seqlens) - 1
        requested = tuple((tiles or {}).items())
        return cls(block, causal, scale, window, documents, form, requested, heads // kv_heads, layout(indices))

    def cache(self, name: str, operands: Mapping[str, Tensor]) -> LaunchCache:
        """The launch cache of a pass over operands of these layouts."""
        return LaunchCache.of(f"selected {name}", self, *map(layout, operands.values()))

    def selection(self, indices: Tensor, cu_seqlens: Tensor | None, kept: KeptLists) -> TokenSelection:
        """The selection of a call."""

        def make() -> TokenSelection:
            if cu_seqlens is None:
                return TokenSelection.of_batch(indices, self.block, self.causal, self.window)
            return TokenSelection.of_documents(indices, self.block, self.causal, cu_seqlens, self.window)

        return kept.once(indices.device, "selection", make)

    def form(self, direction: tuned.Direction, q: Tensor, alike: bool | None = None) -> Form:
        """The requested form, or the cheaper one."""
        return self.requested_form or select_form(direction, *self._kind(q), alike)

    def tiles(self, kernel: Kernel, q: Tensor) -> TileConfig:
        """The requested tiles, or the table's."""
        return dict(self.requested_tiles).get(kernel) or tiles_of(kernel, *self._kind(q))

    def _kind(self, q: Tensor) -> tuple[int, int, int, int]:
        """What tiles depend on."""
        return self.group, self.block, q.shape[-1], q.element_size()

    def unions(self, direction: tuned.Direction, q: Tensor, slots: int) -> UnionRows | None:
        """Tiles of neighbours, if more of them fit into one than into a tile of tokens."""
        kernel: Kernel = "union_forward" if direction == "forward" else "union_gradient"
        if kernel not in dict(self.requested_tiles) and not rules_of(kernel, *self._kind(q)):
            return None
        rows = union_rows(self.group, self.block, slots, self.tiles(kernel, q))
        return rows if rows and rows.shape.queries > self._query_rows(direction, q, slots)[0].queries else None

    def query_tiles(
        self, direction: tuned.Direction, q: Tensor, lists: _Lists, unions: UnionRows | None
    ) -> tuple[QueryTiles, tuple[QueryTiles, int] | None]:
        """Tiles of single tokens, or of as many as fill one, and of neighbours with the blocks that they may see."""
        shape, config = self._query_rows(direction, q, lists.selection.indices.shape[-1])
        each = QueryTiles(lists.by_query(lists.selection, shape.queries), shape, config)
        if unions is None:
            return each, None
        listed = lists.by_query(lists.selection, unions.shape.queries)
        return each, (QueryTiles(listed, unions.shape, unions.tiles), unions.most_blocks)

    def _query_rows(self, direction: tuned.Direction, q: Tensor, slots: int) -> tuple[QueryRows, TileConfig]:
        config = self.tiles("query_forward" if direction == "forward" else "query_gradient", q)
        return query_rows(self.group, slots, config), config


@dataclass(frozen=True)
class _Lists:
    """Lists of a pass: those that are kept, or made now."""

    selection: TokenSelection
    kept: KeptLists
    cache: LaunchCache

    def by_query(self, part: TokenSelection, queries: int) -> QueryLists:
        name = ("by query", queries, *_tokens(part))
        return self.kept.once(
            part.indices.device, name, lambda: query_lists(part, queries, self.cache, ("lists", *name))
        )

    def alike(self, unions: UnionRows, meanwhile: Callable[[], object]) -> bool | None:
        sizes = unions.shape.queries, unions.most_blocks
        return self.kept.once(
            self.selection.indices.device,
            ("alike", *sizes),
            lambda: are_alike(self.selection, *sizes, self.cache, ("alike", *sizes), meanwhile),
        )

    def known_alike(self, unions: UnionRows) -> bool | None:
        name = ("alike", unions.shape.queries, unions.most_blocks)
        return self.kept.known(self.selection.indices.device, name)

    def by_key(self, part: TokenSelection) -> KeyLists:
        name = ("by key", *_tokens(part))
        return self.kept.once(part.indices.device, name, lambda: key_lists(part, self.cache, ("lists", *name)))

    def shares(self, entries: int, at_a_time: int = 0) -> Shares:
        device = self.selection.indices.device
        return self.kept.once(
            device,
            ("shares", entries, at_a_time),
            lambda: shares_of(self.by_key(self.selection), self.selection, entries, self.cache, at_a_time),
        )


def _tokens(part: TokenSelection) -> tuple[int, int]:
    """The first token of a part, and how many tokens it has."""
    return part.first_row, len(part.indices)


def _gathered(
    tensors: dict[str, Tensor], given: dict[str, Any], lists: _Lists, config: TileConfig, cache: LaunchCache
) -> None:
    """`gathered_form` over tokens of which each part's partial results fit into `tiles.PARTIAL_BYTES`.

    The parts are equal in both passes, so that these share lists.
    """
    q, selection = tensors["q"], lists.selection
    (_, heads, dim), (_, kv_heads, slots) = q.shape, selection.indices.shape
    at_a_time = _tokens_at_a_time(slots * heads * (dim * q.element_size() + 4))
    shares = lists.shares(_entries(selection.block, given["GROUP"], config), at_a_time)
    for number, part in enumerate(_parts(selection, at_a_time)):
        shape = kv_heads, len(part.indices), slots, heads // kv_heads
        own = tensors | {"partial": q.new_empty((*shape, dim))}
        if "dout" not in tensors:
            own["partial_lse"] = q.new_empty(shape, dtype=torch.float32)
        gathered_form(own, given, part, number, lists.by_key(selection), shares, config, cache)


def _tokens_at_a_time(bytes_of_token: int) -> int:
    """How many tokens' partial results fit into `tiles.PARTIAL_BYTES`."""
    return max(1, tuned.PARTIAL_BYTES // bytes_of_token)


def _parts(selection: TokenSelection, at_a_time: int) -> Iterator[TokenSelection]:
    """The selections of this many tokens at a time."""
    for first in range(0, len(selection.indices), at_a_time):
        yield selection.part(first, at_a_time)


def _entries(block: int, group: int, config: TileConfig) -> int:
    """How many queries of a list a program of the gathered form takes."""
    tiles = tuned.TILES_OF_A_BLOCK if block <= keys_of_tile(block, config) else 1
    return max(1, tiles * config.block_m // group)


def _token_gradients(
    tensors: dict[str, Tensor], dk: Tensor, dv: Tensor, given: dict[str, Any], lists: _Lists, problem: _Problem
) -> None:
    """Write dq, dk and dv of blocks of one key."""
    q, k = tensors["q"], tensors["k"]
    rows, kv_heads, dim = k.shape
    config = problem.tiles("token_gradient", q)
    shape = query_rows(problem.group, 1, config, most_queries=1)
    sums = torch.zeros((kv_heads, lists.selection.n_blocks, 2, dim), dtype=torch.float32, device=q.device)
    slots = lists.selection.indices.shape[-1]
    at_a_time = _tokens_at_a_time(slots * kv_heads * shape.parts * 2 * dim * q.element_size())
    for part in _parts(lists.selection, at_a_time):
        parts = q.new_empty((kv_heads, len(part.indices), slots, shape.parts, 2, dim))
        own = tensors | {"parts": parts}
        each = QueryTiles(lists.by_query(part, 1), shape, config)
        query_form("gradient", own, given, part, each, None, lists.cache)
        add_token_gradients(parts, sums, lists.by_key(part), lists.cache)
    gradient_k, gradient_v = sums[:, :rows].transpose(0, 1).unbind(2)
    dk.view(rows, kv_heads, dim).copy_(gradient_k * problem.scale)
    dv.view(rows, kv_heads, dim).copy_(gradient_v)

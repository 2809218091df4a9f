# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The query form: a tile's rows are the query heads of one token's group, or of a few neighbours, and its program walks
over the blocks that any of them selected.

A tile of several tokens visits the union of their blocks, and each row sees its own part of it. Keys of a step are one
stretch of a block, or as many short blocks as fill a tile, so that blocks of one token are gathered row by row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.bwd_preprocess import STATS_BLOCK
from dilabench.kernels.launch_cache import LaunchCache
from dilabench.kernels.selected.lists import QueryLists
from dilabench.kernels.selected.operands import PER_LENGTH, launch
from dilabench.kernels.selected.selection import TokenSelection, last_seen, load_rows, tile_at
from dilabench.kernels.selected.tiles import Direction, QueryRows
from dilabench.kernels.softmax import finite
from dilabench.kernels.tuning import TileConfig

_STATS_BLOCK = tl.constexpr(STATS_BLOCK)
_NO_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def lse_at(lse_ptr, token, head, length, n_heads):
    """Addresses of rows in [B, H, N]."""
    return lse_ptr + (token // length * n_heads + head).to(tl.int64) * length + token % length


@triton.jit
def stats_at(stats_ptr, token, head, n_heads, WIDE: tl.constexpr):
    """Addresses of lse * log2(e) of rows; `STATS_BLOCK` further on is rowsum(out * dout)."""
    if WIDE:
        token = token.to(tl.int64)
    row = token * n_heads + head
    return stats_ptr + row // _STATS_BLOCK * (2 * _STATS_BLOCK) + row % _STATS_BLOCK


@triton.jit
def _rows_of_tile(
    first_row,
    rows,
    spans_ptr,
    length,
    right,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """(key/value head, part of its group, tile, query of each row, its head in the group, its token, whether there is
    one, the last key row that it may see). Tiles of one head follow each other, so that its keys stay in the L2 cache.
    """
    tiles = tl.cdiv(rows, QUERIES)
    tile = tl.program_id(0) % tiles
    rest = tl.program_id(0) // tiles
    part, kv_head = rest % PARTS, rest // PARTS
    number = tl.arange(0, QUERIES * HEADS)
    query, head = number // HEADS, part * HEADS + number % HEADS
    row = tile * QUERIES + query
    there = (row < rows) & (head < GROUP)
    token = first_row + row
    return kv_head, part, tile, query, head, token, there, last_seen(spans_ptr, token, there, length, right, CAUSAL)


@triton.jit
def _is_others(
    unions_ptr, tile, kv_head, n_kv_heads, QUERIES: tl.constexpr, UNITED: tl.constexpr, MOST_BLOCKS: tl.constexpr
):
    """Whether the tokens of a tile are computed by the other launch: the tokens of UNITED neighbours together, if
    they see few blocks, else each of them on its own.
    """
    blocks = tl.load(unions_ptr + tile * QUERIES // UNITED * n_kv_heads + kv_head)
    return (blocks > MOST_BLOCKS) if QUERIES == UNITED else (blocks <= MOST_BLOCKS)


@triton.jit
def _steps(keys_ptr, count, last, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles of keys a list has; of its last block those that any row may see."""
    if BLOCK % BLOCK_N:
        steps = tl.cdiv(count * BLOCK, BLOCK_N)
    else:
        seen = tl.max(last, 0) + 1 - tl.load(keys_ptr + tl.maximum(count - 1, 0), count > 0, 0)
        of_last = tl.minimum(tl.cdiv(tl.maximum(seen, 0), BLOCK_N), BLOCK // BLOCK_N)
        steps = tl.where(count > 0, (count - 1) * (BLOCK // BLOCK_N) + of_last, 0)
    return steps


@triton.jit
def _keys_of_step(
    keys_ptr,
    members_ptr,
    step,
    count,
    query,
    first,
    last,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(rows of the keys of a step, whether each row of the tile sees each of them)."""
    place = tl.arange(0, BLOCK_N)
    if BLOCK % BLOCK_N:
        place += step * BLOCK_N
        slot = place // BLOCK
        listed = slot < count
        key = tl.where(listed, tl.load(keys_ptr + slot, listed, 0) + place % BLOCK, _NO_KEY)
        seen = key[None, :] <= last[:, None]
        if members_ptr is not None:
            members = tl.load(members_ptr + slot, listed, 0)
            seen = seen & (((members[None, :] >> query[:, None]) & 1) != 0)
    else:
        tiles: tl.constexpr = BLOCK // BLOCK_N
        slot = step // tiles
        key = tl.load(keys_ptr + slot) + step % tiles * BLOCK_N + place
        if members_ptr is not None:
            last = tl.where(((tl.load(members_ptr + slot) >> query) & 1) != 0, last, -1)
        seen = key[None, :] <= last[:, None]
    if WINDOWED:
        seen = seen & (key[None, :] >= first[:, None])
    return key, seen


@triton.jit(do_not_specialize=PER_LENGTH)
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    keys_ptr,
    counts_ptr,
    members_ptr,
    spans_ptr,
    unions_ptr,
    scale_log2,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    rows,
    first_row,
    length,
    n_kv_heads,
    n_heads,
    key_rows,
    left,
    right,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    UNITED: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head, _, tile, query, head, token, there, last = _rows_of_tile(
        first_row, rows, spans_ptr, length, right, GROUP, QUERIES, HEADS, PARTS, CAUSAL
    )
    if unions_ptr is not None:  # noqa: SIM102 - a condition of the compiler and one of the kernel
        if _is_others(unions_ptr, tile, kv_head, n_kv_heads, QUERIES, UNITED, MOST_BLOCKS):
            return
    head += kv_head * GROUP
    number = tile * n_kv_heads + kv_head
    keys_ptr += number.to(tl.int64) * (QUERIES * SLOTS)
    if members_ptr is not None:
        members_ptr += number.to(tl.int64) * (QUERIES * SLOTS)
    count = tl.load(counts_ptr + number)
    q = load_rows(q_ptr, token, q_token, head, q_head, there, UNIT, HEAD_DIM, DIM, WIDE)
    top = tl.full([QUERIES * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * HEADS], tl.float32)
    acc = tl.zeros([QUERIES * HEADS, DIM], tl.float32)
    for step in tl.range(0, _steps(keys_ptr, count, last, BLOCK, BLOCK_N), num_stages=STAGES):
        key, seen = _keys_of_step(
            keys_ptr, members_ptr, step, count, query, token - left, last, BLOCK, WINDOWED, BLOCK_N
        )
        k = load_rows(k_ptr, key, k_token, kv_head, k_head, key < key_rows, UNIT, HEAD_DIM, DIM, WIDE)
        v = load_rows(v_ptr, key, v_token, kv_head, v_head, key < key_rows, UNIT, HEAD_DIM, DIM, WIDE)
        logits = tl.where(seen, tl.dot(q, k.T, input_precision=PRECISION), float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1) * scale_log2)
        safe_top = finite(new_top)
        p = tl.math.exp2(logits * scale_log2 - safe_top[:, None])
        decay = tl.math.exp2(top - safe_top)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        top = new_top
    inside = there[:, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    out_at = tile_at(out_ptr, token, n_heads * HEAD_DIM, head, HEAD_DIM, 1, DIM)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), inside)
    tl.store(lse_at(lse_ptr, token, head, length, n_heads), (top + tl.log2(total)) * 0.6931471805599453, there)


@triton.jit(do_not_specialize=PER_LENGTH)
def _gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dq_ptr,
    parts_ptr,
    stats_ptr,
    keys_ptr,
    counts_ptr,
    members_ptr,
    spans_ptr,
    unions_ptr,
    scale,
    scale_log2,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    dout_token,
    dout_head,
    rows,
    first_row,
    length,
    n_kv_heads,
    n_heads,
    key_rows,
    left,
    right,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    UNITED: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head, part, tile, query, head, token, there, last = _rows_of_tile(
        first_row, rows, spans_ptr, length, right, GROUP, QUERIES, HEADS, PARTS, CAUSAL
    )
    if unions_ptr is not None:  # noqa: SIM102 - a condition of the compiler and one of the kernel
        if _is_others(unions_ptr, tile, kv_head, n_kv_heads, QUERIES, UNITED, MOST_BLOCKS):
            return
    head += kv_head * GROUP
    number = tile * n_kv_heads + kv_head
    keys_ptr += number.to(tl.int64) * (QUERIES * SLOTS)
    if members_ptr is not None:
        members_ptr += number.to(tl.int64) * (QUERIES * SLOTS)
    count = tl.load(counts_ptr + number)
    q = load_rows(q_ptr, token, q_token, head, q_head, there, UNIT, HEAD_DIM, DIM, WIDE)
    dout = load_rows(dout_ptr, token, dout_token, head, dout_head, there, UNIT, HEAD_DIM, DIM, WIDE)
    stats = stats_at(stats_ptr, token, head, n_heads, WIDE)
    log2_lse, delta = tl.load(stats, there, 0.0), tl.load(stats + _STATS_BLOCK, there, 0.0)
    column = tl.arange(0, DIM)
    dq = tl.zeros([QUERIES * HEADS, DIM], tl.float32)
    for step in tl.range(0, _steps(keys_ptr, count, last, BLOCK, BLOCK_N), num_stages=STAGES):
        key, seen = _keys_of_step(
            keys_ptr, members_ptr, step, count, query, token - left, last, BLOCK, WINDOWED, BLOCK_N
        )
        k = load_rows(k_ptr, key, k_token, kv_head, k_head, key < key_rows, UNIT, HEAD_DIM, DIM, WIDE)
        v = load_rows(v_ptr, key, v_token, kv_head, v_head, key < key_rows, UNIT, HEAD_DIM, DIM, WIDE)
        logits = tl.where(seen, tl.dot(q, k.T, input_precision=PRECISION), float("-inf"))
        p = tl.math.exp2(logits * scale_log2 - log2_lse[:, None])
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        if parts_ptr is not None:
            # For single tokens: the addends of this token to dK / scale and dV of each key, which `by_token` sums.
            slot = step * BLOCK_N + tl.arange(0, BLOCK_N)
            at = ((kv_head * rows + tile).to(tl.int64) * SLOTS + slot) * PARTS + part
            at = parts_ptr + at[:, None] * (2 * HEAD_DIM) + column[None, :]
            listed = (slot < count)[:, None] & (column < HEAD_DIM)[None, :]
            dk = tl.dot(ds.T, q, input_precision=PRECISION)
            tl.store(at, dk.to(parts_ptr.dtype.element_ty), listed)
            dv = tl.dot(p.to(v.dtype).T, dout, input_precision=PRECISION)
            tl.store(at + HEAD_DIM, dv.to(parts_ptr.dtype.element_ty), listed)
    dq_at = tile_at(dq_ptr, token, n_heads * HEAD_DIM, head, HEAD_DIM, 1, DIM)
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), there[:, None] & (column < HEAD_DIM)[None, :])


class QueryTiles(NamedTuple):
    """The tiles of a launch over a selection, and the tables that it reads: the blocks that they see.

    of_unions: the tokens of neighbours that are taken together if they see at most that many blocks, and how many;
    (1, 0) for none. name: of the launch, whatever tensors it is given.
    """

    selection: TokenSelection
    shape: QueryRows
    tiles: TileConfig
    tables: dict[str, Tensor]
    of_unions: tuple[int, int]
    programs: int
    name: Hashable

    @classmethod
    def of(
        cls,
        selection: TokenSelection,
        lists: QueryLists,
        shape: QueryRows,
        tiles: TileConfig,
        unions: tuple[Tensor, int, int] | None = None,
    ) -> QueryTiles:
        """Tiles over these lists. unions: for tiles of neighbours, the counts of their lists, and ``of_unions``."""
        tables, of_unions = lists.tensors | selection.tensors, (1, 0)
        if unions is not None:
            tables["unions"], *numbers = unions
            of_unions = numbers[0], numbers[1]
        name = "by query", selection.first_row, selection.rows, shape, of_unions
        return cls(selection, shape, tiles, tables, of_unions, lists.counts.numel() * shape.parts, name)


def query_form(
    direction: Direction,
    tensors: dict[str, Tensor],
    given: dict[str, Any],
    launches: Sequence[QueryTiles],
    cache: LaunchCache,
) -> None:
    """Forward: write ``out`` [T, H, D] and ``lse`` [B, H, N] of ``tensors``; else ``dq`` [T, H, D], and ``parts`` [K,
    tokens, S, shape.parts, 2, D], if it is there: what each token adds to dK / scale and dV of the keys in its list.

    ``given``: `operands.operand_arguments`.
    """
    kernel = _forward_kernel if direction == "forward" else _gradient_kernel
    for part in launches:
        arguments = partial(_arguments, given, part)
        launch(kernel, part.programs, tensors | part.tables, arguments, part.tiles, cache, part.name)


def _arguments(given: dict[str, Any], part: QueryTiles) -> dict[str, Any]:
    (queries, heads, parts), (united, most_blocks) = part.shape, part.of_unions
    own = {"QUERIES": queries, "HEADS": heads, "PARTS": parts, "BLOCK_N": part.tiles.block_n}
    return given | part.selection.arguments | own | {"UNITED": united, "MOST_BLOCKS": most_blocks}

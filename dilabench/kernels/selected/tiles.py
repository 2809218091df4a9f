"""Tile shapes of the kernels over token selections, which form a pass takes, and how much memory partial results get.

Measured are tiles of bfloat16, D128, blocks of 64 and groups of 16 heads: on one H200 with torch 2.11 and Triton 3.6,
as medians of five rounds of CUDA events, over 65,536 tokens of 64 heads with 16 blocks each (`nsa_64k_selected`). Times
below are of whole passes there, lists made before, selections at random, or such that 4 neighbours see 23 (alike) or 28
(near) different blocks. Other tiles are estimates from bytes, products and what the compiler says of registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import triton

from dilabench.kernels.tuning import TileConfig, padded_dim

Kernel = Literal[
    "query_forward",
    "query_gradient",
    "union_forward",
    "union_gradient",
    "gathered_forward",
    "gathered_gradient",
    "key_gradient",
    "token_gradient",
]
"""query_*: the heads of a group are the rows of a tile. union_*: the heads of neighbours that select alike.
gathered_*: queries that selected a block are. key_gradient: dK and dV of blocks; token_gradient: of single tokens."""

Form = Literal["query", "gathered"]
Direction = Literal["forward", "gradient"]


class Rule(NamedTuple):
    """``tiles`` of a kernel for head dims up to ``dim``, numbers of up to ``itemsize`` bytes, blocks of at least
    ``least_block`` keys and up to ``most_heads`` query heads for each of keys.
    """

    dim: int
    itemsize: int
    tiles: TileConfig
    least_block: int = 1
    most_heads: int = 2**31


# block_m: rows, each a query head of a token; block_n: keys. The first rule that holds. Registers and spills are of
# kernels compiled for sm_90a.
RULES: Mapping[Kernel, Sequence[Rule]] = {
    # `query_rows` gives the rows; block_m is the fewest that a product takes. 14.7 ms; two warps 15.7, tiles of 64 keys
    # 15.9 (one or two warps, two stages) to 33.9.
    "query_forward": (
        Rule(128, 2, TileConfig(16, 32, 1, 3), most_heads=16),
        Rule(128, 2, TileConfig(16, 64, 4, 3)),
        Rule(256, 2, TileConfig(16, 32, 4, 2)),
        Rule(256, 4, TileConfig(16, 32, 4, 1)),
    ),
    # 32.1 ms; (16, 32, 1, 3) 32.7, four warps 33.9, one stage 40 to 47.
    "query_gradient": (
        Rule(128, 2, TileConfig(16, 64, 2, 2), most_heads=16),
        Rule(128, 2, TileConfig(16, 64, 4, 3)),
        Rule(256, 2, TileConfig(16, 32, 4, 2)),
        Rule(256, 4, TileConfig(16, 32, 4, 1)),
    ),
    # 8.1 ms (alike), 9.8 (near) and 19.2 at random; 128 rows 9.0, 17.2 and 33.4, 32 rows 14.2, 14.9 and 22.1.
    "union_forward": (Rule(128, 2, TileConfig(64, 64, 4, 3)),),
    # 26.2 ms (alike), 26.1 (near) and 35.9 at random; three stages 28.0, 28.2 and 40.7.
    "union_gradient": (Rule(128, 2, TileConfig(64, 64, 4, 2)),),
    # A block of up to 128 keys is one tile, which stays while its queries pass by. Blocks of 64: 14.5 ms; two stages
    # 16.1, three 18.2, eight warps 20.4, 128 rows 15.9. 128 rows read K and V of longer ones half as often as 64; with
    # four warps they spill.
    "gathered_forward": (
        Rule(128, 2, TileConfig(128, 64, 8, 3), least_block=129),
        Rule(128, 2, TileConfig(64, 128, 4, 2), least_block=65),
        Rule(128, 2, TileConfig(64, 64, 4, 1)),
        Rule(256, 2, TileConfig(64, 64, 8, 1)),
        Rule(256, 4, TileConfig(64, 32, 4, 1)),
    ),
    # Blocks of 64: 32.5 ms; two stages 33.9, three 33.4, 128 rows 35.6 or more, eight warps 44.8 or more. Blocks of 65
    # to 128 keys stay, too, with eight warps; two tiles of 64 spill.
    "gathered_gradient": (
        Rule(128, 2, TileConfig(64, 64, 4, 2), least_block=129),
        Rule(128, 2, TileConfig(64, 128, 8, 2), least_block=65),
        Rule(128, 2, TileConfig(64, 64, 4, 1)),
        Rule(256, 2, TileConfig(64, 32, 8, 1)),
        Rule(256, 4, TileConfig(32, 32, 4, 1)),
    ),
    # As `tuning.RULES` has backward_key over block masks. Blocks of 64: 34.2 ms with gathered dQ; three stages 34.1, 32
    # rows 36.8 or more, 128 rows 39.7 or more, eight warps 44 or more.
    "key_gradient": (
        Rule(64, 2, TileConfig(64, 64, 4, 2)),
        Rule(128, 2, TileConfig(64, 128, 8, 2), least_block=128),
        Rule(128, 2, TileConfig(64, 64, 4, 2)),
        Rule(256, 2, TileConfig(64, 64, 8, 1)),
        Rule(256, 4, TileConfig(32, 32, 4, 1)),
    ),
    "token_gradient": (
        Rule(128, 2, TileConfig(16, 64, 4, 2)),
        Rule(256, 2, TileConfig(16, 32, 4, 2)),
        Rule(256, 4, TileConfig(16, 32, 4, 1)),
    ),
}

# Rows of a tile of one token's heads at most: wider groups are several tiles, each of which reads K and V.
MOST_QUERY_ROWS = 64

# Neighbouring rows share a tile if their union has at most this share of the blocks that they select, counted for each
# row. At 0.67 (forward) and 0.73 (gradient) of them both ways take as long.
UNION_SHARE = 2 / 3

# Both ways in one pass take longer than tokens alone if few tiles are taken together: at random 17.2 ms forward where
# tokens alone take 14.6 (dQ 0.1 ms more), where neighbours are alike 7.4, near 9.1. So the forward pass unites
# neighbours if this share of the tiles can be, and dQ follows it. The host reads it once, from about `LEAST_READ` lists
# (a tile and a key/value head) of a selection that has as many.
ALIKE = 1 / 3
LEAST_READ = 4096

# Tokens of a tile at most: which of them sees a block is a bit of 32.
MOST_QUERIES = 32

# Indices of neighbouring tokens that are sorted together at most; of one token as many as it has.
MOST_SORTED = 1024

# A program of gathered queries passes over this many tiles of rows, to read K and V once for all of them.
TILES_OF_A_BLOCK = 8

# Lists by key that are longer are shared by programs, as `tuning.SHARING_PROGRAMS` and `tuning.LEAST_SHARED_STEPS`.
SHARING_PROGRAMS = 528
LEAST_SHARED_STEPS = 64

# Partial results of a pass at a time. Tokens are taken in parts that need no more.
PARTIAL_BYTES = 1 << 30


def tiles_of(kernel: Kernel, group: int, block: int, head_dim: int, itemsize: int) -> TileConfig:
    """The tiles of a kernel; raises ValueError for a head dim above 256."""
    rules = rules_of(kernel, group, block, head_dim, itemsize)
    if not rules:
        raise ValueError(f"head dim {head_dim} has no kernel: it is above 256")
    return rules[0].tiles


def rules_of(kernel: Kernel, group: int, block: int, head_dim: int, itemsize: int) -> list[Rule]:
    """The rules that hold, the best first; empty if there are no such tiles."""
    return [
        rule
        for rule in RULES[kernel]
        if (head_dim <= rule.dim and itemsize <= rule.itemsize)
        and (block >= rule.least_block and group <= rule.most_heads)
    ]


class QueryRows(NamedTuple):
    """A tile of ``queries`` tokens times ``heads`` query heads of a group; ``parts`` such tiles cover the group."""

    queries: int
    heads: int
    parts: int


def query_rows(group: int, slots: int, tiles: TileConfig, most_queries: int = MOST_QUERIES) -> QueryRows:
    """Rows of a tile of tokens: ``tiles.block_m`` of them, or as many as the group has, up to `MOST_QUERY_ROWS`.

    Tokens are fewer, and some rows of no head, where they would be more than ``most_queries`` or their ``slots`` more
    than `MOST_SORTED` together.
    """
    padded = triton.next_power_of_2(group)
    rows = max(tiles.block_m, min(padded, MOST_QUERY_ROWS))
    most = min(most_queries, max(1, MOST_SORTED // slots))
    queries = min(rows // min(padded, rows), 1 << (most.bit_length() - 1))
    return QueryRows(queries, rows // queries, -(-group // (rows // queries)))


class UnionRows(NamedTuple):
    """A tile of neighbours: its rows, its tiles, and how many blocks they may see together, else each is on its own."""

    shape: QueryRows
    tiles: TileConfig
    most_blocks: int


def union_rows(group: int, block: int, slots: int, tiles: TileConfig) -> UnionRows | None:
    """Rows of a tile of neighbours; None if one token has enough of them, or all have fewer than a product takes."""
    shape = query_rows(group, slots, tiles)
    if group < LEAST_UNITED or shape.queries == 1 or block % tiles.block_n:
        return None
    return UnionRows(shape, tiles, int(shape.queries * slots * UNION_SHARE))


# Heads of a group that fill the rows of a product: tiles of fewer have several tokens anyway.
LEAST_UNITED = 16

# Rates of one H200, fitted to measured times: bytes per second from the L2 cache, and of rows that are gathered and
# merged, and products per second of tiles of 16 rows, which Hopper's wide instructions do not take, of taller ones, and
# of gathered ones.
_L2_BYTES, _MEMORY_BYTES = 9.3e12, 6.8e12
_NARROW_FLOPS, _WIDE_FLOPS, _GATHERED_FLOPS = 200e12, 450e12, 316e12
_ROWS_OF_WIDE = 64
# Tokens that are taken together with neighbours take this much of the time of tokens alone: 0.51 where they are alike,
# 0.63 where they are near. Where it is not known whether they are, something between.
_UNITED, _PERHAPS_UNITED = 0.55, 0.8
# Lists by key, which only the gathered form needs in a forward pass: seconds for each token, head and block.
_LISTED_SECONDS = 0.3e-9


def select_form(
    direction: Direction, group: int, block: int, head_dim: int, itemsize: int, alike: bool | None = None
) -> Form:
    """The form that takes less time, by bytes and products of one token, key/value head and selected block.

    ``alike``: whether neighbours select alike, None if that is not known.

    The query form reads K and V of the block from the L2 cache for each token, or tile of neighbours that select alike.
    The gathered form reads and writes rows of each query head: q, and a partial result, which is then read once more.
    Single tokens have no gathered form.
    """
    if block < 16:
        return "query"
    row = padded_dim(head_dim) * itemsize
    forward = direction == "forward"
    given = group, block, head_dim, itemsize
    tiles = query_rows(group, 1, tiles_of("query_forward" if forward else "query_gradient", *given))
    rows = tiles.heads * tiles.parts
    # A tile of several tokens reads the blocks of all and multiplies all rows with each.
    padded = rows * tiles.queries
    products = (4 if forward else 6) * block * padded_dim(head_dim)
    flops = _WIDE_FLOPS if padded >= _ROWS_OF_WIDE else _NARROW_FLOPS
    by_query = max(2 * block * row * tiles.parts / _L2_BYTES, products * padded / flops)
    united = rules_of("union_forward" if forward else "union_gradient", *given)
    if united and union_rows(group, block, 1, united[0].tiles):
        by_query *= {True: _UNITED, None: _PERHAPS_UNITED, False: 1.0}[alike]
    read = 1 if forward else 2
    gathered = (read + 2) * group * row / _MEMORY_BYTES + products * group / _GATHERED_FLOPS
    if forward:
        gathered += _LISTED_SECONDS
    return "query" if by_query <= gathered else "gathered"

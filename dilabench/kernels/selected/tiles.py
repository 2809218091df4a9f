"""Tile shapes of the kernels over token selections, which form a pass takes, and how much memory partial results get.

None of these numbers was measured: they are estimates from bytes and products, to be replaced by a sweep on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import triton

from dilabench.kernels.tuning import TileConfig, padded_dim

Kernel = Literal[
    "query_forward", "query_gradient", "gathered_forward", "gathered_gradient", "key_gradient", "token_gradient"
]
"""query_*: the heads of a group are the rows of a tile. gathered_*: queries that selected a block are. key_gradient: dK
and dV of blocks; token_gradient: of single tokens."""

Form = Literal["query", "gathered"]
Direction = Literal["forward", "gradient"]


class Rule(NamedTuple):
    """``tiles`` of a kernel for head dims up to ``dim``, numbers of up to ``itemsize`` bytes and blocks of at least
    ``least_block`` keys.
    """

    dim: int
    itemsize: int
    tiles: TileConfig
    least_block: int = 1


# block_m: rows, each a query head of a token; block_n: keys. The first rule that holds. Registers and spills are of
# kernels compiled for sm_90a.
RULES: Mapping[Kernel, Sequence[Rule]] = {
    # `query_rows` gives the rows; block_m is the fewest that a product takes. Three stages of K and V take about
    # 70 KiB at D128, so that three programs share a multiprocessor.
    "query_forward": (
        Rule(128, 2, TileConfig(16, 64, 4, 3)),
        Rule(256, 2, TileConfig(16, 32, 4, 2)),
        Rule(256, 4, TileConfig(16, 32, 4, 1)),
    ),
    "query_gradient": (
        Rule(128, 2, TileConfig(16, 64, 4, 3)),
        Rule(256, 2, TileConfig(16, 32, 4, 2)),
        Rule(256, 4, TileConfig(16, 32, 4, 1)),
    ),
    # A block of up to 128 keys is one tile, which stays while its queries pass by: of 64 keys three programs share a
    # multiprocessor (164 registers, 74 KiB), of 128 two (254 registers, 107 KiB). 128 rows read K and V of longer ones
    # half as often as 64; with four warps they spill.
    "gathered_forward": (
        Rule(128, 2, TileConfig(128, 64, 8, 3), least_block=129),
        Rule(128, 2, TileConfig(64, 128, 4, 2)),
        Rule(256, 2, TileConfig(64, 64, 8, 1)),
        Rule(256, 4, TileConfig(64, 32, 4, 1)),
    ),
    # Blocks of 65 to 128 keys stay, too, with eight warps; two tiles of 64 spill.
    "gathered_gradient": (
        Rule(128, 2, TileConfig(64, 64, 4, 2), least_block=129),
        Rule(128, 2, TileConfig(64, 128, 8, 2), least_block=65),
        Rule(128, 2, TileConfig(64, 64, 4, 2)),
        Rule(256, 2, TileConfig(64, 32, 8, 1)),
        Rule(256, 4, TileConfig(32, 32, 4, 1)),
    ),
    # As `tuning.RULES` has backward_key over block masks.
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


def tiles_of(kernel: Kernel, block: int, head_dim: int, itemsize: int) -> TileConfig:
    """The tiles of a kernel; raises ValueError for a head dim above 256."""
    for rule in RULES[kernel]:
        if head_dim <= rule.dim and itemsize <= rule.itemsize and block >= rule.least_block:
            return rule.tiles
    raise ValueError(f"head dim {head_dim} has no kernel: it is above 256")


class QueryRows(NamedTuple):
    """A tile of ``queries`` tokens times ``heads`` query heads of a group, of which ``parts`` cover the group."""

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


# Rates of one H200: bytes per second from the L2 cache and from memory, and products per second of tiles of 16 rows,
# which Hopper's wide instructions do not take, and of taller ones.
_L2_BYTES, _MEMORY_BYTES = 6e12, 4.2e12
_NARROW_FLOPS, _WIDE_FLOPS = 250e12, 450e12
_ROWS_OF_WIDE = 64


def select_form(direction: Direction, group: int, block: int, head_dim: int, itemsize: int) -> Form:
    """The form that takes less time, by bytes and products of one token, key/value head and selected block.

    The query form reads K and V of the block from the L2 cache for each token, whatever the neighbours select. The
    gathered form reads and writes rows of each query head: q, and a partial result, which is then read once more.
    Single tokens have no gathered form.
    """
    if block < 16:
        return "query"
    row = padded_dim(head_dim) * itemsize
    kernel: Kernel = "query_forward" if direction == "forward" else "query_gradient"
    tiles = query_rows(group, 1, tiles_of(kernel, block, head_dim, itemsize))
    rows = tiles.heads * tiles.parts
    # A tile of several tokens reads the blocks of all and multiplies all rows with each.
    padded = rows * tiles.queries
    products = (4 if direction == "forward" else 6) * block * padded_dim(head_dim)
    flops = _WIDE_FLOPS if padded >= _ROWS_OF_WIDE else _NARROW_FLOPS
    by_query = max(2 * block * row * tiles.parts / _L2_BYTES, products * padded / flops)
    read = 1 if direction == "forward" else 2
    gathered = max((read + 2) * group * row / _MEMORY_BYTES, products * group / _WIDE_FLOPS)
    return "query" if by_query <= gathered else "gathered"

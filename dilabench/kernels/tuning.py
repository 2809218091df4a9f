"""The kernel and tiles of a launch: one measured table, from which `select_kernel` reads.

The reason for a rule is above it. Figures are of one GPU in one session, so compare them only within a comment. Further
thresholds: one kernel for both passes of the backward, columns of zeros for heads, and others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, NamedTuple

Direction = Literal["forward", "backward_query", "backward_key"]
Kernel = Literal["plain", "narrow", "specialized", "at_once"]
"""plain: Triton, any GPU (`fused.forward`, `fused.backward`). In Gluon, for Hopper: narrow (`sm90.narrow_forward`), one
warpgroup; specialized (`sm90.forward`), a producer warp and two consumer warpgroups; at_once (`sm90.backward`), both
passes of the backward."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """``block_m`` query rows by ``block_n`` key rows per step, warps per program, software-pipeline depth.

    ``max_registers`` per thread, where the compiler would take more than let one program more be resident.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @property
    def longest(self) -> int:
        """Rows of the longer side; the other divides it."""
        return max(self.block_m, self.block_n)

    def fitted(self, largest_tile: int) -> TileConfig:
        """This configuration with tiles no larger than ``largest_tile`` rows; fewer warps when the tile shrinks below
        them.
        """
        block_m, block_n = min(self.block_m, largest_tile), min(self.block_n, largest_tile)
        warps = self.num_warps if block_m >= self.block_m or block_m >= 128 else min(self.num_warps, 4)
        return replace(self, block_m=block_m, block_n=block_n, num_warps=warps)


class Keys(NamedTuple):
    """How many keys a query may see in the mean: of whole segments, of causal ones, and where a window cuts them."""

    whole: float
    causal: float
    windowed: float


class Rule(NamedTuple):
    """A row of the table: ``kernel`` with ``tiles`` for head dims from ``dims[0]`` to ``dims[1]``.

    It holds under all of these conditions. ``hopper``: the device has sm_90 and Triton Gluon. ``half``: numbers of 16
    bits; else float32. ``causal``, ``cut`` (the sequence ends inside a key tile): None for either. ``least_tile``: how
    many rows the segments must allow a tile. ``exact``: tiles have no columns beyond the head dim. ``blocks``: of block
    masks alone, or not of them; None for either.
    """

    dims: tuple[int, int]
    kernel: Kernel
    tiles: TileConfig
    causal: bool | None = None
    cut: bool | None = None
    hopper: bool = False
    half: bool = True
    least_tile: int = 0
    exact: bool = False
    most_keys: Keys | None = None
    blocks: bool | None = None


class Selected(NamedTuple):
    """A kernel and its tiles."""

    kernel: Kernel
    tiles: TileConfig


RULES: Mapping[Direction, Sequence[Rule]] = {
    "forward": (
        # If lists have few steps, programs of the warp-specialised kernel, alone on a multiprocessor, wait more than
        # they compute, and smaller ones of the plain kernel win. Microseconds of both on one H100, 2x16384, H8, bf16,
        # rate 1. D80: window 128 152 to 93, 512 200 to 157, segments of 512 155 to 148, causal ones of 1024 192 to 162.
        Rule((80, 80), "plain", TileConfig(64, 64, 4, 2), hopper=True, least_tile=128, most_keys=Keys(512, 1024, 1024)),
        # D96: window 128 161 to 111, 384 on both sides 273 to 243, segments of 256 128 to 121, causal ones of 512 157
        # to 130.
        Rule((96, 96), "plain", TileConfig(64, 64, 4, 2), hopper=True, least_tile=128, most_keys=Keys(256, 512, 800)),
        # D128: window 128 on both sides 211 to 163, causal segments of 256 122 to 115, whole ones 107 and 138.
        Rule((128, 128), "plain", TileConfig(64, 32, 4, 2), hopper=True, least_tile=128, most_keys=Keys(0, 128, 300)),
        # Warp-specialised. Against the plain kernel on one H200, effective TFLOP/s side by side: 65536 tokens, w 1024
        # 5792 32768 65536, r 1 2 4 8: D80 500 to 312, D96 582 to 373 (two stages 505), D128 642 to 500, D192 609 to 211
        # (three stages 603), D256 742 to 278; causal, nested: D128 557 to 434, D256 628 to 222. Up to D64 three
        # resident programs of the plain kernel are as fast (D48 319 to 325, D64 451 to 454, nested 539 to 554, causal
        # 440 to 360). Columns beyond the head dim would belong to the next head.
        Rule((65, 96), "specialized", TileConfig(128, 128, 4, 3), hopper=True, least_tile=128, exact=True),
        Rule((97, 128), "specialized", TileConfig(128, 128, 4, 2), hopper=True, least_tile=128, exact=True),
        Rule((129, 256), "specialized", TileConfig(128, 64, 4, 2), hopper=True, least_tile=128, exact=True),
        # Programs of one warpgroup, three of them resident, four if causal.
        Rule((1, 64), "narrow", TileConfig(64, 128, 4, 2, 168), False, hopper=True, least_tile=128, blocks=False),
        Rule((1, 64), "narrow", TileConfig(64, 64, 4, 2, 128), True, hopper=True, least_tile=64, blocks=False),
        # Block masks, here and for both backward kernels: the shapes that won before those below were chosen.
        Rule((33, 64), "plain", TileConfig(64, 128, 4, 2), blocks=True),
        Rule((1, 128), "plain", TileConfig(64, 64, 4, 2), blocks=True),
        Rule((129, 256), "plain", TileConfig(64, 64, 8, 2), blocks=True),
        # Plain, here and for both backward kernels: chosen on one H200 (torch 2.11, Triton 3.6) among 5 to 11 shapes
        # each at 1x131072, H16, w 2048..32768, r 1..16; the figure is effective TFLOP/s forward, and milliseconds of
        # the kernel backward. Two to four resident programs of 4 warps per multiprocessor beat larger programs of 8
        # warps everywhere, and beat a loop that issues the next q.k product before the softmax of the present one (518
        # against 596 at D64, 593 against 693 at D128).
        Rule((1, 64), "plain", TileConfig(64, 128, 4, 2), causal=False),  # 593; 64x64 526; 128x128 with 8 warps 389
        Rule((1, 64), "plain", TileConfig(64, 64, 4, 2), causal=True),  # 438; 64x128 422; 128x64 353
        # Where the sequence ends inside a key tile, a forward that is not causal has a second loop for that tile;
        # beside it tiles of 128x64 spill in both loops (compiled, not measured), so the best of 64 query rows stands
        # in.
        Rule((65, 128), "plain", TileConfig(64, 64, 4, 2), causal=False, cut=True),
        # 693; 128x64 in three stages 671; 64x64 592; 128x128 with 8 warps 580
        Rule((65, 128), "plain", TileConfig(128, 64, 4, 2), causal=False),
        Rule((65, 128), "plain", TileConfig(64, 64, 4, 2), causal=True),  # 480; 128x64 500, but it spills 80 bytes
        Rule((129, 256), "plain", TileConfig(64, 64, 8, 2)),
        # float32, which Triton splits into bfloat16 where it is multiplied (`row_layout.product_precision`), here and
        # for both backward kernels: milliseconds on an H200 at 1x8192, H8, w 2048 4096 8192, r 1 2 4, causal, backward
        # of both kernels with the best of the other. They spill outside of their first product; smaller tiles that do
        # not are slower. Three programs resident: 0.56; without the limit 0.58, in three stages 0.70; 128x128 with 8
        # warps 0.60; FMA 2.79
        Rule((1, 64), "plain", TileConfig(64, 64, 4, 2, 168), half=False),
        Rule((65, 128), "plain", TileConfig(64, 64, 4, 1), half=False),  # 1.09; 128x64 with 8 warps 1.15; FMA 7.04
        Rule((129, 256), "plain", TileConfig(64, 32, 4, 1), half=False),  # 4.92; 128x32 with 8 warps 5.04; 32x32 16.6
    ),
    "backward_query": (
        Rule((1, 128), "plain", TileConfig(64, 64, 4, 2), blocks=True),
        Rule((129, 256), "plain", TileConfig(64, 64, 8, 2), blocks=True),
        Rule((1, 64), "plain", TileConfig(64, 64, 4, 2), causal=False),  # 4.01; 128x64 with 8 warps 4.34
        Rule((1, 64), "plain", TileConfig(64, 64, 4, 2), causal=True),  # 2.50; three stages 2.78
        Rule((65, 128), "plain", TileConfig(64, 64, 4, 2), causal=False),  # 7.94; 128x128 with 8 warps 8.30
        Rule((65, 128), "plain", TileConfig(64, 64, 4, 2), causal=True),  # 4.80; three stages 8.11
        # Head dims 192 and 256 at 1x32768, H8: milliseconds of both backward kernels, the other with 64x64 and 8 warps.
        # 9.39; 64x64 with 8 warps 12.55, with 4 warps 10.33; causal 4.07, 5.21 and 4.28
        Rule((129, 192), "plain", TileConfig(128, 64, 8, 2)),
        # 11.9; 128x64 in one stage 12.0; 64x64 14.5; causal 4.96, 5.18 and 5.82
        Rule((193, 256), "plain", TileConfig(128, 32, 8, 2)),
        Rule((1, 64), "plain", TileConfig(64, 64, 4, 1), half=False),  # 1.94; two stages 1.96 to 1.98; FMA, both, 43
        Rule((65, 128), "plain", TileConfig(128, 64, 8, 2), half=False),  # 6.38; 64x64 6.83; FMA 100
        Rule((129, 256), "plain", TileConfig(128, 32, 8, 1), half=False),
    ),
    "backward_key": (
        # Both passes in one kernel, where `at_once_is_faster`. Milliseconds of the two passes of the plain kernels and
        # of this one on an H200, H16: 32768 tokens, dense, D128 52.8 to 37.8, D64 27.2 to 22.0, causal 14.2 to 10.4;
        # longnet_128k D128 20.2 to 16.0, causal 12.2 to 11.9, D64 10.1 to 9.2, causal 6.58 to 6.64; 65536 tokens, w
        # 1024 5792 32768 65536, D96 14.5 to 12.2, D80 13.7 to 11.4, D64 8.6 to 7.5; GigaPath's 70001 tokens at D48 9.8
        # to 8.1. Below D33 a share of dQ turned over would have fewer rows than a product.
        Rule((33, 64), "at_once", TileConfig(64, 128, 4, 4), hopper=True, least_tile=128),
        Rule((65, 128), "at_once", TileConfig(64, 128, 4, 2), hopper=True, least_tile=128),
        Rule((33, 64), "plain", TileConfig(64, 64, 4, 3), blocks=True),
        Rule((1, 128), "plain", TileConfig(64, 64, 4, 2), blocks=True),
        Rule((129, 256), "plain", TileConfig(64, 64, 8, 2), blocks=True),
        Rule((1, 64), "plain", TileConfig(64, 64, 4, 3, 168), causal=False),  # 6.36; without the limit 7.16
        Rule((1, 64), "plain", TileConfig(64, 64, 4, 2, 168), causal=True),  # 3.83; without the limit 15 % more
        Rule((65, 128), "plain", TileConfig(64, 64, 4, 2), causal=False),  # 10.9; 64x128 with 8 warps 11.9
        Rule((65, 128), "plain", TileConfig(64, 64, 4, 2), causal=True),  # 6.70; 64x128 with 8 warps 7.45
        Rule((129, 192), "plain", TileConfig(32, 128, 8, 2), causal=False),  # 10.5; 64x64 12.5; three stages 12.9
        Rule((129, 192), "plain", TileConfig(64, 64, 8, 2), causal=True),  # 5.22; 32x128 5.13, spilling in both loops
        # 14.5; in one stage 16.8; 32x64 18.1; causal 5.82; in one stage 6.49
        Rule((193, 256), "plain", TileConfig(64, 64, 8, 2)),
        Rule((1, 64), "plain", TileConfig(32, 64, 4, 2), half=False),  # 1.98; 32x128 with 8 warps 2.19
        Rule((65, 128), "plain", TileConfig(64, 128, 8, 1), half=False),  # 5.85; 64x64 6.08
        Rule((129, 256), "plain", TileConfig(32, 64, 4, 1), half=False),
    ),
}


def select_kernel(
    direction: Direction,
    head_dim: int,
    *,
    causal: bool,
    largest_tile: int,
    itemsize: int = 2,
    hopper: bool = False,
    windowed: bool = False,
    keys: float = inf,
    cut: bool = False,
    blocks: bool = False,
) -> Selected:
    """The first rule of a direction that holds, its tiles fitted to segments that allow ``largest_tile`` rows.

    itemsize: bytes of a number. hopper: as `row_layout.on_hopper` says of the device; False asks for a plain kernel.
    keys: how many a query sees in the mean; windowed: a window hides some of its segment. cut: the sequence ends inside
    a key tile. blocks: over a block mask. Raises ValueError for a head dim above 256.
    """
    for rule in RULES[direction]:
        low, high = rule.dims
        if (
            low <= head_dim <= high
            and rule.half == (itemsize <= 2)
            and rule.causal in (None, causal)
            and rule.cut in (None, cut)
            and rule.blocks in (None, blocks)
            and rule.least_tile <= largest_tile
            and (hopper or not rule.hopper)
            and not (rule.exact and sum(tile_columns(head_dim, 2)) != head_dim)
        ):
            most = rule.most_keys
            if most is None or keys <= (most.windowed if windowed else most.causal if causal else most.whole):
                return Selected(rule.kernel, rule.tiles.fitted(largest_tile))
    raise ValueError(f"head dim {head_dim} has no kernel: it is above 256")


# Milliseconds of both ways of a backward pass on one H100, of a step (a tile of queries against one of keys) up to a
# head dim, and of a launch. Fitted to 212 random plans of one to four branches, up to 56,000 tokens, head dims of 48 to
# 128 (docs/figures/h100-backward-at-once.json): the way that they give takes 1.02 times the faster one's time in the
# mean.
_STEP_MS = {64: 0.00145, 128: 0.0024}
_LAUNCH_MS = 0.0085
# The other work of a program takes as long as this many steps. The longest one, begun first, can be waited for: a share
# of the programs finish with it.
_BESIDE_STEPS = 6.5
_LONGEST_AT_ONCE, _LONGEST_OF_TWO = 0.66, 0.35
# Zeroing the float32 sums of dQ and writing what they become, and by the million of them.
_SUMS_MS, _SUMS_MS_OF_MILLION = 0.0037, 0.005
# The same steps in two passes, and where a program by keys walks over the lists of several heads.
_TWO_PASSES, _OF_SEVERAL_HEADS = 1.27, 1.22


class WorkByKey(NamedTuple):
    """The lists by key of a group of branches: how many programs walk over one each, and their steps in the mean."""

    programs: float
    steps: float


def at_once_is_faster(
    groups: Sequence[WorkByKey], head_dim: int, *, causal: bool, grouped_queries: bool, sums: int, processors: int
) -> bool:
    """Return True if one launch of each group costs less than two of smaller tiles. Combined launches overlap, so only
    the longest program is waited for, but they pay for sums of dQ.

    grouped_queries: several heads read the same keys. sums: how many numbers dQ has. processors: of the device.
    """
    step_ms = next(ms for largest, ms in _STEP_MS.items() if head_dim <= largest)
    shares = longest_of_all = 0.0
    two_passes = len(groups) * _LAUNCH_MS
    slower = step_ms * _TWO_PASSES * (_OF_SEVERAL_HEADS if grouped_queries else 1)
    for programs, steps in groups:
        longest = steps * (2 if causal else 1) + _BESIDE_STEPS
        # Steps of a multiprocessor.
        share = programs * (steps + _BESIDE_STEPS) / processors
        shares += share
        longest_of_all = max(longest_of_all, longest)
        two_passes += slower * max(share, _LONGEST_OF_TWO * longest)
    at_once = len(groups) * _LAUNCH_MS + step_ms * max(shares, _LONGEST_AT_ONCE * longest_of_all)
    return at_once + _SUMS_MS + _SUMS_MS_OF_MILLION * sums / 1e6 < two_passes


def blocks_at_once_are_faster(head_dim: int, programs: float, steps: float) -> bool:
    """Return True if one kernel for both passes of the backward is faster than two over a block mask, given its key
    tiles and the mean number of steps for each.

    A program has a multiprocessor for itself: with fewer of them, or with shorter lists, two passes of smaller tiles
    are faster. At D128 one kernel is 1.14 times as fast with 51 steps, 0.95 times with 26; no narrower head gains.
    """
    return head_dim > 64 and programs >= 512 and steps >= 48


# Heads whose programs are as many follow others in the float32 sums of dQ: at their end multiprocessors wait for the
# last of them. Programs of narrower heads are the shorter, so more of them.
_PROGRAMS_OF_128_COLUMNS = 2048


def heads_at_a_time(kv_heads: int, programs: int, head_dim: int) -> int:
    """The number of K/V heads, a divisor of all, that share the sums of dQ, given the programs of each."""
    least = _PROGRAMS_OF_128_COLUMNS * 128 // padded_dim(head_dim)
    return next((n for n in range(1, kv_heads) if kv_heads % n == 0 and n * programs >= least), kv_heads)


# From this many queries of a key and this many pairs on, reading and writing keys once costs less than their rows that
# cross memory lines.
_MANY_QUERIES, _MANY_PAIRS = 2000, 700_000_000


def columns_to_add(head_dim: int, itemsize: int, hopper: bool, queries: float = 0, keys: float = 0) -> int:
    """The number of columns of zeros to add to tiles that are copied many times, before kernels read them: mostly 0.

    Hopper copies rows that are no multiple of 32 bytes at half speed. On an H200, 32768 tokens, H16, w 1024 5792 32768
    65536, r 1 2 4 8, forward and backward alone, in ms: D24 1.45 and 3.82, D32 0.99 and 3.21; D40 2.27 and 5.25, D56
    1.82 and 4.78, D48 1.25 and 4.21. Above 64 it was not tried.

    And rows that cross a memory line of 128 bytes, as every second one of D48 does, are two copies of lines. The small
    programs of the forward pass are bound by those, and ask for whole lines where ``queries`` enough see each of the
    ``keys`` in the mean: on an H100 GigaPath's branches took 0.85 to 0.94 of the time at D48 and 0.80 to 0.83 at D40
    (docs/figures/h100-whole-lines.json).
    """
    if itemsize != 2 or head_dim > 64 or not hopper:
        return 0
    whole_lines = head_dim > 32 and queries >= _MANY_QUERIES and queries * keys >= _MANY_PAIRS
    return -head_dim % (64 if whole_lines else 16)


def is_persistent(head_dim: int, causal: bool, more: bool) -> bool:
    """Return True if programs of the specialized forward stay on their multiprocessor and walk over many tiles.

    Longer lists gain from that (840 against 815 TFLOP/s effective, not causal), shorter causal ones lose (503 against
    540). It costs the consumers registers, which spill with accumulators of many columns and with ``more``: a loop over
    masked tiles or results that are merged. Below 128 columns a program may have to begin again.
    """
    return head_dim == 128 and not causal and not more


def is_softmax_bound(head_dim: int) -> bool:
    """Return True if the softmax of the specialized forward takes as long as its products. Then alternating gains 5 to
    10 %, and so does keeping the running maximum in most steps.
    """
    return head_dim < 128


# Below this many bytes of keys and values the L2 cache holds all of them: order is free, so heavy tiles go first.
L2_RESIDENT_BYTES = 24 << 20

# A later group re-reads and re-writes the output rows it covers, and is further launches: of a row and of a group that
# is about as much as this many pairs. Over the 91 random patterns of docs/figures/h100-cuts.json that have a choice,
# forward and backward take 1.035 times the best cut's time in the mean (1.045 at half the first alone).
MERGE_COST_PAIRS, GROUP_COST_PAIRS = 128, 2_000_000

# Lists of tiles (`fused.tile_tables`). Up to this many entries, and numbers for them, are made on the host.
FEW_ENTRIES = 1 << 17
# On a device entries are made for as many tiles at a time as need this many of the numbers that lead to them.
NUMBERS_AT_ONCE = 1 << 23
# Lists of all tails are made together up to this many entries, and tiles of this many classes.
TOGETHER_ENTRIES, TOGETHER_TILES = 1 << 20, 1 << 16
# Documents end with many different tails, and the next packing with others. GigaPath's branches over documents up to
# 32768 tokens, forward only, have 393,216 tiles: made once in 0.3 s (18 MiB), or for each packing in 0.1 s.
DOCUMENT_ENTRIES, DOCUMENT_TILES = 1 << 23, 1 << 19

# Lists by key of a block mask that are far longer than others are shared by programs: as many as run at once on a GPU
# of 132 multiprocessors, twice over, so that the last ones to end are short.
SHARING_PROGRAMS = 528
# Shorter shares lose more in filling their pipelines than they gain.
LEAST_SHARED_STEPS = 64

# From this many tokens that are in the same branches on, separate branches are merged class by class: programs of
# tokens that are in the same branches are few for fewer.
MANY_TOKENS = 128
# The same of documents in the mean: a program goes through all that it has tokens of.
MANY_TOKENS_OF_A_DOCUMENT = 32

_SMALLEST_DIM = 16
# Below it a second tile costs more than it saves: D48 backward 5.18 ms in tiles of 64 columns, 5.44 in 32 and 16.
_SMALLEST_HEAD_TILE = 64


def tile_columns(dim: int, itemsize: int) -> tuple[int, int]:
    """Columns of the tiles that hold a head dim: a power of two, and another behind it (0: none) where both together
    are less than the next power of two. The columns beyond D are zeros, which change no product.

    float32 has one tile: with two, head dims 72 and 160 ended in an illegal memory access on an H200 (Triton 3.6).
    """
    head, tail = product_columns(dim)
    return (head, tail) if tail == 0 or (head >= _SMALLEST_HEAD_TILE and itemsize <= 2) else (padded_dim(dim), 0)


def product_columns(dim: int) -> tuple[int, int]:
    """As `tile_columns` for products over columns of one tile, which may have fewer of them."""
    padded = padded_dim(dim)
    head = padded // 2
    tail = padded_dim(dim - head)
    return (head, tail) if head + tail < padded else (padded, 0)


def padded_dim(dim: int) -> int:
    """The power of two that tiles have as head dim: the columns beyond D are zeros, which change no product."""
    return max(_SMALLEST_DIM, 1 << (dim - 1).bit_length())


# Shared memory of a Hopper multiprocessor for one program.
KERNELS: tuple[Direction, ...] = ("forward", "backward_query", "backward_key")


def read_tiles(text: str) -> dict[Direction, TileConfig]:
    """The configuration of each kernel that a text names: 'forward=64x128x4x2'; none for an empty one.

    A kernel's name is followed by query rows x key rows x warps x stages, and by registers per thread if these are
    limited. A comma separates the two kernels of a backward pass. A shape goes to the plain kernel.

    Raises ValueError for another kernel, sizes that the kernels cannot have, and text of another form.
    """
    found: dict[Direction, TileConfig] = {}
    for part in filter(None, text.split(",")):
        name, _, sizes = part.partition("=")
        kernel = next((kernel_name for kernel_name in KERNELS if kernel_name == name.strip()), None)
        numbers = [int(number) for number in sizes.split("x") if number.strip().isdecimal()]
        if kernel is None or len(numbers) not in (4, 5) or len(numbers) != len(sizes.split("x")):
            raise ValueError(
                f"tiles {part!r} is not KERNEL=MxNxWARPSxSTAGES, for example forward=64x128x4x2; kernels: "
                f"{', '.join(KERNELS)}"
            )
        block_m, block_n, warps, stages, *registers = numbers
        if any(block < 16 or block & (block - 1) for block in (block_m, block_n)) or warps not in (4, 8) or not stages:
            raise ValueError(f"tiles {part!r}: rows must be powers of two from 16, warps 4 or 8, and stages at least 1")
        limit = registers[0] if registers else None
        found[kernel] = TileConfig(block_m, block_n, warps, stages, max_registers=limit)
    return found

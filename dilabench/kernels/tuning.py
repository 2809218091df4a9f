"""Tile shapes of the fused kernels, as measured; `tile_config` picks one and fits it to a group's segments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Direction = Literal["forward", "backward_query", "backward_key"]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """``block_m`` query rows by ``block_n`` key rows per step, warps per program, software-pipeline depth.

    ``specialized`` asks for the Hopper kernel with a producer warp and two consumer warpgroups (`fused.sm90.forward`,
    `fused.sm90.backward`).
    ``max_registers`` per thread, where the compiler would take more than let one program more be resident.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    specialized: bool = False
    max_registers: int | None = None

    @property
    def longest(self) -> int:
        """Rows of the longer side, of which the other is a divisor."""
        return max(self.block_m, self.block_n)

    def fitted(self, largest_tile: int) -> TileConfig:
        """This configuration with tiles no larger than ``largest_tile`` rows; fewer warps when the tile shrinks below
        them.
        """
        block_m, block_n = min(self.block_m, largest_tile), min(self.block_n, largest_tile)
        warps = self.num_warps if block_m >= self.block_m or block_m >= 128 else min(self.num_warps, 4)
        return replace(self, block_m=block_m, block_n=block_n, num_warps=warps)


# (most columns of a tile, causal, direction), bf16 and fp16 on sm_90. Chosen on one H200 (torch 2.11, Triton 3.6)
# among 5 to 11 shapes each at 1x131072, H16, w 2048..32768, r 1..16; the figure is effective TFLOP/s forward, and
# milliseconds of the kernel backward. Two to four resident programs of 4 warps per multiprocessor beat larger programs
# of 8 warps everywhere, and beat a loop that issues the next q.k product before the softmax of the present one (518
# against 596 at D64, 593 against 693 at D128).
_SM90: dict[tuple[int, bool, Direction], TileConfig] = {
    (64, False, "forward"): TileConfig(64, 128, 4, 2),  # 593; 64x64 526; 128x128 with 8 warps 389
    (64, True, "forward"): TileConfig(64, 64, 4, 2),  # 438; 64x128 422; 128x64 353
    (128, False, "forward"): TileConfig(128, 64, 4, 2),  # 693; 128x64x3 671; 64x64 592; 128x128 with 8 warps 580
    (128, True, "forward"): TileConfig(64, 64, 4, 2),  # 480; 128x64 500, but it spills 80 bytes
    (64, False, "backward_query"): TileConfig(64, 64, 4, 2),  # 4.01; 128x64 with 8 warps 4.34
    (64, True, "backward_query"): TileConfig(64, 64, 4, 2),  # 2.50; three stages 2.78
    (128, False, "backward_query"): TileConfig(64, 64, 4, 2),  # 7.94; 128x128 with 8 warps 8.30
    (128, True, "backward_query"): TileConfig(64, 64, 4, 2),  # 4.80; three stages 8.11
    (64, False, "backward_key"): TileConfig(64, 64, 4, 3, max_registers=168),  # 6.36; without the limit 7.16
    (64, True, "backward_key"): TileConfig(64, 64, 4, 2, max_registers=168),  # 3.83; without the limit 15 % more
    (128, False, "backward_key"): TileConfig(64, 64, 4, 2),  # 10.9; 64x128 with 8 warps 11.9
    (128, True, "backward_key"): TileConfig(64, 64, 4, 2),  # 6.70; 64x128 with 8 warps 7.45
    # Head dims 192 and 256 at 1x32768, H8: milliseconds of both backward kernels, the other one with 64x64 and 8 warps.
    (192, False, "forward"): TileConfig(64, 64, 8, 2),
    (192, True, "forward"): TileConfig(64, 64, 8, 2),
    (256, False, "forward"): TileConfig(64, 64, 8, 2),
    (256, True, "forward"): TileConfig(64, 64, 8, 2),
    (192, False, "backward_query"): TileConfig(128, 64, 8, 2),  # 9.39; 64x64 with 8 warps 12.55, with 4 warps 10.33
    (192, True, "backward_query"): TileConfig(128, 64, 8, 2),  # 4.07; 64x64 with 8 warps 5.21, with 4 warps 4.28
    (256, False, "backward_query"): TileConfig(128, 32, 8, 2),  # 11.9; 128x64 in one stage 12.0; 64x64 14.5
    (256, True, "backward_query"): TileConfig(128, 32, 8, 2),  # 4.96; 128x64 in one stage 5.18; 64x64 5.82
    (192, False, "backward_key"): TileConfig(32, 128, 8, 2),  # 10.5; 64x64 12.5; three stages 12.9
    (192, True, "backward_key"): TileConfig(64, 64, 8, 2),  # 5.22; 32x128 5.13, but it spills in both loops
    (256, False, "backward_key"): TileConfig(64, 64, 8, 2),  # 14.5; in one stage 16.8; 32x64 18.1
    (256, True, "backward_key"): TileConfig(64, 64, 8, 2),  # 5.82; in one stage 6.49
}


# Where the sequence ends inside a key tile, a forward that is not causal has a second loop for that tile; beside it the
# 128x64 tiles of D128 spill in both loops (compiled, not measured), so the best shape of 64 query rows stands in.
_SM90_CUT: dict[tuple[int, bool, Direction], TileConfig] = {
    (128, False, "forward"): TileConfig(64, 64, 4, 2),
}


# The warp-specialised forward by the largest head dim, causal or not. Against the plain kernel on one H200, effective
# TFLOP/s side by side: 65536 tokens, w 1024 5792 32768 65536, r 1 2 4 8: D80 500 to 312, D96 582 to 373 (two stages
# 505), D128 642 to 500, D192 609 to 211 (three stages 603), D256 742 to 278; causal, nested: D128 557 to 434, D256 628
# to 222. Up to D64 three resident programs of the plain kernel are as fast (D48 319 to 325, D64 451 to 454, nested 539
# to 554, causal 440 to 360).
_SPECIALIZED: dict[int, TileConfig] = {
    96: TileConfig(128, 128, 4, 3, specialized=True),
    128: TileConfig(128, 128, 4, 2, specialized=True),
    256: TileConfig(128, 64, 4, 2, specialized=True),
}
_SMALLEST_SPECIALIZED = 65


# The backward pass in one kernel, by the largest head dim, where it wins. Milliseconds of the two passes of the plain
# kernels and of this one on an H200, H16: 32768 tokens, dense, D128 52.8 to 37.8, D64 27.2 to 22.0, causal 14.2 to
# 10.4; longnet_128k D128 20.2 to 16.0, causal 12.2 to 11.9, D64 10.1 to 9.2, causal 6.58 to 6.64; 65536 tokens, w 1024
# 5792 32768 65536, D96 14.5 to 12.2, D80 13.7 to 11.4, D64 8.6 to 7.5; GigaPath's 70001 tokens at D48 9.8 to 8.1.
_SPECIALIZED_BACKWARD: dict[int, TileConfig] = {
    64: TileConfig(64, 128, 4, 4, specialized=True),
    128: TileConfig(64, 128, 4, 2, specialized=True),
}
# Below, a share of dQ turned over would have fewer rows than a product.
_SMALLEST_SPECIALIZED_BACKWARD = 33


# float32, which Triton splits into bfloat16 where it is multiplied (`row_layout.product_precision`). (Largest head
# dim, direction), on an H200 at 1x8192, H8, w 2048 4096 8192, r 1 2 4, causal: milliseconds, backward of both kernels
# with the best of the other. They spill outside of their first product; smaller tiles that do not are slower.
_FLOAT32: dict[tuple[int, Direction], TileConfig] = {
    # Three programs resident: 0.56; without the limit 0.58, in three stages 0.70; 128x128 with 8 warps 0.60; FMA 2.79
    (64, "forward"): TileConfig(64, 64, 4, 2, max_registers=168),
    (128, "forward"): TileConfig(64, 64, 4, 1),  # 1.09; 128x64 with 8 warps 1.15; by FMA 7.04
    (256, "forward"): TileConfig(64, 32, 4, 1),  # 4.92; 128x32 with 8 warps 5.04; 32x32 16.6
    (64, "backward_query"): TileConfig(64, 64, 4, 1),  # 1.94; two stages 1.96 to 1.98; by FMA both kernels 43
    (128, "backward_query"): TileConfig(128, 64, 8, 2),  # 6.38; 64x64 6.83; by FMA 100
    (256, "backward_query"): TileConfig(128, 32, 8, 1),
    (64, "backward_key"): TileConfig(32, 64, 4, 2),  # 1.98; 32x128 with 8 warps 2.19
    (128, "backward_key"): TileConfig(64, 128, 8, 1),  # 5.85; 64x64 6.08
    (256, "backward_key"): TileConfig(32, 64, 4, 1),
}


def float32_config(head_dim: int, direction: Direction) -> TileConfig:
    """Configuration for float32 operands, which take twice the shared memory."""
    return _FLOAT32[64 if head_dim <= 64 else 128 if head_dim <= 128 else 256, direction]


def shipped(cut: bool = False) -> tuple[tuple[int, bool, Direction, TileConfig], ...]:
    """Every (head_dim, causal, direction, configuration) of the table of the plain kernels; see `tile_config`."""
    return tuple((*key, config) for key, config in ({**_SM90, **_SM90_CUT} if cut else _SM90).items())


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


# Narrow heads on Hopper, in programs of one warpgroup, three of them resident, four if causal.
_NARROW: dict[bool, TileConfig] = {
    False: TileConfig(64, 128, 4, 2, max_registers=168),
    True: TileConfig(64, 64, 4, 2, max_registers=128),
}


def narrow_config(head_dim: int, causal: bool, largest_tile: int) -> TileConfig | None:
    """Configuration of the Hopper kernel for head dims below `specialized_config`'s where its tiles fit, else None."""
    config = _NARROW.get(causal) if head_dim < _SMALLEST_SPECIALIZED else None
    return config if config and config.longest <= largest_tile else None


def specialized_config(head_dim: int, largest_tile: int) -> TileConfig | None:
    """Configuration of the warp-specialised forward where it wins and its tiles fit, else None.

    Its tiles have no columns beyond the head dim, which would be those of the next head.
    """
    if head_dim < _SMALLEST_SPECIALIZED or sum(tile_columns(head_dim, 2)) != head_dim:
        return None
    config = next((config for largest, config in _SPECIALIZED.items() if head_dim <= largest), None)
    return config if config and config.longest <= largest_tile else None


# Where lists have few steps, programs of the warp-specialised forward, alone on a multiprocessor, wait more than they
# compute, and smaller ones of the plain kernel win: by the head dim, up to how many keys of a query in the mean where
# it sees whole segments, where they are causal and where a window cuts them, and the tiles. Microseconds of both on one
# H100, 2x16384, H8, bf16, rate 1. D80: window 128 152 to 93, 512 200 to 157, segments of 512 155 to 148, causal ones of
# 1024 192 to 162. D96: window 128 161 to 111, 384 on both sides 273 to 243, segments of 256 128 to 121, causal ones of
# 512 157 to 130. D128: window 128 on both sides 211 to 163, causal segments of 256 122 to 115, whole ones 107 and 138.
_FEW_KEYS: dict[int, tuple[float, float, float, TileConfig]] = {
    80: (512, 1024, 1024, TileConfig(64, 64, 4, 2)),
    96: (256, 512, 800, TileConfig(64, 64, 4, 2)),
    128: (0, 128, 300, TileConfig(64, 32, 4, 2)),
}


def few_keys_config(head_dim: int, causal: bool, windowed: bool) -> tuple[float, TileConfig] | None:
    """Up to how many keys of a query, in the mean, the plain forward beats the warp-specialised one, and its
    configuration; None where it never does.
    """
    if head_dim not in _FEW_KEYS:
        return None
    whole, half, cut, config = _FEW_KEYS[head_dim]
    return cut if windowed else half if causal else whole, config


def specialized_backward_config(head_dim: int, largest_tile: int) -> TileConfig | None:
    """Configuration of the warp-specialised backward where it serves the head dim and its tiles fit, else None."""
    largest = next((most for most in _SPECIALIZED_BACKWARD if head_dim <= most), None)
    if largest is None or head_dim < _SMALLEST_SPECIALIZED_BACKWARD:
        return None
    config = _SPECIALIZED_BACKWARD[largest]
    return config if config.longest <= largest_tile else None


def tile_config(
    head_dim: int,
    causal: bool,
    direction: Direction,
    largest_tile: int,
    itemsize: int = 2,
    cut: bool = False,
) -> TileConfig:
    """Configuration for ``direction``, fitted to segments that allow ``largest_tile`` rows; ``itemsize`` in bytes.

    ``cut``: the sequence ends inside a key tile.
    """
    if itemsize > 2:
        return float32_config(head_dim, direction).fitted(largest_tile)
    largest = next(most for most in (64, 128, 192, 256) if head_dim <= most)
    known = _SM90_CUT.get((largest, causal, direction)) if cut else None
    known = known or _SM90[largest, causal, direction]
    return known.fitted(largest_tile)

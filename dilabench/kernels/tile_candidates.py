"""Tile shapes of the fused kernels as text, to be tried: 'forward=64x128x4x2', and those worth trying by default.

What stands after a kernel's name is query rows x key rows x warps x stages, and registers per thread where they are
limited. A backward pass has two kernels, parted by a comma. A forward pass with a shape of its own goes through the
kernel without roles: the warp-specialised one (`fused.sm90.forward`) has no others to try yet.
"""

from __future__ import annotations

from itertools import product

from dilabench.kernels.tuning import Direction, TileConfig

# Of a Hopper multiprocessor, for one program.
SHARED_BYTES = 227 * 1024
KERNELS: tuple[Direction, ...] = ("forward", "backward_query", "backward_key")


def read_tiles(text: str) -> dict[Direction, TileConfig]:
    """The configuration of each kernel that a text names; none for an empty one.

    Raises ValueError for another kernel, sizes that the kernels cannot have, and text of another form.
    """
    found: dict[Direction, TileConfig] = {}
    for part in filter(None, text.split(",")):
        name, _, sizes = part.partition("=")
        kernel = next((one for one in KERNELS if one == name.strip()), None)
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


def candidates(head_dim: int, itemsize: int, backward: bool) -> tuple[str, ...]:
    """Shapes of 32 to 128 rows a side whose tiles fit into shared memory, kernel by kernel; ``itemsize`` in bytes."""
    sides = (64, 128) if head_dim <= 128 and itemsize == 2 else (32, 64, 128)
    texts = []
    for kernel in KERNELS[1:] if backward else KERNELS[:1]:
        for block_m, block_n, stages in product(sides, sides, (2, 3) if itemsize == 2 else (1, 2)):
            kept, loaded = (block_n, block_m) if kernel == "backward_key" else (block_m, block_n)
            rows = kept * (2 if backward else 1) + 2 * loaded * stages
            if rows * head_dim * itemsize > SHARED_BYTES:
                continue
            # Four warps hold 64 rows of sums; more rows need more warps, and few rows leave none for eight.
            area = block_m * block_n
            texts += [f"{kernel}={block_m}x{block_n}x{warps}x{stages}" for warps in _warps(area)]
    return tuple(texts)


def _warps(area: int) -> tuple[int, ...]:
    if area > 64 * 128:
        return (8,)
    return (4, 8) if area == 64 * 128 else (4,)

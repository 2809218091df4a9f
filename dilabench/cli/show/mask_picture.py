"""Small pictures of block masks for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dilabench.patterns.block_masks import PREFERENCES, block_mask, block_shares
from dilabench.workload.spec import BlockSparsePattern, Workload

if TYPE_CHECKING:
    from dilabench.patterns.block_masks import Mask

SHADES = " ░▒▓█"
# Characters are about twice as high as wide.
MAX_COLUMNS, MAX_LINES = 48, 24
EXAMPLE_BLOCKS = 32
EXAMPLE_SPARSITY = 0.75


def picture(mask: Mask) -> list[str]:
    """One head's mask [n, n] as lines of shades: a row is a block of queries, a column one of keys, or several of them.

    A character is as dark as the share of its blocks that is computed; any computed block shows.
    """
    import numpy as np

    shades = np.ceil(block_shares(mask, MAX_LINES, MAX_COLUMNS) * (len(SHADES) - 1)).astype(int)
    return ["".join(SHADES[level] for level in line) for line in shades]


def mask_facts(kind: str) -> Iterator[tuple[str, str]]:
    """What a mask kind is, with an example."""
    yield "summary", str(PREFERENCES[kind].__doc__).partition(": ")[2]
    pattern = BlockSparsePattern(mask=kind, block_size=1, sparsity=EXAMPLE_SPARSITY)  # type: ignore[arg-type]
    yield "example", f"{EXAMPLE_BLOCKS} blocks a side, {EXAMPLE_SPARSITY:.0%} of them not computed"
    for causal, name in ((False, "not causal"), (True, "causal")):
        yield name, indented(picture(block_mask(pattern, EXAMPLE_BLOCKS, causal, 1)[0]))


def workload_mask(workload: Workload) -> str:
    """The picture of head 0 of a block-sparse workload without branches."""
    assert isinstance(workload.pattern, BlockSparsePattern)
    return indented(picture(block_mask(workload.pattern, workload.seq_len, workload.causal, workload.num_heads)[0]))


def indented(lines: list[str]) -> str:
    """Lines under each other in the column of values that `describe` prints."""
    return ("\n" + " " * 21).join(lines)

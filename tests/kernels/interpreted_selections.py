"""Run by test_selected.py under TRITON_INTERPRET=1: lists from indices against those of the same mask, over many
random selections. Prints those that differ, and the seeds that were compared, as one line of JSON.
"""

from __future__ import annotations

import json

import numpy as np
import torch

from dilabench.kernels.block_sparse.lists import largest_tile
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.kernels.block_sparse.selected import SelectedPlan
from dilabench.kernels.tuning import TileConfig


def differences(seed: int) -> list[str]:
    """Indices in any order, repeated and absent, over blocks that the end cuts."""
    random = np.random.default_rng(seed)
    # More blocks than a word has bits in one of them.
    block, blocks = (16, 34) if seed == 0 else (int(random.choice([16, 32, 48, 64])), int(random.choice([1, 2, 4])))
    rows = int(random.integers((blocks - 1) * block + 1, blocks * block + 1))
    heads, width = int(random.integers(1, 3)), int(random.integers(1, 7))
    indices = random.integers(-1, blocks + 1, (heads, blocks, width))
    mask = (indices[..., None] == np.arange(blocks)).any(2)
    window = tuple(int(side) for side in random.choice([-1, 5, 40], 2))
    seen = {"causal": bool(random.integers(2)), "window": window}
    tiles = [tile for tile in (16, 32, 64) if tile <= largest_tile(block)]
    config = TileConfig(int(random.choice(tiles)), int(random.choice(tiles)), 4, 1)
    plan = SelectedPlan(torch.from_numpy(indices), block, rows, **seen)
    of_mask = BlockPlan(mask, block, rows, **seen)
    found = []
    for by_key in (False, True):
        (spans, entries, order), wanted = (one.tables(config, by_key, torch.device("cpu")) for one in (plan, of_mask))
        title = f"{seed} by_key={by_key} block {block} rows {rows} {seen} {config}"
        if not torch.equal(spans[..., 1:], wanted[0][..., 1:]):
            found.append(f"{title}: counts {spans[..., 1:].tolist()} instead of {wanted[0][..., 1:].tolist()}")
            continue
        # All lists once; by key the longest first.
        if not torch.equal(order.sort(1).values, wanted[2].sort(1).values) or (
            by_key and not torch.equal(order, wanted[2])
        ):
            found.append(f"{title}: order {order.tolist()}")
        for mine, theirs in zip(spans.flatten(0, 1), wanted[0].flatten(0, 1), strict=True):
            count = int(mine[1:].sum())
            own, other = entries[mine[0] : mine[0] + count], wanted[1][theirs[0] : theirs[0] + count]
            if not torch.equal(own, other):
                found.append(f"{title}: {own.tolist()} instead of {other.tolist()}")
    return found


if __name__ == "__main__":
    seeds = range(8)
    found = {str(seed): differences(seed) for seed in seeds}
    results = {seed: problems for seed, problems in found.items() if problems} | {"compared": list(found)}
    print(json.dumps(results))  # noqa: T201 - the parent process reads it

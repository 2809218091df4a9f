"""Run by test_selected.py under TRITON_INTERPRET=1: lists from indices against those of the same mask, over many
random selections. Prints those that differ, and the seeds that were compared, as one line of JSON.
"""

from __future__ import annotations

import json

import numpy as np
import torch

from dilabench.kernels.block_sparse.lists import COUNTED_ONCE, largest_tile
from dilabench.kernels.block_sparse.plan import BlockPlan, Plan
from dilabench.kernels.block_sparse.selected import SelectedPlan
from dilabench.kernels.tuning import TileConfig


def listed(plan: Plan, config: TileConfig, by_key: bool) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """The full and the masked partner tiles of each (head, own tile), in the order in which these are visited."""
    if by_key:
        lists = plan.lists(config.block_m, config.block_n, by_key)
        order = [(head, own) for head, tiles in enumerate(lists.order.tolist()) for own in tiles]
        return {(head, own): tuple(part.tolist() for part in lists.partners(head, own)) for head, own in order}
    items, entries = plan.query_lists(config, torch.device("cpu"))
    found = {}
    for head, tiles in enumerate(items.tolist()):
        for class_, own, first, n_full, n_masked in tiles:
            partners = [entry - COUNTED_ONCE for entry in entries[first : first + n_full + n_masked].tolist()]
            assert class_ == 0
            found[head, own] = partners[:n_full], partners[n_full:]
    assert len(found) == items.shape[0] * items.shape[1]
    return found


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
        title = f"{seed} by_key={by_key} block {block} rows {rows} {seen} {config}"
        mine, theirs = (listed(one, config, by_key) for one in (plan, of_mask))
        # By key the longest list first.
        if mine != theirs or (by_key and list(mine) != list(theirs)):
            found.append(f"{title}: {mine} instead of {theirs}")
    return found


if __name__ == "__main__":
    seeds = range(8)
    found = {str(seed): differences(seed) for seed in seeds}
    results = {seed: problems for seed, problems in found.items() if problems} | {"compared": list(found)}
    print(json.dumps(results))  # noqa: T201 - the parent process reads it

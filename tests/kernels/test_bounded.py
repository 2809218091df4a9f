"""The lists that are made of bounds on the device are those that the host makes of them, tile by tile."""

import numpy as np
import pytest
import torch

from dilabench.kernels.block_sparse.plan import BlockPlan, BoundedPlan
from dilabench.patterns.answers import HiddenRows


def lists_of(lists):
    """[tiles] of (wholly visible, partly visible) partner tiles, and the order of the tiles."""
    partners = [lists.partners(0, own) for own in range(lists.spans.shape[1])]
    return [(full.tolist(), masked.tolist()) for full, masked in partners], lists.order.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_lists_are_those_of_the_host(seed):
    random = np.random.default_rng(seed)
    rows, ranges = int(random.integers(1, 400)), int(random.integers(1, 4))
    # Bounds that change rarely, as those of documents, or from key to key.
    run = int(random.choice([1, 30, 150]))
    edges = random.integers(0, rows + 1, (ranges, 2, -(-rows // run))).repeat(run, axis=2)[:, :, :rows]
    edges[:, 1][random.random(edges[:, 1].shape) < 0.2] = 0
    hidden = HiddenRows.of(rows, *((one[0], one[1]) for one in edges))
    seen = {"causal": bool(random.integers(2)), "window": (int(random.choice([-1, 0, 70])), -1)}
    host = BlockPlan(np.ones((1, -(-rows // 128), -(-rows // 128)), bool), 128, rows, **seen, hidden=hidden)
    device = torch.device("cpu")
    plan = BoundedPlan(host.bounds(device), 128, rows, hidden=hidden, **seen)
    for m, n in ((128, 128), (64, 32), (16, 128)):
        for by_key in (False, True):
            assert lists_of(plan.lists(m, n, by_key)) == lists_of(host.lists(m, n, by_key)), (m, n, by_key)

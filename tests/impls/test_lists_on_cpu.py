"""Our own kernel over lists of keys against torch's kernel block by block: any mask, bounds, rows and keys of any
number.
"""

import random

import numpy as np
import pytest
import torch

from dilabench.impls.block_sparse.on_cpu import blocked_backward, blocked_forward, listed_backward, listed_forward
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.kernels.cpu import flash
from dilabench.patterns.answers import HiddenRows
from tests.conftest import slow

pytestmark = pytest.mark.skipif(not flash.serves(torch.float32), reason="needs a C++ compiler, none works here")


def random_plan(draw: random.Random, key_heads: int, heads: int) -> BlockPlan:
    numbers = np.random.default_rng(draw.randrange(1 << 30))
    size, rows = draw.choice((1, 3, 16, 48, 64, 100, 300)), draw.randrange(1, 400)
    keys = draw.choice((None, draw.randrange(1, 400)))
    blocks = -(-rows // size), -(-(keys or rows) // size)
    mask = numbers.random((draw.choice((1, key_heads, heads)), *blocks)) < draw.choice((0.1, 0.5, 1.0))
    if keys is not None:
        return BlockPlan(mask, size, rows, False, key_rows=keys)
    hidden = None
    if draw.random() < 0.4:
        ends = np.sort(numbers.integers(0, rows + 1, (4, rows)), axis=0)
        hidden = HiddenRows.of(rows, (ends[0], ends[1]), (ends[2], ends[3]))
    causal, window = draw.choice(((True, (-1, -1)), (True, (30, 0)), (False, (-1, -1)), (False, (7, 90))))
    return BlockPlan(mask, size, rows, causal, window, hidden=hidden)


@pytest.mark.parametrize(
    ("seed", "threads"), [(0, 1), (1, 3), *(slow(seed, 1 + 2 * (seed % 2)) for seed in range(2, 6))]
)
def test_random_lists(seed: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "LEAST_FLOPS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(10):
        key_heads = draw.choice((1, 2, 3))
        heads = key_heads * draw.choice((1, 2))
        plan = random_plan(draw, key_heads, heads)
        dim, dtype = draw.choice((1, 24, 64, 100)), draw.choice((torch.float32, torch.bfloat16))
        rows, tolerance = (plan.rows, plan.keys), 1e-5 if dtype == torch.float32 else 2e-2
        q, dout = (torch.randn(2, rows[0], heads, dim).to(dtype) for _ in range(2))
        k, v = (torch.randn(2, rows[1], key_heads, dim).to(dtype) for _ in range(2))
        exact = [x.double() for x in (dout, q, k, v)]
        out, lse = blocked_forward(*exact[1:], plan, scale=0.2)
        expected = out, lse, *blocked_backward(*exact, out, lse, plan, scale=0.2)
        out, lse = listed_forward(q, k, v, plan, scale=0.2)
        found = out, lse, *listed_backward(dout, q, k, v, out, lse, plan, scale=0.2)
        for one, other in zip(found, expected, strict=True):
            seen = other.isfinite()
            assert torch.equal(one.isneginf(), other.isneginf())
            error = (one.double() - other)[seen].norm() / other[seen].norm().clamp_min(1e-3)
            assert error < tolerance, (float(error), plan)

"""Run by test_block_sparse.py under TRITON_INTERPRET=1; prints errors of every case as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dilabench.kernels import tuning
from dilabench.kernels.block_sparse.backward import block_sparse_backward
from dilabench.kernels.block_sparse.forward import block_sparse_forward
from dilabench.kernels.block_sparse.plan import BlockPlan, BoundedPlan
from dilabench.kernels.block_sparse.selected import SelectedPlan
from dilabench.kernels.gates import gated, gated_sum
from dilabench.kernels.lse import merge_rows_
from dilabench.kernels.tuning import TileConfig
from dilabench.patterns.answers import HiddenRows

# name: (B, N, H, K, D, block, causal, window, mask heads, tiles)
CASES = {
    "full tiles": (1, 96, 2, 2, 16, 32, False, (-1, -1), 1, None),
    "causal, shared keys, mask per head": (2, 75, 4, 2, 16, 16, True, (-1, -1), 4, None),
    "window, wide query tile": (1, 75, 2, 1, 32, 32, False, (20, 5), 1, TileConfig(32, 16, 4, 1)),
    "causal window, wide key tile": (1, 130, 3, 3, 16, 64, True, (40, -1), 3, TileConfig(16, 32, 4, 1)),
    "ragged end": (1, 131, 5, 5, 32, 16, False, (-1, -1), 1, None),
    "padded head dim": (1, 49, 2, 1, 24, 16, True, (-1, -1), 1, None),
    "one block": (1, 13, 1, 1, 16, 16, True, (-1, -1), 1, None),
    "tiles inside blocks of 48": (1, 97, 2, 2, 16, 48, True, (-1, -1), 2, None),
    "mask per key head": (2, 75, 6, 2, 16, 16, True, (-1, -1), 2, None),
}
# The same with bounds of columns besides, of so many ranges of rows per key.
BOUNDED = {
    "one range, causal": ((2, 75, 4, 2, 16, 16, True, (-1, -1), 1, None), 1),
    "two ranges, wide query tile": ((1, 131, 2, 1, 32, 32, False, (-1, -1), 1, TileConfig(32, 16, 4, 1)), 2),
    "three ranges, window, wide key tile": ((1, 130, 3, 3, 16, 64, False, (40, 90), 3, TileConfig(16, 32, 4, 1)), 3),
}
SHARED = ("padded head dim", "mask per key head")
# name: (B, query rows, key rows of the first and of the second call, H, K, D, block, mask heads, tiles)
RECTANGLES = {
    "more keys than queries": (1, 48, 64, 96, 2, 2, 16, 16, 1, None),
    "more queries than keys, ragged ends": (2, 75, 16, 37, 4, 2, 16, 16, 4, None),
    "wide query tile, one key row": (1, 70, 64, 33, 2, 1, 32, 32, 1, TileConfig(32, 16, 4, 1)),
    "wide key tile": (1, 33, 128, 70, 3, 3, 16, 32, 3, TileConfig(16, 32, 4, 1)),
    "padded head dim": (1, 31, 32, 18, 2, 1, 24, 16, 1, None),
}


def expected(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    at, key = torch.arange(plan.rows), torch.arange(plan.keys)
    mask = np.repeat(plan.mask, q.shape[2] // plan.mask_heads if plan.mask_heads > 1 else 1, axis=0)
    seen = torch.from_numpy(mask)[:, (at // plan.block_size)[:, None], (key // plan.block_size)[None]]
    if plan.left >= 0:
        seen = seen & (key[None] >= at[:, None] - plan.left)
    if plan.right >= 0:
        seen = seen & (key[None] <= at[:, None] + plan.right)
    if plan.hidden is not None:
        seen = seen & ~torch.from_numpy(plan.hidden.hides(at.numpy(), slice(None)))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def any_bounds(rows: int, ranges: int) -> HiddenRows:
    """Documents of random lengths, random ranges, keys that nothing and keys that everything is hidden from."""
    random = np.random.default_rng(3)
    document = np.sort(random.integers(0, rows, 3)).searchsorted(np.arange(rows), side="right")
    edges = np.searchsorted(document, np.arange(5))
    bounds = random.integers(0, rows + 1, (ranges, 2, rows))
    bounds[0, 0], bounds[0, 1] = edges[document + 1], rows
    bounds[-1, 0, ::3], bounds[-1, 1, ::3] = 0, edges[document[::3]]
    bounds[:, :, 5:9], bounds[:, 0, 9], bounds[:, 1, 9] = 0, 0, rows
    return HiddenRows.of(rows, *((start, stop) for start, stop in bounds))


def chosen_on_the_device() -> dict[str, float]:
    """Indices per key/value head, unsorted and repeated, planned as tensors."""
    rows, heads, kv_heads, dim, block = 150, 6, 2, 16, 32
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(-1, 5, (kv_heads, 5, 4), generator=generator)
    indices[0, 2] = -1
    q, k, v, dout = (torch.randn(2, rows, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    mask = (indices[..., None] == torch.arange(5)).any(2).numpy()
    out, lse = expected(*wide, BlockPlan(mask, block, rows, causal=True))
    gradients = torch.autograd.grad(out, wide, dout.double())
    plan = SelectedPlan(indices, block, rows, causal=True)
    with poisoned():
        got_out, got_lse = block_sparse_forward(q, k, v, plan, scale=dim**-0.5)
        got = block_sparse_backward(dout, q, k, v, got_out, got_lse, plan, scale=dim**-0.5)
    return compared((out, lse, *gradients), (got_out, got_lse, *got))


def bounded_on_the_device() -> dict[str, float]:
    """Bounds of columns, planned as tensors."""
    rows, heads, kv_heads, dim, block = 150, 2, 1, 16, 32
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, rows, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    some, everything = any_bounds(rows, 2), np.ones(rows, dtype=np.int64)
    hidden = HiddenRows.of(rows, *zip(some.starts, some.stops, strict=True), (40 * everything, 44 * everything))
    known = BlockPlan(np.ones((1, 5, 5), bool), block, rows, causal=True, hidden=hidden)
    out, lse = expected(*wide, known)
    gradients = torch.autograd.grad(out, wide, dout.double())
    plan = BoundedPlan(known.bounds(q.device), block, rows, causal=True, hidden=hidden)
    with poisoned():
        got_out, got_lse = block_sparse_forward(q, k, v, plan, scale=dim**-0.5)
        got = block_sparse_backward(dout, q, k, v, got_out, got_lse, plan, scale=dim**-0.5)
    return compared((out, lse, *gradients), (got_out, got_lse, *got))


def errors(case: tuple, dtype: torch.dtype, ranges: int = 0) -> dict[str, float]:
    batch, rows, heads, kv_heads, dim, block, causal, window, mask_heads, tiles = case
    blocks = -(-rows // block)
    mask = np.random.default_rng(1).random((mask_heads, blocks, blocks)) < 0.6
    mask[:, blocks // 2] = False
    mask[:, :, -1] = False
    mask[:, 0, 0] = True
    hidden = any_bounds(rows, ranges) if ranges else None
    plan = BlockPlan(mask, block, rows, causal, window, hidden=hidden)
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, rows, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = expected(*wide, plan)
    gradients = torch.autograd.grad(out, wide, dout.double())
    scale = dim**-0.5
    forward, backward = block_sparse_forward, block_sparse_backward
    if tiles:
        forward = partial(block_sparse_forward, config=tiles)
        backward = partial(block_sparse_backward, query_config=tiles, key_config=tiles)
    with poisoned():
        got_out, got_lse = forward(q, k, v, plan, scale=scale)
        got = backward(dout, q, k, v, got_out, got_lse, plan, scale=scale)
    return compared((out, lse, *gradients), (got_out, got_lse, *got))


@contextmanager
def poisoned() -> Iterator[None]:
    """Unwritten rows show: results come from memory that held NaN before."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def compared(wanted: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> dict[str, float]:
    """Largest differences of out, lse, dq, dk and dv."""
    (out, lse, *gradients), (got_out, got_lse, *got) = wanted, found
    seen = torch.isfinite(lse)
    found = {"out": (got_out - out).abs().max(), "lse": (got_lse - lse)[seen].abs().max()}
    found |= {name: (a - b).abs().max() for name, a, b in zip(("dq", "dk", "dv"), got, gradients, strict=True)}
    found["empty rows"] = got_out.transpose(1, 2)[~seen].abs().sum() + (torch.isfinite(got_lse) != seen).sum()
    return {name: float(value) for name, value in found.items()} | {"number of empty rows": float((~seen).sum())}


def two_calls(case: tuple) -> dict[str, float]:
    """Queries on keys of other rows, in two calls as a rank of a ring makes them: merged, with the lse of both."""
    batch, rows, first, second, heads, kv_heads, dim, block, mask_heads, tiles = case
    at = -(-first // block)
    mask = np.random.default_rng(1).random((mask_heads, -(-rows // block), at - (-second // block))) < 0.5
    mask[:, -1], mask[:, :, 0], mask[:, 0, -1] = False, False, True
    plan = BlockPlan(mask, block, rows, False, key_rows=first + second)
    parts = [
        BlockPlan(m, block, rows, False, key_rows=n) for m, n in ((mask[:, :, :at], first), (mask[:, :, at:], second))
    ]
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(batch, rows, heads, dim, generator=generator) for _ in range(2))
    # As they arrive: rows first, K and V in turns.
    packed = torch.randn(first + second, 2, batch, kv_heads, dim, generator=generator)
    k, v = (packed[:, side].transpose(0, 1) for side in (0, 1))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = expected(*wide, plan)
    gradients = torch.autograd.grad(out, wide, dout.double())
    forward, backward = block_sparse_forward, block_sparse_backward
    if tiles:
        forward = partial(block_sparse_forward, config=tiles)
        backward = partial(block_sparse_backward, query_config=tiles, key_config=tiles)
    keys = list(zip(k.split([first, second], 1), v.split([first, second], 1), parts, strict=True))
    with poisoned():
        (got_out, got_lse), other = (forward(q, *one, scale=dim**-0.5) for one in keys)
        merge_rows_(got_out, got_lse, *other)
        dq, dk, dv = zip(
            *(backward(dout, q, *one[:2], got_out, got_lse, one[2], scale=dim**-0.5) for one in keys), strict=True
        )
    return compared((out, lse, *gradients), (got_out, got_lse, sum(dq), torch.cat(dk, 1), torch.cat(dv, 1)))


def gates_of_parts() -> dict[str, float]:
    """Sums under gates, and gradients times gates, against the same in torch."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 37, 3, 24, generator=generator) for _ in range(3)]
    gates = torch.rand(3, 37, 3, generator=generator)
    wanted = sum(part * gate[..., None] for part, gate in zip(parts, gates, strict=True))
    products = zip(gated(parts[0], gates), gates, strict=True)
    return {
        "sum": float((gated_sum(parts, gates) - wanted).abs().max()),
        "products": max(float((found - parts[0] * gate[..., None]).abs().max()) for found, gate in products),
    }


if __name__ == "__main__":
    results = {name: errors(case, torch.float32) for name, case in CASES.items()}
    results |= {f"two calls: {name}": two_calls(case) for name, case in RECTANGLES.items()}
    results |= {f"bounds: {name}": errors(case, torch.float32, ranges) for name, (case, ranges) in BOUNDED.items()}
    # As at lengths where single lists are long: several programs share a tile.
    with mock.patch.multiple(tuning, LEAST_SHARED_STEPS=2, SHARING_PROGRAMS=2**20):
        results |= {f"shared tiles: {name}": errors(CASES[name], torch.float32) for name in SHARED}
        case, ranges = BOUNDED["two ranges, wide query tile"]
        results["shared tiles: bounds"] = errors(case, torch.float32, ranges)
    results["chosen on the device"] = chosen_on_the_device()
    results["bounded on the device"] = bounded_on_the_device()
    results["gates"] = gates_of_parts()
    results["half"] = errors(CASES["causal, shared keys, mask per head"], torch.float16)
    print(json.dumps(results))  # noqa: T201 - the parent process reads it

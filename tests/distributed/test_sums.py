"""Parts that wait for each other, as on CUDA: no less accurate than adding at once, bounded, and read only."""

import gc
import weakref

import pytest
import torch

from dilabench.impls.ring.schedule import sums
from dilabench.impls.ring.schedule.pieces import Piece
from dilabench.impls.union.branches import ORIGIN, Place, Progression, Run

pytest.importorskip("triton", reason="Triton is not installed: sums are deferred only for its kernels")

B, N, H, D = 2, 12, 3, 5
EVERY_HEAD = Run(ORIGIN, Progression(H, Place(0, 1, 1)), Progression(H, Place(0, 1, 1)))
ONE_HEAD = Run(Place(0, 1, 1), Progression(1, ORIGIN), Progression(1, ORIGIN))
RANGES = [(0, 12), (6, 6), (0, 12), (3, 1), (6, 6), (0, 6), (0, 12), (6, 6), (2, 9)]


def piece(first, rows, run=EVERY_HEAD):
    return Piece(first, rows, first, rows, 1, run, Progression(1, ORIGIN))


def both_ways(monkeypatch, combine):
    """What `combine` gives when parts are added at once, and when they wait."""
    at_once = combine()
    monkeypatch.setattr(sums, "defers", lambda dtype, device: True)
    return at_once, combine()


def error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("count", range(len(RANGES) + 1))
@pytest.mark.parametrize("middle", [None, 0, 3, 6])
def test_a_sum_is_as_accurate(count, middle, monkeypatch):
    torch.manual_seed(count)
    parts = [(torch.randn(B, rows, H, D).bfloat16(), first) for first, rows in RANGES[:count]]
    single = torch.randn(B, 4, 1, D).bfloat16()

    def combine():
        total = sums.Sum((B, N, H, D), torch.bfloat16, torch.device("cpu"))
        for index, (part, first) in enumerate(parts):
            if index == middle:
                total.add_keys(piece(1, 4, ONE_HEAD), single)
            total.add_queries(piece(first, part.shape[1]), part)
        return total.finish()

    exact = torch.zeros(B, N, H, D, dtype=torch.float64)
    for part, first in parts:
        exact[:, first : first + part.shape[1]] += part
    if middle is not None and middle < count:
        exact[:, 1:5, 1:2] += single
    kept = [part.clone() for part, _ in parts]
    at_once, deferred = both_ways(monkeypatch, combine)
    assert deferred.dtype == torch.bfloat16
    assert deferred.is_contiguous()
    if not count:
        assert not deferred.any()
        return
    assert error(deferred, exact) <= 1.001 * error(at_once, exact)
    # The first one may be the sum.
    assert all(torch.equal(part, copy) for (part, _), copy in zip(parts[1:], kept[1:], strict=True))


@pytest.mark.parametrize("count", range(1, len(RANGES) + 1))
def test_rows_of_another_sum_are_not_rounded_on_the_way(count, monkeypatch):
    torch.manual_seed(count)
    parts = [(torch.randn(B, rows, H, D).bfloat16(), first) for first, rows in RANGES[:count]]

    def combine():
        other = sums.Sum((B, N, H, D), torch.bfloat16, torch.device("cpu"))
        for part, first in parts:
            other.put(part, first)
        total = sums.Sum((B, 9, H, D), torch.bfloat16, torch.device("cpu"))
        total.add_rows(other, 2, 8, 1)
        # In bfloat16 this leaves of a sum what rounding it loses.
        total.put(-other.finish()[:, 2:10], 1)
        return total.finish(torch.float32)

    exact = torch.zeros(B, N, H, D, dtype=torch.float64)
    for part, first in parts:
        exact[:, first : first + part.shape[1]] += part
    lost = torch.zeros(B, 9, H, D, dtype=torch.float64)
    lost[:, 1:] = (exact - exact.bfloat16())[:, 2:10]
    for found in both_ways(monkeypatch, combine):
        torch.testing.assert_close(found.double(), lost, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", range(len(RANGES) + 1))
@pytest.mark.parametrize("middle", [None, 0, 3, 6])
def test_a_softmax_is_as_accurate(count, middle, monkeypatch):
    torch.manual_seed(count)
    q = torch.zeros(B, N, H, D, dtype=torch.bfloat16)
    pieces = [piece(first, rows) for first, rows in RANGES[:count]]
    if middle is not None:
        pieces.insert(middle, piece(1, 4, ONE_HEAD))
    parts = [
        (p, torch.randn(B, p.queries, p.run.heads.count, D).bfloat16(), torch.randn(B, p.run.heads.count, p.queries))
        for p in pieces
    ]
    for p, out, lse in parts:
        empty = torch.arange(p.query, p.query + p.queries) == 5
        lse[..., empty], out[:, empty] = float("-inf"), 0.0

    def combine():
        results = sums.Softmax(q)
        for part in parts:
            results.add(*part)
        return results.finish()

    weights = torch.zeros(B, N, H, 1, dtype=torch.float64)
    exact = torch.zeros(B, N, H, D, dtype=torch.float64)
    for p, out, lse in parts:
        weight = lse.double().exp().transpose(1, 2).unsqueeze(-1)
        heads = slice(p.run.start.head, p.run.start.head + p.run.heads.count)
        exact[:, p.query : p.query + p.queries, heads] += weight * out
        weights[:, p.query : p.query + p.queries, heads] += weight
    exact /= weights.masked_fill(weights == 0, 1.0)
    exact_lse = weights.log().squeeze(-1).transpose(1, 2)
    kept = [(out.clone(), lse.clone()) for _, out, lse in parts]
    at_once, deferred = both_ways(monkeypatch, combine)
    torch.testing.assert_close(deferred[1], exact_lse.float(), rtol=1e-6, atol=1e-6)
    assert not deferred[0][:, 5].any()
    if parts:
        assert error(deferred[0], exact) <= 1.001 * error(at_once[0], exact)
    for (_, out, lse), (kept_out, kept_lse) in zip(parts[1:], kept[1:], strict=True):
        assert torch.equal(out, kept_out)
        assert torch.equal(lse, kept_lse)


@pytest.mark.slow
def test_no_more_parts_are_held_than_the_bound(monkeypatch):
    monkeypatch.setattr(sums, "defers", lambda dtype, device: True)
    total, results = sums.Sum((B, N, H, D), torch.bfloat16, torch.device("cpu")), sums.Softmax(torch.zeros(B, N, H, D))
    held, most = [], 0
    for first, rows in RANGES * 3:
        gradient, out = torch.ones(2, B, rows, H, D).bfloat16().unbind()
        gradient, out = gradient.clone(), out.clone()
        held += [weakref.ref(gradient), weakref.ref(out)]
        total.put(gradient, first)
        results.add(piece(first, rows), out, torch.zeros(B, H, rows))
        del gradient, out
        gc.collect()
        most = max(most, sum(ref() is not None for ref in held))
    assert most == 2 * sums.MOST_PARTS


def test_only_half_precision_on_cuda_waits():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert sums.defers(torch.bfloat16, cuda)
    assert sums.defers(torch.float16, cuda)
    assert not any(sums.defers(dtype, cuda) for dtype in (torch.float32, torch.float64))
    assert not sums.defers(torch.bfloat16, cpu)

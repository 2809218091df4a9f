"""Kernels that merge results and add gradients in place, against what merging their plain results gives."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import Tensor

from dilabench.backends import math
from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import unmet
from dilabench.contracts import LoadedBackend, MergingKernel
from dilabench.kernels.lse import merge_rows_
from dilabench.machine import detect
from dilabench.plugins.manager import discover

DESCRIBED = [one for one in discover().catalogue.backends if one.merging_target]
MACHINE = detect()


@pytest.fixture(params=DESCRIBED, ids=lambda one: one.name)
def backend(request: pytest.FixtureRequest) -> LoadedBackend:
    if reasons := unmet(request.param.requires, MACHINE):
        pytest.skip(f"needs the backend {request.param.name}: {reasons[0]}")
    return load_backend(request.param)


@pytest.fixture
def kernel(backend: LoadedBackend) -> MergingKernel:
    assert backend.merging is not None
    return backend.merging


def rows_of(whole: Tensor) -> Tensor:
    """Every second row and the upper heads of [B, N, H, D]: strides as those of a branch."""
    return whole[:, 1::2, 2:]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("dim", "split"), [(16, (1, 2)), (40, (2, 1))])
def test_results_are_merged_where_they_are(
    kernel: MergingKernel, causal: bool, count: int, dim: int, split: tuple[int, int]
) -> None:
    torch.manual_seed(count)
    mask = {"causal": causal, "scale": 0.3}
    whole_q, whole_out = torch.randn(2, 150, 4, dim), torch.randn(2, 150, 4, dim)
    q, out = rows_of(whole_q), rows_of(whole_out)
    k, v = (torch.randn(2, 75, 1, dim) for _ in range(2))
    whole_lse = torch.randn(2, 4, 150)
    whole_lse[:, :, 7] = float("-inf")
    whole_out[:, 7] = 0
    lse = whole_lse[:, 2:, 1::2]
    before = whole_out.clone(), whole_lse.clone()

    part_out, part_lse = math.attend(q.double(), k.double(), v.double(), **mask)
    expected = out.double().clone(), lse.double().clone()
    merge_rows_(*expected, part_out, part_lse + log(count))

    kernel.merge(q, k, v, out, lse.unflatten(0, split), **mask, fresh=False, count=count)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)
    for now, then in zip((whole_out, whole_lse.transpose(1, 2)), (before[0], before[1].transpose(1, 2)), strict=True):
        assert torch.equal(now[:, ::2], then[:, ::2])
        assert torch.equal(now[:, :, :2], then[:, :, :2])

    kernel.merge(q, k, v, out, lse.unflatten(0, split), **mask, fresh=True, count=count)
    torch.testing.assert_close(out.double(), part_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), part_lse + log(count), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dim", [16, 40])
@pytest.mark.parametrize("threads", [1, 8])
def test_gradients_are_added_where_they_are(kernel: MergingKernel, count: int, dim: int, threads: int) -> None:
    torch.manual_seed(dim)
    mask = {"causal": True, "scale": 0.3}
    q, dout, totals = rows_of(torch.randn(1, 600, 4, dim)), torch.randn(1, 300, 2, dim), torch.randn(1, 600, 4, dim)
    k, v, of_keys, of_values = (torch.randn(1, 300, 1, dim) for _ in range(4))
    exact = [x.double() for x in (q, k, v)]
    out, lse = math.attend(*exact, **mask)
    lse = lse + 0.5 + log(count)
    shares = math.attend_backward(dout.double(), *exact, out, lse - log(count), **mask)
    expected = [x.double() + share for x, share in zip((rows_of(totals), of_keys, of_values), shares, strict=True)]
    given = dout, q, k, v, out.float(), lse.float()[None]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernel.add_gradients(*given, rows_of(totals), of_keys, of_values, **mask, count=count)
    finally:
        torch.set_num_threads(before)
    for found, one in zip((rows_of(totals), of_keys, of_values), expected, strict=True):
        torch.testing.assert_close(found.double(), one, rtol=1e-5, atol=1e-5)


def test_no_keys_at_all(kernel: MergingKernel) -> None:
    q, out, lse = torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16), torch.randn(1, 2, 5)
    nothing = torch.empty(1, 0, 2, 16)
    before = out.clone(), lse.clone()
    mask = {"causal": False, "scale": 1.0, "count": 1}
    kernel.merge(q, nothing, nothing, out, lse[None], **mask, fresh=False)
    torch.testing.assert_close((out, lse), before)
    kernel.merge(q, nothing, nothing, out, lse[None], **mask, fresh=True)
    assert not out.any()
    assert lse.isneginf().all()

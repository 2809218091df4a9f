"""Kernels for packed sequences: what a library is given, and that all sequences come out as each does alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.backends import flash2, flash3, flash4, math
from dilabench.backends.load import load_backend
from dilabench.contracts import BuildContext, PackedKernel
from dilabench.impls import strided
from dilabench.impls.packed import OneLaunch, Packed
from dilabench.impls.reference import build as build_reference
from dilabench.machine import detect
from dilabench.plugins.manager import discover
from dilabench.plugins.requirements import unmet
from dilabench.workload.spec import Workload
from tests.backends import test_foreign_interfaces as foreign

BOUNDS = (0, 13, 14, 47, 96)
LONGEST = 49


def slices(tensors: tuple[Any, ...], cu_seqlens: Tensor) -> Iterator[list[Any]]:
    """The tensors of each sequence as a batch of one: tokens [T, ...], lse [H, T]."""
    for start, stop in pairwise(cu_seqlens.tolist()):
        yield [
            x
            if not isinstance(x, Tensor)
            else x[None, :, start:stop].contiguous()
            if x.ndim == 2
            else x[None, start:stop]
            for x in tensors
        ]


def together(parts: list[Any]) -> Any:
    """The results of sequences along one axis; what a library writes in place returns nothing that matters."""
    if not isinstance(parts[0], tuple):
        return parts[0]
    return tuple(
        torch.cat([x[0] for x in several], 1 if several[0].ndim == 3 else 0) for several in zip(*parts, strict=True)
    )


def one_by_one(call: Callable[..., Any], results: int) -> Callable[..., Any]:
    """A library's function as its form for packed sequences, which names bounds and the longest twice."""

    def packed(*tensors: Any, **options: Any) -> Any:
        bounds, longest = options.pop("cu_seqlens_q"), options.pop("max_seqlen_q")
        assert options.pop("cu_seqlens_k") is bounds
        assert bounds.dtype == torch.int32
        assert options.pop("max_seqlen_k") == longest == int(bounds.diff().max())
        places = {name: options.pop(name) for name in ("dq", "dk", "dv") if isinstance(options.get(name), Tensor)}
        parts = []
        for own in slices((*tensors, *places.values()), bounds):
            found = call(*own[: len(tensors)], **options, **dict(zip(places, own[len(tensors) :], strict=True)))
            parts.append(found[:results] if isinstance(found, tuple) else found)
        return together(parts)

    return packed


def either(call: Callable[..., Any], results: int) -> Callable[..., Any]:
    """A function that takes packed sequences when it is given bounds."""
    packed = one_by_one(call, results)
    return lambda *tensors, **options: (packed if "cu_seqlens_q" in options else call)(*tensors, **options)


def through_math(
    tensors: tuple[Tensor, ...], cu_seqlens: Tensor, call: Callable[..., Any], **options: Any
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = together([call(*own, **options) for own in slices(tensors, cu_seqlens)])
    return found


MATH = PackedKernel(
    lambda q, k, v, cu_seqlens, longest, **options: through_math((q, k, v), cu_seqlens, math.attend, **options),
    lambda *tensors, cu_seqlens, longest, **options: through_math(tensors, cu_seqlens, math.attend_backward, **options),
    frozenset({"cpu", "cuda"}),
)


def install_flash2(patch: pytest.MonkeyPatch) -> None:
    foreign.install_flash2(patch)
    module = sys.modules["flash_attn.flash_attn_interface"]
    vars(module)["_flash_attn_varlen_forward"] = one_by_one(foreign.flash2_forward, 2)
    vars(module)["_flash_attn_varlen_backward"] = one_by_one(foreign.flash2_backward, 0)


def install_flash3(patch: pytest.MonkeyPatch) -> None:
    foreign.install_flash3(patch)
    module = sys.modules["flash_attn_interface"]
    vars(module)["_flash_attn_forward"] = either(foreign.flash3_forward, 2)
    vars(module)["_flash_attn_backward"] = either(foreign.flash3_backward, 0)


def install_flash4(patch: pytest.MonkeyPatch) -> None:
    foreign.install_flash4(patch)
    module = sys.modules["flash_attn.cute.interface"]
    vars(module)["_flash_attn_fwd"] = either(foreign.flash4_forward, 2)
    vars(module)["_flash_attn_bwd"] = either(foreign.flash4_backward, 3)


def agrees_with_math(kernel: PackedKernel, device: str, dtype: torch.dtype, **mask: Any) -> None:
    """Forward and backward, the latter from an out and lse of a larger softmax, grouped heads, a head dim to pad."""
    T, H, K, D = BOUNDS[-1], 6, 3, 20
    q, k, v, dout = (torch.randn(T, heads, D, device=device).to(dtype) for heads in (H, K, K, H))
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32, device=device)
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "longest": LONGEST, "causal": False, "scale": 0.3, **mask}
    close = {"rtol": 0.02, "atol": 0.03} if dtype == torch.bfloat16 else {}
    out, lse = kernel.attend(q, k, v, **options)
    wide = [x.double() for x in (q, k, v)]
    wanted, wanted_lse = MATH.attend(*wide, **options)
    torch.testing.assert_close(out.double(), wanted, **close)
    torch.testing.assert_close(lse.double(), wanted_lse, **close)
    out, lse = out / 2 + 0.1, lse + 0.7
    found = kernel.attend_backward(dout, q, k, v, out, lse, **options)
    right = MATH.attend_backward(dout.double(), *wide, out.double(), lse.double(), **options)
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **close)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": (5, -1)}])
@pytest.mark.parametrize(
    ("backend", "install"), [(flash2, install_flash2), (flash3, install_flash3), (flash4, install_flash4)]
)
def test_calls_fit_the_recorded_signature(
    backend: ModuleType, install: Callable[..., None], mask: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    agrees_with_math(backend.packed, "cpu", torch.float64, **mask)


WITH_KERNELS = [b for b in discover().catalogue.backends if b.packed_target]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": (5, -1)}])
@pytest.mark.parametrize("backend", WITH_KERNELS, ids=lambda backend: backend.name)
def test_on_a_gpu(backend: Any, mask: dict[str, Any]) -> None:
    if reasons := unmet(backend.requires, detect("cuda")):
        pytest.skip("; ".join(reasons))
    kernel = load_backend(backend).packed
    assert kernel is not None
    agrees_with_math(kernel, "cuda", torch.bfloat16, **mask)


DENSE = {"kind": "dense"}
ONE_BRANCH = {"kind": "dilated", "segment_lengths": (16,), "dilation_rates": (1,)}
TWO_BRANCHES = {"kind": "dilated", "segment_lengths": (16, 32), "dilation_rates": (1, 2)}
ZERO_KEYS = {**ONE_BRANCH, "padding": "zero_key"}


def workload(pattern: dict[str, Any]) -> Workload:
    fields = {"pattern": pattern, "layout": "packed", "cu_seqlens": BOUNDS, "seq_len": BOUNDS[-1], "batch_size": 1}
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float64", "mode": "both"}
    return Workload.model_validate({**fields, **shape, "causal": pattern != ZERO_KEYS})


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [(DENSE, OneLaunch), (ONE_BRANCH, OneLaunch), (TWO_BRANCHES, Packed), (ZERO_KEYS, Packed)],
    ids=["dense", "one branch", "two branches", "zero keys"],
)
def test_one_launch_where_rows_see_whole_stretches(pattern: dict[str, Any], kind: type) -> None:
    wanted, device = workload(pattern), torch.device("cpu")
    backend = replace(load_backend(discover().catalogue.backends.get("math")), packed=MATH)
    function = strided.build(wanted, BuildContext(device=device, backend=backend))
    assert type(function) is kind
    q, k, v, dout = (torch.randn(BOUNDS[-1], heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    oracle = [x.clone().requires_grad_() for x in (q, k, v)]
    out, right = function(*leaves), build_reference(wanted, BuildContext(device=device))(*oracle)
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)
    found, gradients = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(right, oracle, dout)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)

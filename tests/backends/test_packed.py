"""Kernels for packed sequences: what a library is given, and that all sequences come out as each does alone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.backends import flash2, flash3, flash4, math
from dilabench.backends.adapt import Plain, adapted_packed
from dilabench.backends.sdpa import efficient, flash_cuda
from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import unmet
from dilabench.contracts import BuildContext, PackedKernel, WithNotes
from dilabench.engine.verify.oracle.reference import build as build_reference
from dilabench.impls import strided
from dilabench.impls.packed import ByBranches, InTiles, OneLaunch, Packed
from dilabench.machine import detect
from dilabench.plugins.manager import discover
from dilabench.workload.spec import Workload
from tests.backends import test_foreign_interfaces as foreign
from tests.conftest import half_are_slow

BOUNDS = (0, 13, 14, 47, 96)
# Bounds of queries, and of keys where these have their own.
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "same keys": (BOUNDS, None),
    "more keys": (BOUNDS, (0, 20, 25, 58, 197)),
    "single queries": ((0, 1, 2, 3), (0, 9, 14, 61)),
    "several tiles": ((0, 130, 131, 500, 757), (0, 200, 201, 570, 1084)),
}


def cut(x: Any, start: int, stop: int) -> Any:
    """The tensor of one sequence as a batch of one: tokens [T, ...], lse [H, T]."""
    if not isinstance(x, Tensor):
        return x
    return x[None, :, start:stop].contiguous() if x.ndim == 2 else x[None, start:stop]


def together(parts: list[Any]) -> Any:
    """The results of sequences along one axis; what a library writes in place returns nothing that matters."""
    if not isinstance(parts[0], tuple):
        return parts[0]
    return tuple(
        torch.cat([x[0] for x in several], 1 if several[0].ndim == 3 else 0) for several in zip(*parts, strict=True)
    )


def one_by_one(call: Callable[..., Any], results: int) -> Callable[..., Any]:
    """A library's function as its form for packed sequences, which names the bounds of queries and keys."""
    names = list(inspect.signature(call).parameters)

    def packed(*tensors: Any, **options: Any) -> Any:
        bounds = {}
        for side in "qk":
            cu_seqlens, longest = options.pop(f"cu_seqlens_{side}"), options.pop(f"max_seqlen_{side}")
            assert cu_seqlens.dtype == torch.int32
            assert longest == int(cu_seqlens.diff().max())
            bounds[side] = list(pairwise(cu_seqlens.tolist()))
        given = {**dict(zip(names, tensors, strict=False)), **options}
        parts = []
        for queries, keys in zip(bounds["q"], bounds["k"], strict=True):
            own = {name: cut(x, *(keys if name in ("k", "v", "dk", "dv") else queries)) for name, x in given.items()}
            found = call(**own)
            parts.append(found[:results] if isinstance(found, tuple) else found)
        return together(parts)

    return packed


def either(call: Callable[..., Any], results: int) -> Callable[..., Any]:
    """A function that takes packed sequences when it is given bounds."""
    packed = one_by_one(call, results)
    return lambda *tensors, **options: (packed if "cu_seqlens_q" in options else call)(*tensors, **options)


def through_math(call: Callable[..., Any], results: int) -> Callable[..., Any]:
    """`math` as the contract for packed sequences has it."""
    packed = one_by_one(call, results)

    def attend(
        *tensors: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        cu_seqlens_k: Tensor | None = None,
        longest_k: int | None = None,
        **options: Any,
    ) -> Any:
        keys = (cu_seqlens, longest) if cu_seqlens_k is None else (cu_seqlens_k, longest_k)
        queries = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": longest}
        return packed(*tensors, **queries, cu_seqlens_k=keys[0], max_seqlen_k=keys[1], **options)

    return attend


MATH = PackedKernel(
    through_math(math.attend, 2), through_math(math.attend_backward, 3), frozenset({"cpu", "cuda"}), aligns_ends=True
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


def install_sdpa_flash(patch: pytest.MonkeyPatch) -> None:
    """torch 2.11 to 2.13: one operator for both, whose causal mask and window start from the last key."""

    def bounds(cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int) -> dict[str, Any]:
        return {"cu_seqlens": cum_seq_q, "longest": max_q, "cu_seqlens_k": cum_seq_k, "longest_k": max_k}

    def forward(
        query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int = -1,
        window_size_right: int = -1, seqused_k: None = None, alibi_slopes: None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        window = (window_size_left, window_size_right)
        sequences = bounds(cum_seq_q, cum_seq_k, max_q, max_k)
        found = MATH.attend(query, key, value, **sequences, causal=is_causal, window=window, scale=scale)
        return *found, None, None, None

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
        cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor,
        *, scale: float, window_size_left: int = -1, window_size_right: int = -1,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        window = (window_size_left, window_size_right)
        tensors, sequences = (grad_out, query, key, value, out, logsumexp), bounds(cum_seq_q, cum_seq_k, max_q, max_k)
        return MATH.attend_backward(*tensors, **sequences, causal=is_causal, window=window, scale=scale)

    patch.setattr(torch.ops.aten, "_flash_attention_forward", SimpleNamespace(default=forward), raising=False)
    patch.setattr(torch.ops.aten, "_flash_attention_backward", SimpleNamespace(default=backward), raising=False)


def install_efficient(patch: pytest.MonkeyPatch) -> None:
    """torch 2.10 to 2.13: rows of lse for each sequence, as many as the longest has, padded with NaN here."""

    def masked(mask_type: int, window_size: int | None) -> dict[str, Any]:
        assert mask_type in (0, 2)
        assert window_size is None or mask_type
        return {"causal": mask_type == 2, "window": (-1 if window_size is None else window_size - 1, -1)}

    def forward(
        query: Tensor, key: Tensor, value: Tensor, bias: None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, custom_mask_type: int,
        compute_log_sumexp: bool = False, *, scale: float, seqlen_k: None = None, window_size: int | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert compute_log_sumexp
        assert query.shape[2] == key.shape[2]
        bounds = {"cu_seqlens": cu_seqlens_q, "longest": max_seqlen_q}
        keys = {"cu_seqlens_k": cu_seqlens_k, "longest_k": max_seqlen_k}
        options = {**masked(custom_mask_type, window_size), "scale": scale}
        out, lse = MATH.attend(query[0], key[0], value[0], **bounds, **keys, **options)
        rows = max_seqlen_q + -max_seqlen_q % 32
        padded = [
            torch.nn.functional.pad(lse[:, start:stop], (0, rows - (stop - start)), value=float("nan"))
            for start, stop in pairwise(cu_seqlens_q.tolist())
        ]
        return out[None], torch.stack(padded), None, None, 0, 0

    def backward(
        grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: None, out: Tensor, cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, logsumexp: Tensor, dropout_p: float,
        philox_seed: Tensor, philox_offset: Tensor, custom_mask_type: int, bias_requires_grad: bool, *, scale: float,
        num_splits_key: None = None, window_size: int | None = None, shared_storage_dqdkdv: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert out.is_contiguous()
        assert logsumexp.shape[2] % 32 == 0
        lengths = cu_seqlens_q.diff().tolist()
        assert all((own[:, length:] == float("inf")).all() for own, length in zip(logsumexp, lengths, strict=True))
        lse = torch.cat([own[:, :length] for own, length in zip(logsumexp, lengths, strict=True)], 1)
        tensors = (grad_out_[0], query[0], key[0], value[0], out[0], lse)
        bounds = {"cu_seqlens": cu_seqlens_q, "longest": max_seqlen_q}
        keys = {"cu_seqlens_k": cu_seqlens_k, "longest_k": max_seqlen_k}
        options = {**masked(custom_mask_type, window_size), "scale": scale}
        return *(x[None] for x in MATH.attend_backward(*tensors, **bounds, **keys, **options)), None

    patch.setattr(torch.ops.aten, "_efficient_attention_forward", forward, raising=False)
    patch.setattr(torch.ops.aten, "_efficient_attention_backward", backward, raising=False)


CLOSE = {
    torch.bfloat16: {"rtol": 0.02, "atol": 0.03},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-11, "atol": 1e-11},
}


def agrees_with_math(
    kernel: PackedKernel, device: str, dtype: torch.dtype, lengths: str = "same keys", **mask: Any
) -> None:
    """Forward and backward, the latter from an out and lse of a larger softmax, grouped heads, a head dim to pad."""
    H, K, D = 6, 3, 20
    queries, keys = LENGTHS[lengths][0], LENGTHS[lengths][1] or LENGTHS[lengths][0]
    shapes = ((queries, H), (keys, K), (keys, K), (queries, H))
    q, k, v, dout = (torch.randn(bounds[-1], heads, D, device=device).to(dtype) for bounds, heads in shapes)
    options: dict[str, Any] = {**sequences(device, lengths), "causal": False, "scale": 0.3, **mask}
    close = CLOSE[dtype]
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


def sequences(device: str, lengths: str) -> dict[str, Any]:
    """The arguments of a packed call that name sequences."""
    found: dict[str, Any] = {}
    for name, bounds in zip(("", "_k"), LENGTHS[lengths], strict=True):
        if bounds is not None:
            found[f"cu_seqlens{name}"] = torch.tensor(bounds, dtype=torch.int32, device=device)
            found[f"longest{name}"] = max(stop - start for start, stop in pairwise(bounds))
    return found


MASKS: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "window": (5, -1)}]
LOOKING_AHEAD = {"window": (4, 3)}


OF_LIBRARIES: dict[str, tuple[PackedKernel, Callable[..., None]]] = {
    "flash2": (flash2.packed, install_flash2),
    "flash3": (flash3.packed, install_flash3),
    "flash4": (flash4.packed, install_flash4),
    "sdpa-flash": (flash_cuda.packed, install_sdpa_flash),
    "sdpa-efficient": (efficient.packed, install_efficient),
}


@pytest.mark.parametrize(
    ("name", "mask", "lengths"), half_are_slow(OF_LIBRARIES, [*MASKS, LOOKING_AHEAD], LENGTHS), ids=str
)
def test_calls_fit_the_recorded_signature(
    name: str, mask: dict[str, Any], lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, install = OF_LIBRARIES[name]
    install(monkeypatch)
    if mask == LOOKING_AHEAD and kernel is efficient.packed and lengths == "same keys":
        with pytest.raises(ValueError, match="sdpa-efficient has only causal windows"):
            agrees_with_math(kernel, "cpu", torch.float64, lengths, **mask)
        return
    agrees_or_refuses(kernel, "cpu", torch.float64, lengths, **mask)


def agrees_or_refuses(kernel: PackedKernel, device: str, dtype: torch.dtype, lengths: str, **mask: Any) -> None:
    """A kernel that does not align ends refuses masks over other numbers of keys than queries."""
    # From a single query a causal mask hides nothing.
    hides = "window" in mask or (mask and lengths != "single queries")
    if hides and lengths != "same keys" and not kernel.aligns_ends:
        with pytest.raises(ValueError, match="does not align the last query with the last key"):
            agrees_with_math(kernel, device, dtype, lengths, **mask)
        return
    agrees_with_math(kernel, device, dtype, lengths, **mask)


def test_a_mask_over_more_keys_is_refused_where_ends_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash2(monkeypatch)
    kernel = adapted_packed(flash2._forward, flash2._backward, Plain(head_dim_multiple=8))
    agrees_with_math(kernel, "cpu", torch.float64, "more keys")
    for mask in ({"causal": True}, {"window": (5, 0)}):
        with pytest.raises(ValueError, match="does not align the last query with the last key"):
            agrees_with_math(kernel, "cpu", torch.float64, "more keys", **mask)


def test_flash4_gets_head_dims_that_it_computes_right(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash4(monkeypatch)
    module, seen = sys.modules["flash_attn.cute.interface"], set()

    def noted(call: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
        seen.update(x.shape[-1] for x in tensors if x.ndim == 3)
        return call(*tensors, **options)

    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        monkeypatch.setattr(module, name, partial(noted, getattr(module, name)))
    agrees_with_math(flash4.packed, "cpu", torch.float64)
    assert seen == {64}


def test_keys_are_named_whole() -> None:
    q, bounds = torch.randn(BOUNDS[-1], 2, 8), sequences("cpu", "same keys")
    with pytest.raises(ValueError, match="cu_seqlens_k and longest_k go together"):
        flash2.packed.attend(q, q, q, **bounds, longest_k=49, causal=True, scale=1.0)


# A backend that compiles takes seconds for each class of shapes: it gets the lengths that hold all kinds of sequences.
WITH_KERNELS = [
    pytest.param(backend, lengths, id=f"{backend.name}-{lengths}")
    for backend in discover().catalogue.backends
    if backend.packed_target
    for lengths in (("several tiles",) if backend.compiles else LENGTHS)
]


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("backend", "lengths"), WITH_KERNELS)
def test_on_a_gpu(backend: Any, mask: dict[str, Any], lengths: str) -> None:
    if reasons := unmet(backend.requires, detect("cuda")):
        pytest.skip(f"needs the backend {backend.name}: {'; '.join(reasons)}")
    kernel = load_backend(backend).packed
    assert kernel is not None
    agrees_or_refuses(kernel, "cuda", torch.bfloat16, lengths, **mask)


DENSE = {"kind": "dense"}
ONE_BRANCH = {"kind": "dilated", "segment_lengths": (16,), "dilation_rates": (1,)}
TWO_BRANCHES = {"kind": "dilated", "segment_lengths": (16, 32), "dilation_rates": (1, 2)}
ZERO_KEYS = {**ONE_BRANCH, "padding": "zero_key"}


def workload(pattern: dict[str, Any], **changes: Any) -> Workload:
    fields = {"pattern": pattern, "layout": "packed", "cu_seqlens": BOUNDS, "seq_len": BOUNDS[-1], "batch_size": 1}
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float64", "mode": "both"}
    return Workload.model_validate({**fields, **shape, "causal": pattern.get("padding") != "zero_key", **changes})


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        (DENSE, OneLaunch),
        (ONE_BRANCH, OneLaunch),
        (TWO_BRANCHES, ByBranches),
        (ZERO_KEYS, ByBranches),
        ({**TWO_BRANCHES, "merge_grad": "detached"}, ByBranches),
        ({**TWO_BRANCHES, "padding": "zero_key", "merge_grad": "detached"}, ByBranches),
        ({**TWO_BRANCHES, "heads": "grouped"}, ByBranches),
        ({"kind": "dilated", "segment_lengths": (16, 40), "dilation_rates": (2, 3)}, ByBranches),
    ],
    ids=["dense", "one branch", "two branches", "zero keys", "detached", "detached zero keys", "grouped", "odd rates"],
)
def test_one_launch_where_rows_see_whole_stretches(pattern: dict[str, Any], kind: type) -> None:
    wanted, device = workload(pattern), torch.device("cpu")
    backend = replace(load_backend(discover().catalogue.backends.get("math")), packed=MATH)
    function = strided.build(wanted, BuildContext(device=device, backend=backend))
    assert type(function) is kind
    is_the_formula(function, wanted)


@pytest.mark.parametrize(
    ("offset_by", "mask", "kv_heads"),
    half_are_slow(
        ["head", "kv_head"], [{"causal": False}, {"window": (9, 0)}, {"causal": False, "window": (7, 5)}], [1, 3, 6]
    ),
    ids=str,
)
def test_branches_of_heads_that_share_keys(offset_by: str, mask: dict[str, Any], kv_heads: int) -> None:
    wanted = workload({**TWO_BRANCHES, "offset_by": offset_by}, num_heads=6, num_kv_heads=kv_heads, **mask)
    backend = replace(load_backend(discover().catalogue.backends.get("math")), packed=MATH)
    function = strided.build(wanted, BuildContext(device=torch.device("cpu"), backend=backend))
    assert isinstance(function, ByBranches)
    is_the_formula(function, wanted)


def is_the_formula(function: Callable[..., Tensor], wanted: Workload) -> None:
    """Forward and gradients of a function in float64."""
    H, K, device = wanted.num_heads, wanted.num_kv_heads, torch.device("cpu")
    q, k, v, dout = (torch.randn(BOUNDS[-1], heads, 16, dtype=torch.float64) for heads in (H, K, K, H))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    oracle = [x.clone().requires_grad_() for x in (q, k, v)]
    out, right = function(*leaves), build_reference(wanted, BuildContext(device=device))(*oracle)
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)
    found, gradients = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(right, oracle, dout)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("pattern", "changes", "kind"),
    [
        (DENSE, {"dtype": "bfloat16"}, InTiles),
        (ONE_BRANCH, {"dtype": "float32"}, InTiles),
        (TWO_BRANCHES, {"dtype": "bfloat16"}, Packed),
        (DENSE, {"dtype": "float64"}, Packed),
        (DENSE, {"dtype": "bfloat16", "head_dim": 512}, Packed),
    ],
    ids=["dense", "one branch", "two branches", "float64", "wide heads"],
)
def test_own_tiles_take_the_place_of_a_kernel_that_is_missing_and_say_so(
    pattern: dict[str, Any], changes: dict[str, Any], kind: type
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: own tiles are its kernels")
    backend = replace(load_backend(discover().catalogue.backends.get("math")), packed=None)
    context = BuildContext(device=torch.device("cuda"), backend=backend)
    function = strided.build(workload(pattern).replace(**changes), context)
    assert type(function) is kind
    notes = function.notes if isinstance(function, WithNotes) else ()
    assert [note.code for note in notes] == (["own_tiles"] if kind is InTiles else [])
    on_a_cpu = BuildContext(device=torch.device("cpu"), backend=backend)
    assert type(strided.build(workload(pattern), on_a_cpu)) is Packed


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bounds", "head_dim"), [(BOUNDS, 20), ((0, 130, 131, 500, 1024), 128)], ids=["ragged", "whole tiles"]
)
@pytest.mark.parametrize("mask", [*MASKS, LOOKING_AHEAD])
def test_own_tiles_on_a_gpu(mask: dict[str, Any], bounds: tuple[int, ...], head_dim: int) -> None:
    fields = {"cu_seqlens": bounds, "seq_len": bounds[-1], "head_dim": head_dim, "dtype": "bfloat16", "causal": False}
    wanted = workload(DENSE).replace(**{**fields, **mask})
    backend = replace(load_backend(discover().catalogue.backends.get("math")), packed=None)
    function = strided.build(wanted, BuildContext(device=torch.device("cuda"), backend=backend))
    assert isinstance(function, InTiles)
    shapes = [(bounds[-1], heads, head_dim) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    options = {"cu_seqlens": cu_seqlens, "longest": int(cu_seqlens.diff().max()), "scale": wanted.softmax_scale}
    options |= {"causal": wanted.causal, "window": wanted.window}
    wide = [x.double() for x in (q, k, v)]
    out, lse = function.with_lse(q, k, v)
    right, right_lse = MATH.attend(*wide, **options)
    torch.testing.assert_close(out.double(), right, **CLOSE[torch.bfloat16])
    torch.testing.assert_close(lse.double(), right_lse, **CLOSE[torch.bfloat16])
    found = function.backward(*(x[None] for x in (dout, q, k, v, out, lse)))
    gradients = MATH.attend_backward(dout.double(), *wide, right, right_lse, **options)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine[0].double(), theirs, **CLOSE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [TWO_BRANCHES, ZERO_KEYS], ids=["two branches", "zero keys"])
def test_branches_on_a_gpu(pattern: dict[str, Any]) -> None:
    wanted, device = workload(pattern, dtype="bfloat16"), torch.device("cuda")
    backend = load_backend(discover().catalogue.backends.get("sdpa-flash"))
    function = strided.build(wanted, BuildContext(device=device, backend=backend))
    assert isinstance(function, ByBranches)
    q, k, v, dout = (torch.randn(BOUNDS[-1], heads, 16, device=device).bfloat16() for heads in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    oracle = [x.double().requires_grad_() for x in (q, k, v)]
    out, right = function(*leaves), build_reference(wanted, BuildContext(device=device))(*oracle)
    torch.testing.assert_close(out.double(), right, **CLOSE[torch.bfloat16])
    found, gradients = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(right, oracle, dout.double())
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **CLOSE[torch.bfloat16])

"""Every registered backend that this machine can run: out, lse and gradients against float64 written here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target, unmet
from dilabench.machine import detect
from dilabench.plugins.descriptors import Backend
from dilabench.plugins.manager import discover
from dilabench.workload.spec import UNBOUNDED, Window, Workload

BACKENDS = [b for b in discover().catalogue.backends if b.target.startswith("dilabench.")]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
SCALE = 0.3
LSE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
MASKS: tuple[tuple[bool, Window], ...] = (
    (False, UNBOUNDED),
    (True, UNBOUNDED),
    (True, (5, -1)),
    (False, (7, 0)),
    (False, (3, 4)),
    (False, (-1, 2)),
)
# (B, M, L, H, K, D): primes, three heads per K/V head, one K/V head, head dims that no kernel likes, single rows, and
# fewer rows than a tile, of which the heads of a K/V head have more.
SQUARE = (
    (2, 37, 37, 6, 2, 24),
    (1, 61, 61, 5, 5, 80),
    (3, 24, 24, 4, 1, 20),
    (2, 1, 1, 5, 5, 24),
    (1, 97, 97, 4, 2, 32),
    (1, 29, 29, 2, 1, 160),
)
FEWER_QUERIES = ((2, 17, 41, 6, 3, 24), (1, 2, 3, 5, 5, 80), (1, 40, 41, 4, 1, 16))
OBLONG = ((2, 17, 41, 6, 3, 24), (1, 1, 13, 5, 5, 80), (2, 29, 1, 4, 2, 16))


def offered(backend: Backend, device: str) -> frozenset[str]:
    """The dtypes that a backend offers on a kind of device; none where it does not run there."""
    supports = backend.supports.on_cuda if device == "cuda" and backend.supports.on_cuda else backend.supports
    return supports.dtypes if device in supports.devices else frozenset()


def parameter(*values: object, device: str) -> object:
    """A test parameter, marked when it needs a CUDA device."""
    return pytest.param(
        *values, marks=pytest.mark.gpu if device == "cuda" else [], id="-".join(getattr(x, "name", x) for x in values)
    )


BACKEND_ON_DEVICE = [
    parameter(b, device, device=device) for b in BACKENDS for device in ("cpu", "cuda") if offered(b, device)
]


def in_each_dtype(backends: list[Backend]) -> list[object]:
    """Backends on the devices and in the dtypes that they offer."""
    return [
        parameter(b, device, dtype, device=device)
        for b in backends
        for device in ("cpu", "cuda")
        for dtype in DTYPES
        if dtype in offered(b, device)
    ]


BACKEND_ON_DEVICE_IN_DTYPE = in_each_dtype(BACKENDS)
PLACING_ON_DEVICE_IN_DTYPE = in_each_dtype([b for b in BACKENDS if b.places_results])


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: Window, scale: float) -> tuple[Tensor, Tensor]:
    """The formula of semantics.md §1 in the dtype of its inputs, all scores at once."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    i = torch.arange(q.shape[1], device=q.device).unsqueeze(1) + max(0, k.shape[1] - q.shape[1])
    j = torch.arange(k.shape[1], device=q.device)
    seen = (j <= i) | torch.tensor(not causal, device=q.device)
    if window[0] >= 0:
        seen = seen & (j >= i - window[0])
    if window[1] >= 0:
        seen = seen & (j <= i + window[1])
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *mask: object) -> dict[str, Tensor]:
    """out, lse and gradients of `exact` by autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = exact(*leaves, *mask)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def summands(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> dict[str, float]:
    """The largest term of the sums behind each gradient.

    The score gradient is a difference, dout·v - rowsum(dout·out), so an ulp of either side stays when they cancel; the
    plain computation of a row with one key gives exactly 0 there. dv sums exp(score - lse) · dout: an ulp of the score
    is that much of the whole term, because the lse comes from a forward pass that may have rounded the score otherwise;
    the plain computation has one score for both, and what is wrong with it cancels.
    """
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    score = scale * torch.einsum("bihd,bjgd->bhigj", q, k).abs().max().item()
    score_gradient = scale * torch.einsum("bihd,bjgd->bhigj", dout, v).abs().max().item()
    return {
        "dq": score_gradient * k.abs().max().item(),
        "dk": score_gradient * q.abs().max().item(),
        "dv": score * dout.abs().max().item(),
    }


def assert_close(
    found: dict[str, Tensor],
    plain: dict[str, Tensor],
    truth: dict[str, Tensor],
    terms: dict[str, float],
    dtype: torch.dtype,
) -> None:
    """At most twice the error of the plain same-dtype computation, plus 4 ulp of the result and of the summed terms."""
    for name, right in truth.items():
        size = max(1.0, right.abs().max().item())
        error = (found[name].double() - right).abs().max().item()
        if name == "lse":
            allowed = LSE_TOLERANCE[dtype] * size
        elif dtype == torch.float64:
            # The truth is no better than this dtype.
            allowed = 1e-12 * size
        else:
            plain_error = (plain[name].double() - right).abs().max().item()
            sums = torch.finfo(torch.float32).eps * terms.get(name, 0.0)
            allowed = 2 * plain_error + 4 * (torch.finfo(dtype).eps * size + sums)
        assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e}"


@cache
def exactly(
    device: str, dtype: str, shape: tuple[int, ...], causal: bool, window: Window
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, float], dict[str, Tensor]]:
    """Random q, k, v and dout, and what `assert_close` compares with: for every backend and layout."""
    B, M, L, H, K, D = shape
    generator = torch.Generator(device).manual_seed(M * D + H)
    operands = [
        torch.randn(B, n, h, D, generator=generator, device=device).to(DTYPES[dtype])
        for n, h in ((M, H), (L, K), (L, K), (M, H))
    ]
    mask = (causal, window, SCALE)
    truth = gradients(*(x.double() for x in operands), *mask)
    return operands, gradients(*operands, *mask), summands(*operands, SCALE), truth


def usable(backend: Backend, device: str, dtype: str, shape: tuple[int, ...], causal: bool, window: Window) -> None:
    """Skip with the tool's own reasons when the backend does not offer this."""
    B, M, L, H, K, D = shape
    workload = Workload(
        pattern={"kind": "dense"},
        batch_size=B,
        seq_len=max(M, L),
        num_heads=H,
        num_kv_heads=K,
        head_dim=D,
        dtype=dtype,
        causal=causal,
        window=window,
        mode="both",
    )
    reasons = [*unmet(backend.requires, detect(device)), *backend.supports.reasons(workload, device)]
    if reasons:
        pytest.skip(f"needs the backend {backend.name}: {'; '.join(reasons)}")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x as a view with the strides of a dilated branch, between NaN."""
    B, N, H, D = x.shape
    if layout == "contiguous":
        return x
    if layout == "diagonal":
        base = torch.full((B, N * H, H, D), float("nan"), dtype=x.dtype, device=x.device)
        view = base.as_strided((B, N, H, D), (N * H * H * D, H * H * D, (H + 1) * D, 1))
    else:
        base = torch.full((B, 3 * N, 2 * H, D), float("nan"), dtype=x.dtype, device=x.device)
        view = base[:, 2::3, 1::2]
    return view.copy_(x)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the block loops of `math` and of the CPU windows run more than once."""
    from dilabench.backends import math
    from dilabench.backends.sdpa import flash_cpu as sdpa_flash_cpu

    for name in ("BLOCK_BYTES", "BLOCK_BYTES_ON_CUDA"):
        monkeypatch.setattr(math, name, 16000)
    monkeypatch.setattr(sdpa_flash_cpu, "QUERY_BLOCK", 16)


def in_each_mask(parameters: list[Any]) -> Iterator[object]:
    """With every mask; what torch.compile makes with every mask in one dtype, and with one mask in every dtype.

    On a CPU every second mask of a dtype is slow, the others of the next dtype.
    """
    for one in parameters:
        backend, device, dtype = one.values
        for index, (causal, window) in enumerate(MASKS):
            if not backend.compiles or dtype == "bfloat16" or index == 2:
                later = device == "cpu" and (index + [*DTYPES].index(dtype)) % 2
                marks = [*one.marks, pytest.mark.slow] if later else one.marks
                yield pytest.param(*one.values, causal, window, id=f"{one.id}-mask{index}", marks=marks)


def shapes_and_layouts(
    backend: Backend, shapes: tuple[tuple[int, ...], ...], layouts: tuple[str, ...]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Every shape in every layout, or in one where each would take some seconds of compilation."""
    if backend.compiles:
        yield from zip(shapes, itertools.cycle(layouts), strict=False)
    else:
        yield from itertools.product(shapes, layouts)


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "causal", "window"), list(in_each_mask(BACKEND_ON_DEVICE_IN_DTYPE))
)
def test_square(backend: Backend, device: str, dtype: str, causal: bool, window: Window) -> None:
    for shape, layout in shapes_and_layouts(backend, SQUARE, ("contiguous", "diagonal", "every_third")):
        compare(backend, device, dtype, shape, causal, window, layout)


@pytest.mark.parametrize(("backend", "device", "dtype"), BACKEND_ON_DEVICE_IN_DTYPE)
def test_more_or_fewer_keys_than_queries(backend: Backend, device: str, dtype: str) -> None:
    for shape, layout in shapes_and_layouts(backend, OBLONG, ("contiguous", "every_third")):
        compare(backend, device, dtype, shape, False, UNBOUNDED, layout)


@pytest.mark.parametrize(("causal", "window"), [(True, UNBOUNDED), (True, (1, 0)), (False, (1, 0))])
@pytest.mark.parametrize(("backend", "device", "dtype"), BACKEND_ON_DEVICE_IN_DTYPE)
def test_a_mask_over_fewer_queries_than_keys(
    backend: Backend, device: str, dtype: str, causal: bool, window: Window
) -> None:
    for shape, layout in shapes_and_layouts(backend, FEWER_QUERIES, ("contiguous", "every_third")):
        if backend.aligns_ends:
            compare(backend, device, dtype, shape, causal, window, layout)
        else:
            with pytest.raises(ValueError, match="under a mask their numbers must be equal"):
                compare(backend, device, dtype, shape, causal, window, layout)


@pytest.mark.parametrize(("backend", "device", "dtype"), PLACING_ON_DEVICE_IN_DTYPE)
def test_results_in_the_places_that_they_are_given(backend: Backend, device: str, dtype: str) -> None:
    # A head dim that FlashAttention 4 pads, and one that it does not.
    for D in (20, 64):
        usable(backend, device, dtype, (2, 37, 37, 4, 2, D), True, UNBOUNDED)
        loaded, generator = load_backend(backend), torch.Generator(device).manual_seed(D)
        q, k, v, dout = (
            torch.randn(2, 37, heads, D, generator=generator, device=device).to(DTYPES[dtype]) for heads in (4, 2, 2, 4)
        )
        options: dict[str, Any] = {"causal": True, "scale": 0.3}
        wanted, lse = loaded.attend(q, k, v, **options)
        gradients_wanted = loaded.require_backward()(dout, q, k, v, wanted, lse, **options)
        out, dq = (torch.full((2, 90, 4, D), 7.0, device=device, dtype=DTYPES[dtype]) for _ in range(2))
        placed, placed_lse = loaded.attend(q, k, v, out=out[:, 30:67], **options)
        gradients_found = loaded.require_backward()(dout, q, k, v, placed, lse, dq=dq[:, 30:67], **options)
        assert torch.equal(placed_lse, lse)
        for whole, found, right in ((out, placed, wanted), (dq, gradients_found[0], gradients_wanted[0])):
            assert found.data_ptr() == whole[:, 30:67].data_ptr()
            torch.testing.assert_close(found, right)
            assert bool((whole[:, :30] == 7.0).all())
            assert bool((whole[:, 67:] == 7.0).all())
        torch.testing.assert_close(gradients_found[1:], gradients_wanted[1:])


def compare(
    backend: Backend, device: str, dtype: str, shape: tuple[int, ...], causal: bool, window: Window, layout: str
) -> None:
    usable(backend, device, dtype, shape, causal, window)
    assert backend.backward_target is not None
    attend, attend_backward = load_target(backend.target), load_target(backend.backward_target)
    B, M, _, H, _, _ = shape
    operands, plain, terms, truth = exactly(device, dtype, shape, causal, window)
    q, k, v, dout = (laid_out(x, layout) for x in operands)
    options = {"causal": causal, "window": window, "scale": SCALE}
    before = [x.clone() for x in (q, k, v, dout)]
    out, lse = attend(q, k, v, **options)
    out = laid_out(out, layout)
    dq, dk, dv = attend_backward(dout, q, k, v, out, lse, **options)
    assert [x.dtype for x in (out, dq, dk, dv)] == [DTYPES[dtype]] * 4
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert (out.shape, lse.shape, dq.shape, dk.shape, dv.shape) == (q.shape, (B, H, M), q.shape, k.shape, v.shape)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, dout), strict=True))
    assert_close({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, plain, truth, terms, DTYPES[dtype])


@pytest.mark.parametrize(("backend", "device"), BACKEND_ON_DEVICE)
def test_backward_of_each_half_from_the_global_out_and_lse_adds_up(backend: Backend, device: str) -> None:
    dtype = "float64" if "float64" in offered(backend, device) else "bfloat16"
    shape = (2, 37, 46, 6, 3, 24)
    usable(backend, device, dtype, shape, False, UNBOUNDED)
    assert backend.backward_target is not None
    attend, attend_backward = load_target(backend.target), load_target(backend.backward_target)
    B, M, L, H, K, D = shape
    generator = torch.Generator(device).manual_seed(5)
    q, k, v, dout = (
        torch.randn(B, n, h, D, generator=generator, device=device, dtype=torch.float64).to(DTYPES[dtype])
        for n, h in ((M, H), (L, K), (L, K), (M, H))
    )
    options = {"causal": False, "scale": 0.3}
    halves = [(k[:, :23], v[:, :23]), (k[:, 23:], v[:, 23:])]
    results = [attend(q, *half, **options) for half in halves]
    lse = torch.logaddexp(results[0][1], results[1][1])
    weights = [torch.exp(part_lse - lse).transpose(1, 2).unsqueeze(-1) for _, part_lse in results]
    out = sum(weight * part for weight, (part, _) in zip(weights, results, strict=True)).to(q.dtype)
    parts = [attend_backward(dout, q, *half, out, lse, **options) for half in halves]
    found = {
        "out": out,
        "lse": lse,
        "dq": parts[0][0].double() + parts[1][0].double(),
        "dk": torch.cat([part[1] for part in parts], 1),
        "dv": torch.cat([part[2] for part in parts], 1),
    }
    truth = gradients(q.double(), k.double(), v.double(), dout.double(), False, UNBOUNDED, 0.3)
    if dtype == "float64":
        for name, right in truth.items():
            torch.testing.assert_close(
                found[name], right, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )
    else:
        plain, terms = gradients(q, k, v, dout, False, UNBOUNDED, 0.3), summands(q, k, v, dout, 0.3)
        assert_close(found, plain, truth, terms, DTYPES[dtype])


@pytest.mark.parametrize(("backend", "device"), BACKEND_ON_DEVICE)
def test_no_keys_and_no_queries(backend: Backend, device: str) -> None:
    usable(backend, device, "bfloat16", (2, 3, 3, 4, 2, 16), False, UNBOUNDED)
    assert backend.backward_target is not None
    attend, attend_backward = load_target(backend.target), load_target(backend.backward_target)
    q = torch.randn(2, 3, 4, 16, device=device, dtype=torch.bfloat16)
    none = q[:, :0, :2]
    out, lse = attend(q, none, none, causal=False, scale=1.0)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == float("-inf")).all()
    dq, dk, dv = attend_backward(q, q, none, none, out, lse, causal=False, scale=1.0)
    assert not dq.any()
    assert dk.shape == dv.shape == none.shape
    out, lse = attend(q[:, :0], q[:, :, :2], q[:, :, :2], causal=False, scale=1.0)
    assert out.shape == (2, 0, 4, 16)
    assert lse.shape == (2, 4, 0)
    dq, dk, dv = attend_backward(out, out, q[:, :, :2], q[:, :, :2], out, lse, causal=False, scale=1.0)
    assert not dk.any()
    assert not dv.any()

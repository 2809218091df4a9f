"""Softcaps of scores, and values of another width than keys, in dense attention over every backend that has them."""

import functools
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import attention, dilated_attention
from dilabench.attention.operands import workload_of
from dilabench.backends import flex as flex_backend
from dilabench.choice.descriptors import unmet
from dilabench.choice.ways import Way, own_ways
from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle.formula import attend_rows
from dilabench.impls.call import Call
from dilabench.impls.flex import flex
from dilabench.kernels.cpu import flash
from dilabench.machine import detect
from dilabench.patterns import DilatedPattern, WindowSinkPattern
from dilabench.patterns.dense import DENSE
from dilabench.workload.spec import Workload
from tests.conftest import half_are_slow

BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}
# rows, keys, H, K, D, Dv
SHAPES = {
    "wider keys": (70, 70, 4, 2, 24, 16),
    "wider values": (61, 61, 3, 1, 16, 40),
    "last rows": (40, 90, 4, 4, 8, 24),
    "few rows": (3, 97, 6, 2, 24, 16),
    "absorbed": (1, 130, 4, 1, 36, 32),
    "one width": (70, 70, 4, 2, 24, 24),
}
# Multi-head latent attention, as it is trained and in its absorbed form, of prefill and of decoding; Gemma 2.
OF_MODELS = {
    "MLA": (150, 150, 4, 4, 192, 128),
    "MLA rows": (3, 150, 4, 4, 192, 128),
    "absorbed MLA": (40, 150, 16, 1, 576, 512),
    "absorbed MLA rows": (1, 150, 16, 1, 576, 512),
    "Gemma": (150, 150, 4, 2, 256, 256),
}
WINDOW = WindowSinkPattern(sinks=1, window_size=8)
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"causal": True, "window": (20, 0)}, {"window": (9, 5)})


def _by_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float | None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(k.shape[1], device=q.device)
    ahead = place - place[k.shape[1] - q.shape[1] :, None]
    left, right = window[0], 0 if causal else window[1]
    seen = ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


def _inputs(shape: str, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    rows, keys, heads, kv_heads, dim, value_dim = SHAPES.get(shape) or OF_MODELS[shape]
    torch.manual_seed(0)
    sizes = (2, rows, heads, dim), (2, keys, kv_heads, dim), (2, keys, kv_heads, value_dim)
    return [torch.randn(size, dtype=dtype).to(device).requires_grad_() for size in sizes]


def _check(inputs: list[Tensor], options: dict[str, Any], softcap: float | None, **call: Any) -> None:
    out, lse = attention(*inputs, **options, softcap=softcap, return_lse=True, **call)
    assert out.shape == (*inputs[0].shape[:-1], inputs[2].shape[-1])
    assert out.dtype == inputs[0].dtype
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = _by_formula(*wide, softcap, **options)
    given = torch.randn_like(out), torch.randn_like(lse)
    results = out, lse, *torch.autograd.grad((out, lse), inputs, given)
    right = *expected, *torch.autograd.grad(expected, wide, [x.double() for x in given])
    for result, value in zip(results, right, strict=True):
        assert (result.double() - value).norm() <= BOUNDS[out.dtype] * value.norm()


COMPUTED = [
    ("math", torch.float64),
    ("math", torch.bfloat16),
    ("flash-cpu", torch.float32),
    ("flash-cpu", torch.bfloat16),
    ("sdpa-flash", torch.float32),
]


@pytest.mark.parametrize(
    ("computed", "shape", "options", "softcap"), half_are_slow(COMPUTED, SHAPES, MASKS, [None, 1.5]), ids=str
)
def test_results_and_gradients_are_those_of_the_formula(
    computed: tuple[str, torch.dtype], shape: str, options: dict[str, Any], softcap: float | None
) -> None:
    backend, dtype = computed
    if backend == "flash-cpu" and not flash.serves(torch.float32):
        pytest.skip("needs a C++ compiler, none works here")
    inputs = _inputs(shape, dtype)
    if backend == "sdpa-flash" and softcap:
        with pytest.raises(ValueError, match=r"cannot serve this call: softcap 1\.5 is not supported; use math"):
            attention(*inputs, **options, softcap=softcap, backend=backend)
        return
    _check(inputs, options, softcap, backend=backend)


OPTIONS = dict(zip(("whole", "causal", "causal window", "window"), MASKS, strict=True))


def of_models(names: Iterable[str], device: str) -> Iterator[Any]:
    """Each backend with shapes and masks: all, or for what compiles for seconds a few."""
    for name in names:
        backend = own_ways().backends.get(name)
        for shape in (*OF_MODELS, "one width"):
            if shape == "one width" and device == "cpu":
                continue
            relative = name == "math" or shape != "MLA"
            marks = [pytest.mark.gpu] if device == "cuda" else [pytest.mark.slow] if relative else []
            masks = [*OPTIONS] if not backend.compiles else ["whole" if "absorbed" in shape else "causal window"]
            yield pytest.param(name, shape, masks, device, id=f"{name}-{shape}-{device}", marks=marks)


ON_GPUS = ("math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flash2", "flash3", "flash4", "xformers", "flex")


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    ("backend", "shape", "masks", "device"),
    [*of_models(("math", "sdpa-flash"), "cpu"), *of_models(ON_GPUS, "cuda")],
)
def test_shapes_of_models_are_computed_or_refused(
    backend: str, shape: str, masks: list[str], device: str, softcap: float | None
) -> None:
    """In bfloat16. A backend refuses exactly what its descriptor excludes."""
    ways, inputs = own_ways(), _inputs(shape, torch.bfloat16, device)
    if lacking := unmet(ways.backends.get(backend).requires, detect(device)):
        pytest.skip(f"needs the backend {backend}: {'; '.join(lacking)}")
    kinds = [(x.shape, x.dtype, x.device) for x in inputs]
    for options in (OPTIONS[name] for name in masks):
        workload = workload_of(kinds, Call(DENSE, **options, softcap=softcap, wants_gradient=True))
        assert workload is not None
        against = ways.reasons_against_backend(Way("dense", None, workload), detect(device), backend)
        if against:
            with pytest.raises(ValueError, match=f"backend '{backend}' cannot serve this call: "):
                attention(*inputs, **options, softcap=softcap, backend=backend)
        else:
            _check(inputs, options, softcap, backend=backend)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", ["few rows", "absorbed", "MLA rows", "absorbed MLA rows"])
def test_few_rows_without_gradients(shape: str, options: str, device: str) -> None:
    """In bfloat16, all keys or fewer of one item: on a GPU by kernels that have no backward pass."""
    q, k, v = (x.detach() for x in _inputs(shape, torch.bfloat16, device))
    out, lse = attention(q, k, v, **OPTIONS[options], return_lse=True)
    lengths = torch.tensor([90, k.shape[1]], device=device)
    short = attention(q, k, v, **OPTIONS[options], key_lengths=lengths)
    wide = [x.double() for x in (q, k, v)]
    exact, exact_lse = _by_formula(*wide, None, **OPTIONS[options])
    first = _by_formula(wide[0][:1], *(x[:1, :90] for x in wide[1:]), None, **OPTIONS[options])[0]
    assert torch.equal(short[1], out[1])
    for result, value in ((out, exact), (lse, exact_lse), (short[:1], first)):
        assert result.shape == value.shape
        assert (result.double() - value).norm() <= BOUNDS[out.dtype] * value.norm()


@pytest.mark.parametrize("softcap", [0.1, 50.0, 1e6])
def test_scale_and_softcap_are_apart(softcap: float) -> None:
    _check(_inputs("wider keys", torch.float64), {"causal": True, "scale": 0.7}, softcap)
    _check(_inputs("wider keys", torch.float32), {"causal": True, "scale": 0.7}, softcap)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("shape", ["wider keys", "wider values"])
def test_packed_sequences_and_caches(shape: str, softcap: float | None) -> None:
    q, k, v = (x[0] for x in _inputs(shape, torch.float64))
    bounds = (0, 13, 33, 50)
    out = attention(q, k, v, cu_seqlens=bounds, causal=True, softcap=softcap)
    for start, stop in pairwise(bounds):
        alone = _by_formula(*(x[None, start:stop] for x in (q, k, v)), softcap, causal=True)[0]
        torch.testing.assert_close(out[start:stop], alone[0])
    assert not out[bounds[-1] :].any()
    last = attention(q[:4], k, v, cu_seqlens=(0, 3, 4), cu_seqlens_k=(0, 40, 50), causal=True, softcap=softcap)
    torch.testing.assert_close(
        last[:3], _by_formula(q[None, :3], k[None, :40], v[None, :40], softcap, causal=True)[0][0]
    )
    q, k, v = _inputs("few rows", torch.float64)
    out = attention(q, k, v, key_lengths=(50, 97), causal=True, softcap=softcap)
    torch.testing.assert_close(out[:1], _by_formula(q[:1], k[:1, :50], v[:1, :50], softcap, causal=True)[0])


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_under_compilers_and_transforms(softcap: float | None) -> None:
    inputs = _inputs("wider keys", torch.float64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, softcap=softcap)

    out = call(*inputs)
    dout = torch.randn_like(out)
    right = torch.autograd.grad(out, inputs, dout)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, out)
    torch.testing.assert_close(torch.autograd.grad(compiled, inputs, dout), right)
    torch.testing.assert_close(torch.func.vjp(call, *(x.detach() for x in inputs))[1](dout), right)


def test_without_keys_or_data_out_has_the_width_of_values() -> None:
    q, k, v = torch.randn(1, 5, 2, 8), torch.randn(1, 0, 2, 8), torch.randn(1, 0, 2, 3)
    out = attention(q, k, v)
    assert out.shape == (1, 5, 2, 3)
    assert not out.any()
    shapes = [x.to("meta") for x in _inputs("wider keys", torch.float32)]
    assert attention(*shapes).shape == (2, 70, 4, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, "softcap 0.0 should be a finite number greater than 0; None is no cap"),
        ({"softcap": "50"}, "softcap '50' is a text"),
        ({"softcap": torch.tensor(3.0)}, "softcap is a tensor"),
        (
            {"softcap": 2.0, "pattern": WindowSinkPattern(sinks=1, window_size=8)},
            "block-sparse: softcap 2 is not supported; flex on cuda can",
        ),
        ({"softcap": 2.0, "backend": "sdpa-flash"}, r"softcap 2 is not supported; use math"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused_with_what_can(options: dict[str, Any], message: str) -> None:
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, causal=True, **options)


def test_patterns_refuse_values_of_another_width() -> None:
    q, k, v = torch.randn(1, 32, 2, 8), torch.randn(1, 32, 2, 8), torch.randn(1, 32, 2, 4)
    with pytest.raises(ValueError, match="value_dim 4 beside head_dim 8 is not supported"):
        attention(q, k, v, causal=True, pattern=WINDOW)
    with pytest.raises(ValueError, match="value_dim 4 beside head_dim 8 is not supported"):
        dilated_attention(q, k, v, segment_lengths=(8,), dilation_rates=(1,))
    with pytest.raises(ValueError, match="equal but for its last dim"):
        attention(q, k, v[:, 1:])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "softcap"), [("one width", 1.5), ("wider values", None)])
@pytest.mark.parametrize("options", [MASKS[0], MASKS[2]], ids=str)
def test_the_backend_flex_by_torchs_plain_form_of_it(
    monkeypatch: pytest.MonkeyPatch, shape: str, softcap: float | None, options: dict[str, Any]
) -> None:
    """torch has no backward pass of it for a CPU, but for the check of the device."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    flex_backend._compiled.cache_clear()
    q, k, v = (x.detach() for x in _inputs(shape, torch.float32))
    rows, cap = min(q.shape[1], k.shape[1]), softcap or 0.0
    mask: dict[str, Any] = {"causal": False, **options, "scale": 0.3, "softcap": cap}
    wide = [x[:, :rows].double().requires_grad_() for x in (q, k, v)]
    expected = _by_formula(*wide, softcap, **options, scale=0.3)
    dout = torch.randn_like(expected[0])
    right = *expected, *torch.autograd.grad(expected[0], wide, dout)
    narrow = [x[:, :rows] for x in (q, k, v)]
    out, lse = flex_backend.attend(*narrow, **mask)
    found = out, lse, *flex_backend.attend_backward(dout.float(), *narrow, out, lse, **mask)
    for result, value in zip(found, right, strict=True):
        assert (result.double() - value).norm() <= BOUNDS[torch.float32] * value.norm()
    flex_backend._compiled.cache_clear()


def _own(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **mask: Any) -> tuple[Tensor, Tensor]:
    out, lse = _by_formula(q, k, v, None, scale=scale, **mask)
    return out, lse


@pytest.mark.parametrize(
    "backend",
    ["auto", "math", "flash-cpu", "sdpa-flash", _own],
    ids=["auto", "math", "flash-cpu", "sdpa-flash", "function"],
)
@pytest.mark.parametrize("rows", [32, 3])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["softcap", "value_dim"])
def test_what_only_dense_attention_has_is_refused_in_branches_over_any_backend(
    name: str, grad: bool, rows: int, backend: Any
) -> None:
    q, k, v = torch.randn(1, 32, 2, 8), torch.randn(1, 32, 2, 8), torch.randn(1, 32, 2, 4 if name == "value_dim" else 8)
    branches = DilatedPattern(segment_lengths=(8, 32), dilation_rates=(1, 2))
    given = {"softcap": 2.0} if name == "softcap" else {}
    with pytest.raises(ValueError, match=f"strided: {name} [24]( beside head_dim 8)? is not supported"):
        attention(q[:, -rows:].requires_grad_(grad), k, v, pattern=branches, causal=True, backend=backend, **given)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_function_as_backend_gives_values_of_another_width(shape: str, options: dict[str, Any]) -> None:
    _check(_inputs(shape, torch.float64), options, None, backend=_own)


@pytest.mark.parametrize("shape", ["one width", "last rows"])
def test_a_function_as_backend_gets_no_softcap(shape: str) -> None:
    with pytest.raises(ValueError, match=r"softcap 1\.5 with <function _own .* gets none; leave the softcap out"):
        attention(*_inputs(shape, torch.float64), causal=True, softcap=1.5, backend=_own)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "pattern",
    [
        {"kind": "dense"},
        {"kind": "dilated", "segment_lengths": (32, 96), "dilation_rates": (1, 2)},
        {"kind": "window_sink", "sinks": 2, "window_size": 16},
    ],
    ids=lambda pattern: pattern["kind"],
)
def test_flex_caps_scores_of_any_pattern_before_counts(pattern: dict[str, Any]) -> None:
    shape = {"batch_size": 1, "seq_len": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 32}
    workload = Workload.model_validate({"pattern": pattern, **shape, "softcap": 0.7})
    q, k, v = torch.randn(1, 96, 4, 16), torch.randn(1, 96, 2, 16), torch.randn(1, 96, 2, 32)
    out = flex.build(workload, BuildContext(device=torch.device("cpu")))(q, k, v)
    expected, _ = attend_rows(q, k, v, workload, torch.arange(96))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

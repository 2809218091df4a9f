"""A mistake in code that implementations share is found: the oracle computes zero keys, sinks and sums by itself."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import attention
from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.engine.verify import summary, verify
from dilabench.engine.verify.oracle.reference import differentiable_rows
from dilabench.impls import gather, native_sparse, null_mass, strided, summed
from dilabench.kernels import lse
from dilabench.workload.spec import Workload
from tests.conftest import half_are_slow, slow

CONTEXT = BuildContext(device=torch.device("cpu"), backend=LoadedBackend("math", math.attend, math.attend_backward))
SHAPE = {"batch_size": 2, "seq_len": 61, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "dtype": "float64"}
ZERO_KEYS = {
    "kind": "dilated",
    "segment_lengths": (12, 24),
    "dilation_rates": (2, 4),
    "offset": "blocked",
    "padding": "zero_key",
}
NATIVE_SPARSE = {"kind": "native_sparse", "block_size": 16, "top_k": 4, "window_size": 11}
BLOCKWISE = {"kind": "blockwise_native_sparse", "block_size": 16, "top_k": 2, "window_size": 11}


def too_many(log_zero_keys: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Zero keys that count a hundredth more."""

    def wrong(*arguments: Any, **options: Any) -> Tensor | None:
        logs = log_zero_keys(*arguments, **options)
        return None if logs is None else logs + 0.01

    return wrong


def too_large(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A result that is too large by a hundredth."""
    return lambda *arguments, **options: function(*arguments, **options) * 1.01


def too_heavy(add_null_mass_: Callable[..., None]) -> Callable[..., None]:
    """A mass that is too large by a hundredth."""
    return lambda out, lse, log_mass: add_null_mass_(out, lse, log_mass + 0.01)


def wrong_gates(parts_of: Callable[..., Any]) -> Callable[..., Any]:
    """Gates of the last attention that are too large by a hundredth."""

    def wrong(*arguments: Any) -> Any:
        parts = list(parts_of(*arguments))
        return iter([*parts[:-1], *(replace(part, gates=part.gates * 1.01) for part in parts[-1:])])

    return wrong


def workload(**fields: Any) -> Workload:
    return Workload.model_validate({**SHAPE, "causal": False, "mode": "both", **fields})


def break_everywhere(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, wrong: Callable[[Any], Any]) -> None:
    """Replace a function in its module and in every module of dilabench that has imported it."""
    right = getattr(module, name)
    broken = wrong(right)
    for holder in [loaded for key, loaded in sys.modules.items() if key.partition(".")[0] == "dilabench"]:
        if getattr(holder, name, None) is right:
            monkeypatch.setattr(holder, name, broken)


@pytest.mark.parametrize(
    ("module", "merge_grad"),
    half_are_slow([gather, strided], ["exact", "detached"]),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_wrong_zero_keys_fail(monkeypatch: pytest.MonkeyPatch, module: Any, merge_grad: str) -> None:
    case = workload(pattern={**ZERO_KEYS, "merge_grad": merge_grad})
    assert verify(module.build(case, CONTEXT), case).passed
    break_everywhere(monkeypatch, null_mass, "log_zero_keys", too_many)
    assert "out: error" in summary(verify(module.build(case, CONTEXT), case))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("block_means", too_large), ("block_means_backward", too_large), ("parts_of", wrong_gates)],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("pattern", [NATIVE_SPARSE, slow(BLOCKWISE)], ids=lambda pattern: pattern["kind"])
def test_wrong_sums_fail(monkeypatch: pytest.MonkeyPatch, pattern: dict[str, Any], name: str, wrong: Any) -> None:
    case = workload(pattern=pattern)
    assert verify(native_sparse.build(case, CONTEXT), case).passed
    break_everywhere(monkeypatch, summed, name, wrong)
    assert not verify(native_sparse.build(case, CONTEXT), case).passed


PATTERNS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "dilated": {"kind": "dilated", "segment_lengths": (16, 48), "dilation_rates": (1, 3)},
    "window_sink": {"kind": "window_sink", "sinks": 3, "window_size": 10},
    "block_sparse": {"kind": "block_sparse", "mask": "random", "block_size": 16, "sparsity": 0.6},
}


def with_sinks(case: Workload, function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv and the sinks' gradient of a function of q, k, v and sinks."""
    generator = torch.Generator().manual_seed(0)
    heads = case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads
    q, k, v, dout = (
        torch.randn(case.batch_size, case.seq_len, count, case.head_dim, generator=generator, dtype=torch.float64)
        for count in heads
    )
    leaves = q, k, v, torch.linspace(-1, 2, case.num_heads, dtype=torch.float64)
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = function(*leaves)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def by_oracle(case: Workload) -> tuple[Tensor, ...]:
    rows = torch.arange(case.seq_len)
    return with_sinks(case, lambda q, k, v, s: differentiable_rows(q, k, v, case, rows, torch.float64, s))


def by_library(case: Workload) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"pattern": case.pattern, "causal": case.causal, "return_lse": True}
    return with_sinks(case, lambda q, k, v, s: attention(q, k, v, sink=s, **options))


def agree(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-11) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("holder", "name", "wrong"),
    [
        (null_mass, "sink_gradient", too_large),
        (lse, "add_null_mass_", too_heavy),
    ],
    ids=["sink_gradient", "add_null_mass_"],
)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_wrong_sinks_disagree_with_the_oracle(
    monkeypatch: pytest.MonkeyPatch, pattern: dict[str, Any], holder: Any, name: str, wrong: Any
) -> None:
    case = workload(pattern=pattern, causal=True)
    expected = by_oracle(case)
    assert agree(by_library(case), expected)
    break_everywhere(monkeypatch, holder, name, wrong)
    assert agree(by_oracle(case), expected)
    assert not agree(by_library(case), expected)

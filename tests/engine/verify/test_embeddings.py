"""Modules with projections: verified as a whole against a float64 copy with the oracle in place of their attention."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.engine.verify import Oracle, embeddings, summary, verify
from dilabench.engine.verify.cores import shell_of
from dilabench.impls.multihead import build_gather
from dilabench.impls.ring import multihead
from dilabench.record import Verification
from dilabench.workload.spec import Workload
from tests.conftest import half_are_slow, slow
from tests.engine.verify.conftest import failing

MATH = LoadedBackend("math", math.attend, math.attend_backward)

MakeWorkload = Callable[..., Workload]


class Projected(nn.Module):
    def __init__(self, workload: Workload, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        width, dtype = workload.num_heads * workload.head_dim, getattr(torch, workload.dtype)
        generator = torch.Generator().manual_seed(1)
        self.heads = workload.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, dtype=dtype) for _ in range(4))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (
            linear(x).unflatten(-1, (self.heads, -1))
            for linear, x in zip((self.q, self.k, self.v), (q, k, v), strict=True)
        )
        return self.o(self.attention(*parts).flatten(-2))


@pytest.mark.parametrize(
    ("changes", "dtype"),
    half_are_slow(
        [{}, {"batch_size": 1, "layout": "packed", "cu_seqlens": (0, 40, 61)}], ["float64", "float32", "bfloat16"]
    ),
    ids=str,
)
def test_a_right_module_passes(make_workload: MakeWorkload, right: type, dtype: str, changes: dict[str, Any]) -> None:
    workload = make_workload(mode="both", dtype=dtype, **changes)
    verification = verify(Projected(workload, right(workload)), workload, takes="embeddings", deterministic=True)
    assert verification.passed, summary(verification)
    names = {check.name for check in verification.checks}
    assert names >= {"out", "dx", "d q.weight", "d k.bias", "d o.weight", "dependency", "repeat", "inputs"}


def test_a_right_module_passes_on_sampled_rows(make_workload: MakeWorkload) -> None:
    workload = make_workload(
        mode="both", pattern={"kind": "dense"}, seq_len=4099, num_heads=3, num_kv_heads=3, head_dim=8, batch_size=1
    )

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    verification = verify(Projected(workload, attention), workload, takes="embeddings")
    assert verification.sampled_rows is not None
    assert verification.passed, summary(verification)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", slow("float64")])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (6, 2)])
def test_few_values_are_no_multiple_of_a_projection(dtype: str, heads: int, kv_heads: int) -> None:
    """One value is a multiple of any, and two values in half precision of many."""
    sizes = {"batch_size": 1, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 1}
    for seed, length in product(range(6), (1, 2, 16)):
        workload = Workload.model_validate({"pattern": {"kind": "dense"}, "seq_len": length, "dtype": dtype, **sizes})
        torch.manual_seed(seed)
        module = build_gather(workload, BuildContext(device=torch.device("cpu"), backend=MATH))
        check = embeddings._core_check(module, Oracle(workload, takes="embeddings", seed=seed))
        assert check.passed, check.detail


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_scale_of_few_values_is_seen_if_there_are_positions(make_workload: MakeWorkload, dtype: str) -> None:
    workload = make_workload(dtype=dtype, head_dim=1, num_heads=6, num_kv_heads=6, seq_len=16)

    class Scaled(Projected):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = (3 * (x @ self.q.weight.mT).unflatten(-1, (6, 1)) for x in (q, k, v))
            return self.o(self.attention(*heads).flatten(-2))

    module = Scaled(workload, lambda q, _k, _v: q)
    check = embeddings._core_check(module, Oracle(workload, takes="embeddings"))
    assert not check.passed
    assert str(check.detail).startswith("q is ")
    assert "'attention' already scales" in str(check.detail)


def test_a_wrong_core_fails(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload(causal=True)
    leaky = right(make_workload(causal=False))
    assert failing(verify(Projected(workload, leaky), workload, takes="embeddings")) >= {"out", "dependency"}


def test_a_module_that_does_not_use_its_core_fails(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()

    class Bypass(Projected):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if isinstance(self.attention, nn.Module):
                return super().forward(q, k, v)
            return self.o(self.v(v))

    found = failing(verify(Bypass(workload, right(workload)), workload, takes="embeddings"))
    assert found >= {"out", "dependency"}


def test_a_cached_output_fails(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    module = Projected(workload, right(workload))
    cache: list[Tensor] = []

    def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(module(q, k, v))
        return cache[0].clone()

    assert failing(verify(cached, workload, takes="embeddings", module=module)) == {"dependency"}


def test_wrong_gradients_of_one_input_fail(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload(mode="both")
    core = right(workload)
    module = Projected(workload, lambda q, k, v: core(q, k.detach(), v))
    assert failing(verify(module, workload, takes="embeddings")) >= {"dx", "d k.weight"}


def test_a_module_without_a_core_is_refused(make_workload: MakeWorkload) -> None:
    workload = make_workload()
    with pytest.raises(ValueError, match="attribute 'attention'"):
        verify(nn.Linear(4, 4), workload, takes="embeddings")
    with pytest.raises(ValueError, match="make one for this case"):
        verify(nn.Linear(4, 4), workload, takes="embeddings", oracle=Oracle(workload))


class Scaled(torch.autograd.Function):
    """The tensor itself, its gradient times 1 + 1e-4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 + 1e-4)


def test_a_dx_that_is_wrong_in_the_fourth_digit_fails(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload(mode="both", dtype="float32")
    module = Projected(workload, right(workload))
    wrong = verify(lambda q, k, v: module(*map(Scaled.apply, (q, k, v))), workload, takes="embeddings", module=module)
    assert failing(wrong) == {"dx"}


PLANTED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a weight's gradient two per cent too large": ("q.weight", lambda gradient: gradient * 1.02),
    "that of the last projection": ("o.weight", lambda gradient: gradient * 1.02),
    "a bias forgotten": ("v.bias", torch.zeros_like),
    "a bias without its first value": ("o.bias", lambda gradient: gradient * (torch.arange(len(gradient)) > 0)),
}


@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16"])
@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_gradient_of_a_parameter_fails(
    make_workload: MakeWorkload, right: type, planted: str, dtype: str
) -> None:
    workload = make_workload(mode="both", dtype=dtype)
    module = Projected(workload, right(workload))
    name, wrong = PLANTED[planted]
    module.get_parameter(name).register_hook(wrong)
    assert {one.removesuffix("_slope") for one in failing(verify(module, workload, takes="embeddings"))} == {
        f"d {name}"
    }


def test_a_row_that_a_parameter_s_gradient_leaves_out_fails(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload(mode="both", dtype="float32")

    class Forgetful(Projected):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = super().forward(q, k, v)
            if isinstance(self.attention, nn.Module):
                return out
            gone = torch.arange(out.shape[1])[:, None] == 50
            core = self.attention(
                *(
                    f(x).unflatten(-1, (self.heads, -1))
                    for f, x in zip((self.q, self.k, self.v), (q, k, v), strict=True)
                )
            )
            without = nn.functional.linear(core.flatten(-2), self.o.weight.detach(), self.o.bias)
            return torch.where(gone, without, out)

    found = failing(verify(Forgetful(workload, right(workload)), workload, takes="embeddings"))
    assert {one.removesuffix("_slope") for one in found} == {"d o.weight"}


def test_rounding_of_dx_is_measured_beside_all_that_cancels_in_it() -> None:
    """Beside its row alone, one seed of thirty was beyond twice the plain error, in a row where the parts cancel."""
    pattern = {"kind": "block_sparse", "mask": "strided", "block_size": 128, "sparsity": 0.5}
    fields = {"pattern": pattern, "batch_size": 1, "seq_len": 384, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128}
    workload = Workload.model_validate({**fields, "dtype": "float32", "mode": "both"})
    module = multihead.build_block_sparse(workload, BuildContext(device=torch.device("cpu")))
    for seed in range(4):
        verification = verify(module, workload, takes="embeddings", seed=seed)
        assert verification.passed, summary(verification)
        (dx,) = [check for check in verification.checks if check.name == "dx"]
        assert dx.tolerance is not None
        # The floor, for scores that are summed twice, is 3 sqrt(D / 3) eps: less than is seen beside its row alone.
        assert dx.tolerance < 20 * torch.finfo(torch.float32).eps


def test_the_slope_of_a_parameter_is_known_no_better_than_that_of_the_input() -> None:
    """55 positions say nothing of a slope, though the gradient of a matrix has 256 rows: each has what they share."""
    pattern = {"kind": "dilated", "segment_lengths": [26], "dilation_rates": [1], "offset": "blocked"}
    fields = {"pattern": pattern, "batch_size": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128}
    for length, told in ((55, False), (512, True)):
        more = {"seq_len": length, "dtype": "bfloat16", "window": (18, 0), "scale": 1.0, "mode": "both"}
        workload = Workload.model_validate({**fields, **more})
        module = build_gather(workload, BuildContext(device=torch.device("cpu"), backend=MATH))
        verification = verify(module, workload, takes="embeddings", seed=700064)
        assert verification.passed, summary(verification)
        assert any(check.name == "d q_proj.weight_slope" for check in verification.checks) == told


def test_what_is_expected_is_shared_by_modules_that_are_the_same_around_their_attention(
    make_workload: MakeWorkload, right: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = embeddings._expected
    monkeypatch.setattr(embeddings, "_expected", lambda *asked: made.append(asked[0]) or original(*asked))
    workload = make_workload(mode="both")
    oracle = Oracle(workload, takes="embeddings")

    def verified(module: nn.Module) -> Verification:
        return verify(module, workload, takes="embeddings", oracle=oracle)

    first, same, other = (Projected(workload, right(workload)) for _ in range(3))
    with torch.no_grad():
        other.k.bias[3] += 1e-6
    found, again = verified(first), verified(same)
    assert found.passed
    assert again.checks == found.checks
    assert made == [first]
    # One number of a parameter tells them apart, and a wrong attention is found against what another module gave.
    assert verified(other).passed
    assert made == [first, other]
    wrong = Projected(workload, lambda q, k, v: right(workload)(q, k, v) * 1.01)
    assert "out" in failing(verified(wrong))


def test_modules_with_more_than_plain_values_are_not_compared(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    plain, hooked, odd = (Projected(workload, right(workload)) for _ in range(3))
    hooked.o.register_forward_hook(lambda *_: None)
    odd.scale = torch.ones(3)
    assert shell_of(plain) is not None
    assert shell_of(hooked) is None
    assert shell_of(odd) is None
    odd.scale = 2.0
    assert not shell_of(odd).computes_as(shell_of(plain))

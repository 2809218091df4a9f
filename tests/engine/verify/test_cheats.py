"""Every way to be wrong that was found in public projects, or that a benchmark would reward, fails its own check."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.engine.verify import summary, verify
from dilabench.engine.verify.oracle.reference import build
from dilabench.impls.visible_keys import multiplicity
from dilabench.workload.spec import Workload
from tests.conftest import slow
from tests.engine.verify.conftest import failing

MakeWorkload = Callable[..., Workload]
CONTEXT = BuildContext(device=torch.device("cpu"))


def counts(workload: Workload) -> Tensor:
    rows = torch.arange(workload.seq_len)
    return torch.stack([multiplicity(workload, head, rows) for head in range(workload.num_heads)])


def test_zeros(make_workload: MakeWorkload) -> None:
    verification = verify(lambda q, k, v: torch.zeros_like(q), make_workload())
    assert failing(verification) >= {"out", "ones", "dependency", "second_call"}


def test_memory_nobody_wrote(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()

    def leaves_the_last_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        out[:, :-1] = right(workload)(q, k, v)[:, :-1]
        return out

    verification = verify(leaves_the_last_row, workload)
    assert {"finite"} == failing(verification)
    assert "NaN" in summary(verification)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda out: out.transpose(1, 2), "shape"),
        (lambda out: (out, out), "shape"),
        (lambda out: out.double(), "dtype"),
        (lambda out: out.bfloat16(), "dtype"),
        (lambda out: out * torch.nan, "finite"),
    ],
    ids=["wrong shape", "a tuple", "wider dtype", "narrower dtype", "NaN"],
)
def test_wrong_form(make_workload: MakeWorkload, right: type, change: Callable[[Tensor], Any], name: str) -> None:
    workload = make_workload()
    function = right(workload)
    assert failing(verify(lambda q, k, v: change(function(q, k, v)), workload)) == {name}


def test_cached_output(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    cache: list[Tensor] = []

    def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not cache:
            cache.append(right(workload)(q, k, v))
        return cache[0].clone()

    verification = verify(cached, workload)
    assert "second_call" in failing(verification)
    assert "first call's result again" in summary(verification)


def test_output_in_a_buffer_that_the_next_call_overwrites(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    buffer = torch.zeros(2, 61, 5, 24)

    def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return buffer.copy_(right(workload)(q, k, v))

    assert failing(verify(pooled, workload)) == {"result_kept"}


@pytest.mark.parametrize("change", [lambda q, k: q.mul_(1.5), lambda q, k: k.copy_(k.flip(1))], ids=["q", "k"])
def test_changes_its_inputs(make_workload: MakeWorkload, right: type, change: Callable[..., Any]) -> None:
    workload = make_workload()

    def changes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(workload)(q, k, v)
        change(q, k)
        return out

    assert "inputs" in failing(verify(changes, workload))


def test_leaks_the_future(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload(causal=True)
    function = right(workload, counts=counts(make_workload(causal=False)))
    verification = verify(function, workload)
    assert failing(verification) >= {"out", "dependency"}
    assert "ones" not in failing(verification)


def test_leaks_one_weight_below_rounding(make_workload: MakeWorkload, right: type) -> None:
    """A leak of 1e-9 of a key's weight is under the tolerance of out, and still a leak."""
    workload = make_workload(causal=True)
    exact, full = counts(workload), counts(make_workload(causal=False))
    function = right(workload, counts=exact + (full > exact) * 1e-9)
    found = failing(verify(function, workload))
    assert "dependency" in found
    assert "out" not in found


def test_misses_one_key(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    c = counts(workload)
    c[:, 1:, 0] = 0
    assert failing(verify(right(workload, counts=c), workload)) >= {"out", "dependency"}


def test_misses_one_key_where_rounding_would_hide_it(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload(pattern={"kind": "dense"}, seq_len=384, dtype="bfloat16", batch_size=1)
    c = counts(workload)
    c[:, 300:, 192] = 0
    assert "dependency" in failing(verify(right(workload, counts=c), workload))


def test_attends_over_heads(make_workload: MakeWorkload) -> None:
    def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    verification = verify(over_heads, make_workload())
    assert failing(verification) >= {"out", "dependency"}
    assert "ones" not in failing(verification)


def test_attends_zero_padded_keys(make_workload: MakeWorkload) -> None:
    workload = make_workload(pattern={"kind": "dense"}, causal=False)

    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 31)) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    assert failing(verify(padded, workload)) >= {"out", "ones"}


def test_swapped_offset_convention(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    swapped = workload.replace(pattern={**workload.pattern.model_dump(), "offset": "blocked"})
    assert failing(verify(right(swapped), workload)) >= {"out", "dependency"}


def test_counts_a_shared_key_once(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    verification = verify(right(workload, counts=counts(workload).clamp_max(1)), workload)
    assert "out" in failing(verification)
    assert "dependency" not in failing(verification)


def test_scales_v_away(make_workload: MakeWorkload, right: type) -> None:
    """Division by a sum over positions: invariant to the scale of V, as one public project is."""
    workload = make_workload()
    function = right(workload)

    def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v)
        return out / out.sum(dim=1, keepdim=True)

    assert failing(verify(normalised, workload)) & {"out", "ones"}


def test_divides_by_the_number_of_branches(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    function = right(workload)
    assert failing(verify(lambda q, k, v: function(q, k, v) / 3, workload)) >= {"out", "ones"}


def test_returns_zeros_for_late_rows_in_half_precision(make_workload: MakeWorkload, right: type) -> None:
    """Their values are small next to those of the first rows; their errors are measured in their own size."""
    workload = make_workload(pattern={"kind": "dense"}, seq_len=384, dtype="bfloat16", batch_size=1)
    function = right(workload)

    def truncated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([function(q, k, v)[:, :-5], torch.zeros_like(q[:, -5:])], dim=1)

    assert "out" in failing(verify(truncated, workload))


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@pytest.mark.parametrize("index", [slow(0), 1, slow(2)])
def test_wrong_only_in_backward(make_workload: MakeWorkload, right: type, index: int) -> None:
    workload = make_workload(mode="both")
    function = right(workload)

    def wrong(*inputs: Tensor) -> Tensor:
        return function(*(_ScaledGradient.apply(x, 1.001) if at == index else x for at, x in enumerate(inputs)))

    name = ("dq", "dk", "dv")[index]
    found = failing(verify(wrong, workload))
    assert name in found
    assert found <= {name, f"{name}_from_every_row"}


def test_detached_merge_instead_of_the_exact_gradient(make_workload: MakeWorkload) -> None:
    workload = make_workload(mode="both")
    detached = workload.replace(pattern={**workload.pattern.model_dump(), "merge_grad": "detached"})
    assert failing(verify(build(detached, CONTEXT), workload)) == {"dq", "dk", "dk_from_every_row"}
    assert failing(verify(build(workload, CONTEXT), detached)) == {"dq", "dk"}


def test_no_gradient(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload(mode="both")
    function = right(workload)
    assert failing(verify(lambda q, k, v: function(q, k, v).detach(), workload)) == {"dq", "dk", "dv"}


def test_wrong_lse(make_workload: MakeWorkload) -> None:
    workload = make_workload()

    class InBase2(type(build(workload, CONTEXT))):  # type: ignore[misc]
        def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = super().with_lse(q, k, v)
            return out, lse * 1.4427

    assert failing(verify(InBase2(workload), workload)) == {"lse"}


def test_differs_between_identical_calls(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    calls: list[int] = []

    def drifts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return right(workload)(q, k, v) * (1 + (len(calls) - 1) * 2.0**-23)

    assert failing(verify(drifts, workload, deterministic=True)) == {"repeat"}


def dense_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


LONG = {"pattern": {"kind": "dense"}, "seq_len": 4099, "num_heads": 3, "num_kv_heads": 3, "batch_size": 1}


def test_wrong_only_at_long_lengths(make_workload: MakeWorkload) -> None:
    """verify runs at the size that is timed, so a function that is right up to 2048 does not get away."""

    def local_beyond_2048(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([dense_flash(*(x[:, at : at + 2048] for x in (q, k, v))) for at in (0, 2048, 4096)], dim=1)

    short = make_workload(**{**LONG, "seq_len": 1024})
    assert verify(dense_flash, short).passed
    verification = verify(local_beyond_2048, make_workload(**LONG))
    assert failing(verification) >= {"out", "dependency"}
    assert verification.sampled_rows is not None


@pytest.mark.slow
@pytest.mark.parametrize(("index", "name"), [(1, "dk"), (2, "dv")])
def test_drops_one_tile_of_rows_from_the_backward_at_length(make_workload: MakeWorkload, index: int, name: str) -> None:
    """64 of 4099 rows, most of them not sampled, give k or v no gradient: seen under a dout random in every row."""
    workload = make_workload(**LONG, mode="both")

    class DropsTile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return dense_flash(*inputs)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                out = dense_flash(*leaves)
            full = list(torch.autograd.grad(out, leaves, dout, retain_graph=True))
            kept = dout.clone()
            kept[:, 2900:2964] = 0
            full[index] = torch.autograd.grad(out, leaves[index], kept)[0]
            return tuple(full)

    assert verify(dense_flash, workload).passed
    assert f"{name}_from_every_row" in failing(verify(DropsTile.apply, workload))

"""Every row against a confirmed built-in, where the oracle has a sample only."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.choice.computation import load_backend
from dilabench.contracts import BuildContext
from dilabench.engine.case_spec import second_implementations
from dilabench.engine.verify import Oracle, summary, verify
from dilabench.engine.verify.confirmed import Confirmed
from dilabench.engine.verify.oracle import sample
from dilabench.errors import ConfigError
from dilabench.impls import gather, strided
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.record import Case
from dilabench.workload.spec import Workload
from tests.conftest import slow
from tests.engine.verify.conftest import failing

LENGTH = 3072
CPU = Machine(device="cpu", no_cuda="test")
LONG = Workload.model_validate(
    {
        "pattern": {"kind": "dense"},
        "batch_size": 1,
        "seq_len": LENGTH,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "mode": "both",
    }
)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2)


def second(build: Any = lambda: attend) -> Confirmed:
    return Confirmed("another", build)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(LONG)


@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16", slow("float16")])
def test_a_right_one_passes_and_the_record_says_against_what(dtype: str) -> None:
    workload = LONG.replace(dtype=dtype)
    verification = verify(attend, workload, confirmed=second())
    assert verification.passed, summary(verification)
    assert verification.against == "another"
    assert verification.sampled_rows
    names = {check.name for check in verification.checks}
    assert names >= {"out_all_rows", "dq_all_rows", "dk_all_rows", "dv_all_rows"}


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_15_rows_that_see_one_future_token_are_found_with_every_seed(seed: int) -> None:
    workload = LONG.replace(mode="forward")
    rows = torch.randperm(LENGTH - 2, generator=torch.Generator().manual_seed(seed))[:15]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[rows, rows + 1] = True
    verification = verify(lambda q, k, v: attend(q, k, v, mask), workload, seed=seed, confirmed=second())
    assert "out_all_rows" in failing(verification)


class _WrongRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: int) -> Tensor:
        ctx.row = row
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        gradient[:, ctx.row] *= 1.01
        return gradient, None


def test_a_wrong_dq_outside_of_the_sample_is_found(oracle: Oracle) -> None:
    row = next(row for row in range(100, LENGTH) if row not in oracle.sample.rows.tolist())
    wrong = verify(lambda q, k, v: attend(_WrongRow.apply(q, row), k, v), LONG, oracle=oracle, confirmed=second())
    assert failing(wrong) == {"dq_all_rows"}
    (check,) = [check for check in wrong.checks if not check.passed]
    assert f"position {row}" in str(check.where)


@pytest.mark.parametrize(("dtype", "least_wrong"), [("float32", 1e-4), ("bfloat16", 0.5)])
def test_rows_without_keys_and_rows_that_see_themselves_are_no_measure(
    monkeypatch: Any, dtype: str, least_wrong: float
) -> None:
    """At high rates most rows of a head are zeros, and the gradient of one that sees one key is 0 but for rounding."""
    monkeypatch.setattr(sample, "COMPLETE_PAIRS", 2**12)
    pattern = {
        "kind": "dilated",
        "segment_lengths": (128, 1024, 4096),
        "dilation_rates": (2, 8, 48),
        "heads": "grouped",
    }
    workload = LONG.replace(pattern=pattern, seq_len=4096, num_heads=6, num_kv_heads=6, dtype=dtype, causal=True)
    kernel = load_backend(discover().catalogue.backends.get("math"))
    context = BuildContext(device=torch.device("cpu"), backend=kernel)
    verification = verify(
        strided.build(workload, context), workload, confirmed=second(lambda: gather.build(workload, context))
    )
    assert verification.passed, summary(verification)
    allowed = {check.name: check.tolerance for check in verification.checks if check.name.endswith("_all_rows")}
    assert allowed.keys() == {"out_all_rows", "dq_all_rows", "dk_all_rows", "dv_all_rows"}
    assert max(allowed[name] for name in ("out_all_rows", "dq_all_rows", "dv_all_rows")) < least_wrong


@pytest.fixture
def short_and_sampled(monkeypatch: Any) -> None:
    monkeypatch.setattr(sample, "COMPLETE_PAIRS", 2**12)
    monkeypatch.setattr(sample, "SAMPLE_PAIRS", 2**16)
    monkeypatch.setattr(sample, "MAX_ROWS", 24)


def in_steps(q: Tensor, k: Tensor, v: Tensor, factor: float = 1.0, row: int = 0) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    gain = torch.ones(q.shape[2], 1, dtype=q.dtype)
    gain[row] = factor
    return (weights @ v * gain).transpose(1, 2).contiguous()


FEW_VALUES = {"seq_len": 600, "num_heads": 4, "num_kv_heads": 2, "causal": False}


# Seeds of which at least one in each kind has rows that cancel.
@pytest.mark.usefixtures("short_and_sampled")
@pytest.mark.parametrize(
    ("head_dim", "dtype", "seeds"),
    [(1, "float64", (3, 12)), slow(1, "float32", (7, 8, 14)), (2, "float32", (2, 6, 17))],
)
def test_rows_of_few_values_that_cancel_are_right(head_dim: int, dtype: str, seeds: tuple[int, ...]) -> None:
    workload = LONG.replace(head_dim=head_dim, dtype=dtype, **FEW_VALUES)
    attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    details = []
    for seed in seeds:
        verification = verify(
            lambda q, k, v: attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2),
            workload,
            seed=seed,
            confirmed=second(lambda: in_steps),
        )
        assert verification.passed, summary(verification)
        details += [check.detail for check in verification.checks if check.name.endswith("_all_rows")]
    assert any("against the oracle" in str(detail) for detail in details)


@pytest.mark.usefixtures("short_and_sampled")
@pytest.mark.parametrize(("head_dim", "dtype"), [(1, "float32"), slow(2, "float64"), slow(16, "bfloat16")])
def test_a_wrong_row_of_few_values_is_found(head_dim: int, dtype: str) -> None:
    workload = LONG.replace(head_dim=head_dim, dtype=dtype, **FEW_VALUES)
    oracle = Oracle(workload)
    row = next(row for row in range(100, 600) if row not in oracle.sample.rows.tolist())
    wrong = functools.partial(in_steps, factor=1.5, row=row)
    verification = verify(wrong, workload, oracle=oracle, confirmed=second(lambda: in_steps))
    assert {"out_all_rows", "dq_all_rows"} <= failing(verification)


def unbuildable() -> None:
    raise ConfigError("no such kernel here")


@pytest.mark.parametrize(
    "build",
    [lambda: lambda q, k, v: attend(q, k, v) * 1.1, unbuildable, lambda: lambda q, k, v: torch.empty(2**60)],
    ids=["wrong", "not built", "too large"],
)
def test_what_the_oracle_does_not_confirm_does_not_count(oracle: Oracle, build: Any) -> None:
    verification = verify(attend, LONG, oracle=oracle, confirmed=second(build))
    assert verification.passed, summary(verification)
    assert verification.against is None


@pytest.mark.usefixtures("with_a_compiler")
def test_another_built_in_is_chosen_by_what_descriptors_say() -> None:
    catalogue = discover().catalogue
    dilated = LONG.replace(pattern={"kind": "dilated", "segment_lengths": (512,), "dilation_rates": (2,)})

    def chosen(workload: Workload, name: str, backend: str | None) -> list[tuple[str, str | None]]:
        case = Case(implementation=name, backend=backend, workload=workload)
        return [(one.name, over and over.name) for one, over in second_implementations(case, catalogue, CPU)]

    assert chosen(dilated, "gather", "sdpa-flash")[0] == ("strided", "flash-cpu")
    assert chosen(dilated, "strided", "sdpa-flash")[0] == ("gather", "flash-cpu")
    assert chosen(LONG, "dense", "sdpa-flash") == [("dense", "flash-cpu"), ("dense", "math")]
    assert ("dense", "sdpa-flash") not in chosen(LONG, "dense", "sdpa-flash")
    assert chosen(dilated, "gather-multihead", "sdpa-flash") == []
    assert chosen(LONG.replace(seq_len=2**20), "dense", "sdpa-flash") == []

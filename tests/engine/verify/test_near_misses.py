"""A wrong result is named after the mistake whose result it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.engine.verify import near_misses, summary, verify
from dilabench.engine.verify.near_misses import CountedOnce, StrictlyEarlier
from dilabench.engine.verify.oracle.formula import attend_rows
from dilabench.engine.verify.oracle.reference import build
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.registry import pattern_type
from dilabench.plugins.manager import discover
from dilabench.workload.spec import Workload
from tests.conftest import slow

MakeWorkload = Callable[..., Workload]
CONTEXT = BuildContext(device=torch.device("cpu"))


def computing(workload: Workload, **pattern: Any) -> Callable[..., Tensor]:
    """What computes the workload with other fields of its pattern."""
    return build(workload.replace(pattern={**workload.pattern.model_dump(), **pattern}), CONTEXT)


@pytest.mark.parametrize(
    ("dtype", "changes", "pattern", "name"),
    [
        ("bfloat16", {}, {"offset": "blocked"}, "out is that of offset=blocked"),
        (
            "float32",
            {"num_heads": 6, "num_kv_heads": 3},
            {"offset_by": "kv_head"},
            "out is that of offset_by=kv_head",
        ),
        ("float32", {}, {"heads": "grouped"}, "out is that of heads=grouped"),
        *(
            (dtype, {"mode": "both"}, {"merge_grad": "detached"}, "dq is that of merge_grad=detached")
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_options_of_the_pattern(
    make_workload: MakeWorkload, dtype: str, changes: dict[str, Any], pattern: dict[str, str], name: str
) -> None:
    workload = make_workload(dtype=dtype, **changes)
    verification = verify(computing(workload, **pattern), workload)
    assert verification.diagnosis == name
    assert summary(verification).startswith(f"{name}; ")


CAPPED = {"pattern": {"kind": "dense"}, "softcap": 1.5, "mode": "both"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"softcap": None}, "no softcap"),
        ({"softcap": 1.5 * 0.3}, "a softcap times the scale (scores before the scale capped)"),
        ({"softcap": 1.5 / 0.3}, "a softcap over the scale"),
    ],
)
def test_other_softcaps(make_workload: MakeWorkload, changes: dict[str, Any], name: str) -> None:
    workload = make_workload(**CAPPED, scale=0.3)
    verification = verify(build(workload.model_copy(update=changes), CONTEXT), workload)
    assert verification.diagnosis == f"out is that of {name}"


@pytest.mark.parametrize("window", [(-1, -1), (9, 0)])
@pytest.mark.parametrize("mistake", ["after mask", "without derivative"])
def test_a_softcap_after_the_mask_or_without_its_derivative(
    make_workload: MakeWorkload, mistake: str, window: tuple[int, int]
) -> None:
    workload = make_workload(**CAPPED, window=window, num_heads=6, num_kv_heads=2)
    ahead = torch.arange(workload.seq_len) - torch.arange(workload.seq_len)[:, None]
    seen = (ahead <= 0) & ((ahead >= -window[0]) | (window[0] < 0))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(3, 2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * workload.softmax_scale
        if mistake == "after mask":
            scores = 1.5 * torch.tanh(scores.masked_fill(~seen, -torch.inf) / 1.5)
        else:
            capped = 1.5 * torch.tanh(scores.detach() / 1.5)
            scores = (scores - scores.detach() + capped).masked_fill(~seen, -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    name = {
        "after mask": "out is that of a softcap after the mask, which shows hidden keys with the score -softcap",
        "without derivative": "dq is that of a softcap without its derivative",
    }
    assert verify(attend, workload).diagnosis == name[mistake]


def test_counted_once(make_workload: MakeWorkload) -> None:
    workload = make_workload()
    once = build(workload.model_copy(update={"pattern": CountedOnce(inner=workload.pattern)}), CONTEXT)
    assert verify(once, workload).diagnosis == "out is that of keys that several branches give counted once"


def test_zero_padded_keys(make_workload: MakeWorkload) -> None:
    workload = make_workload(causal=False)
    # As torchscale pads also where no sequence may ask for it.
    padded = workload.model_copy(update={"pattern": workload.pattern.near_misses()["padding=zero_key"]})
    assert verify(build(padded, CONTEXT), workload).diagnosis == "out is that of padding=zero_key"


def test_masked_padding(make_workload: MakeWorkload) -> None:
    pattern = {"kind": "dilated", "segment_lengths": (12, 40), "dilation_rates": (1, 4), "padding": "zero_key"}
    workload = make_workload(causal=False, pattern=pattern)
    assert verify(build(workload, CONTEXT), workload).passed
    assert verify(computing(workload, padding="masked"), workload).diagnosis == "out is that of padding=masked"


@pytest.mark.parametrize(
    ("changes", "wrong", "name"),
    [
        ({}, {"causal": False}, "causal=false"),
        ({"causal": False}, {"causal": True}, "causal=true"),
        ({"window": (9, 0)}, {"window": (-1, -1)}, "no window"),
        ({"window": (9, 0)}, {"window": (8, 0)}, "window 8,0 (off by one)"),
        slow({"window": (9, 0)}, {"window": (10, 0)}, "window 10,0 (off by one)"),
        slow({"window": (-1, 4), "causal": False}, {"window": (-1, 5)}, "window -1,5 (off by one)"),
        ({"scale": 0.3}, {"scale": None}, "scale=1/sqrt(D), not the one given"),
        ({}, {"scale": 1.0}, "scale=1 (no scale)"),
    ],
)
def test_masks_and_scales(
    make_workload: MakeWorkload, changes: dict[str, Any], wrong: dict[str, Any], name: str
) -> None:
    workload = make_workload(**changes)
    assert verify(build(workload.replace(**wrong), CONTEXT), workload).diagnosis == f"out is that of {name}"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda f: lambda q, k, v: f(q, k.roll(1, 1), v.roll(1, 1)), "keys and values shifted by one"),
        (lambda f: lambda q, k, v: f(q, k, v).roll(-1, 1), "the position one later (shifted by one)"),
        (lambda f: lambda q, k, v: f(q, k, v) * 1.25, "the right one scaled by 1.25"),
    ],
)
def test_shifts_and_factors(make_workload: MakeWorkload, change: Any, name: str) -> None:
    workload = make_workload()
    diagnosis = verify(change(build(workload, CONTEXT)), workload).diagnosis
    assert diagnosis is not None
    assert name in diagnosis


@pytest.mark.parametrize("excess", [0.25, 1e-5, -2e-5])
def test_a_factor_has_the_digits_that_tell_it_from_1(make_workload: MakeWorkload, excess: float) -> None:
    workload = make_workload(dtype="float64")
    function = build(workload, CONTEXT)
    verification = verify(lambda q, k, v: function(q, k, v) * (1 + excess), workload)
    assert verification.diagnosis == f"out is the right one scaled by {1 + excess:.7g}"


def test_gradients_of_the_call_before_are_not_blamed_on_a_kernel(make_workload: MakeWorkload) -> None:
    workload = make_workload(mode="both")
    function = build(workload, CONTEXT)

    class Late(torch.autograd.Function):
        kept: Tensor | None = None

        @staticmethod
        def forward(ctx: Any, k: Tensor) -> Tensor:
            return k.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            now, Late.kept = Late.kept, gradients[0].clone()
            return gradients[0] if now is None else now

    verification = verify(lambda q, k, v: function(q, Late.apply(k), v), workload)
    assert not verification.passed
    assert "cuDNN" not in (verification.diagnosis or "")


@pytest.mark.parametrize("pattern", [{}, {"pattern": {"kind": "dense"}}], ids=["dilated", "dense"])
def test_a_strict_causal_mask(make_workload: MakeWorkload, pattern: dict[str, Any]) -> None:
    workload = make_workload(causal=True, **pattern)
    strict = workload.model_copy(update={"pattern": StrictlyEarlier(inner=workload.pattern)})
    name = "out is that of a strict causal mask (no row sees its own position)"
    assert verify(build(strict, CONTEXT), workload).diagnosis == name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_that_a_view_transposed(make_workload: MakeWorkload, dtype: str) -> None:
    workload = make_workload(dtype=dtype)
    function = build(workload, CONTEXT)

    def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v).transpose(1, 2).contiguous().view(q.shape)

    name = "out is that of memory of [B, H, N, D] read as [B, N, H, D] (a view, not a transpose)"
    assert verify(viewed, workload).diagnosis == name


def test_key_heads_in_the_wrong_order(make_workload: MakeWorkload) -> None:
    workload = make_workload(num_heads=6, num_kv_heads=2, pattern={"kind": "dense"})
    whole = build(workload.replace(num_kv_heads=6), CONTEXT)

    def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return whole(q, k.repeat(1, 1, 3, 1), v.repeat(1, 1, 3, 1))

    assert verify(interleaved, workload).diagnosis == "out is that of key/value head h % K for head h, not h // g"


def test_lse_to_base_2(make_workload: MakeWorkload) -> None:
    workload = make_workload()
    right = build(workload, CONTEXT)

    class InBase2:
        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return right(q, k, v)

        def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = right.with_lse(q, k, v)  # type: ignore[attr-defined]
            return out, lse * 1.4426950408889634

    assert verify(InBase2(), workload).diagnosis == "lse is a logarithm to base 2 (natural is wanted)"


def test_most_mistakes_are_ruled_out_by_few_rows(make_workload: MakeWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, computed = make_workload(), []
    wrong = build(workload.replace(scale=1.0), CONTEXT)

    def counted(q: Tensor, k: Tensor, v: Tensor, variant: Workload, rows: Tensor) -> tuple[Tensor, Tensor]:
        computed.append(len(rows))
        return attend_rows(q, k, v, variant, rows)

    monkeypatch.setattr(near_misses, "attend_rows", counted)
    assert verify(wrong, workload).diagnosis == "out is that of scale=1 (no scale)"
    assert len(computed) > 10
    assert sorted(computed)[-2] < sorted(computed)[-1] == near_misses.ROWS


def test_what_is_no_near_miss_is_not_called_one(make_workload: MakeWorkload, right: type) -> None:
    workload = make_workload()
    function = right(workload)

    def half_wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v)
        return torch.cat([out[:, :50], torch.randn_like(out[:, 50:])], 1)

    verification = verify(half_wrong, workload)
    assert not verification.passed
    assert verification.diagnosis is None


# Of each kind every second one is slow.
EXAMPLES = [
    slow(example) if at % 2 else example
    for kind in discover().catalogue.patterns
    for at, example in enumerate(pattern_type(kind.name).examples())
]


@pytest.mark.parametrize("pattern", EXAMPLES, ids=str)
def test_every_mistake_can_be_compared_with_a_wrong_gradient(pattern: Pattern, make_workload: MakeWorkload) -> None:
    fewer = {"batch_size": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    workload = make_workload(mode="both", pattern=pattern, causal=False, dtype="float64", **fewer)
    function = build(workload, CONTEXT)

    def with_a_wrong_dq(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        added = q.sin() * 3
        return function(q, k, v) + (added - added.detach())

    verification = verify(with_a_wrong_dq, workload)
    assert "dq" in {check.name for check in verification.checks if not check.passed}

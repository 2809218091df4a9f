"""The kit for plug-in authors: right implementations pass, wrong ones raise with the reason."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dilabench.conformance.odd_workloads import odd_workloads_of
from dilabench.contracts import AttentionFn, BuildContext
from dilabench.engine.verify.oracle import reference
from dilabench.errors import ConfigError
from dilabench.patterns.dilated import DilatedPattern
from dilabench.patterns.registry import known_kinds
from dilabench.plugins.descriptors import Capabilities
from dilabench.record import Check, Verification
from dilabench.testing import check_implementation, odd_workloads, poisoned_memory, random_workloads
from dilabench.workload.spec import Workload

nan_memory = pytest.fixture(poisoned_memory)
FORWARD_ONLY = Capabilities(modes=frozenset({"forward"}))


def test_by_name_it_runs_every_odd_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def passes(function: AttentionFn, workload: Workload, **options: object) -> Verification:
        assert function is not None
        assert options["takes"] == "heads"
        ran.append(workload)
        return Verification(checks=(Check(name="out", passed=True),))

    monkeypatch.setattr("dilabench.testing.verify", passes)
    assert len(check_implementation("reference")) == len(ran)
    assert ran == list(odd_workloads())


@pytest.mark.slow
def test_the_reference_passes_on_odd_workloads_of_every_pattern() -> None:
    workloads = [one for kind in known_kinds() for one in islice(odd_workloads_of(kind), 2)]
    assert len(check_implementation("reference", workloads)) == len(workloads)


def test_a_build_function_runs_what_it_supports() -> None:
    workloads = [one for one in odd_workloads() if isinstance(one.pattern, DilatedPattern)][:3]
    assert len(check_implementation(reference.build, workloads, deterministic=True)) == 3
    (forward,) = check_implementation(reference.build, workloads[:1], supports=FORWARD_ONLY)
    assert "dq" not in [check.name for check in forward.checks]


def test_a_wrong_build_raises_with_workload_and_check() -> None:
    def build(workload: Workload, context: BuildContext) -> AttentionFn:
        right = reference.build(workload, context)

        def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return right(q, k, v) * 0.999

        return wrong

    with pytest.raises(AssertionError, match=r"under-test on 2x97 H5 D24 fp32 causal.*out: error .* at batch \d"):
        check_implementation(build)


def test_nothing_supported_is_a_failure() -> None:
    nothing = Capabilities(patterns=frozenset({"no such pattern"}))
    with pytest.raises(AssertionError, match="supports none of the workloads"):
        check_implementation(reference.build, supports=nothing)


def test_an_unknown_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="did you mean reference"):
        check_implementation("referense")


def test_odd_workloads_hold_the_sizes_that_break_things() -> None:
    workloads = odd_workloads()
    dilated = [w for w in workloads if isinstance(w.pattern, DilatedPattern)]
    assert {24, 80} <= {w.head_dim for w in workloads}
    assert {5, 6} <= {w.num_heads for w in workloads}
    assert any(w.num_kv_heads < w.num_heads for w in workloads)
    assert {"modulo", "blocked"} == {w.pattern.offset for w in dilated}
    assert {"all", "grouped"} == {w.pattern.heads for w in dilated}
    assert any(max(w.pattern.segment_lengths) > w.seq_len for w in dilated)
    assert any(length % rate for w in dilated for length, rate in w.pattern.branches)
    assert {w.causal for w in workloads} == {True, False}


def test_memory_is_poisoned_by_the_fixture(nan_memory: None) -> None:
    assert torch.empty(5).isnan().all()


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(workload=random_workloads(max_seq_len=24))
def test_the_reference_passes_on_random_workloads(workload: Workload) -> None:
    check_implementation(reference.build, [workload])

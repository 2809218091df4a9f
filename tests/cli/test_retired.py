"""Retired names: every place that takes a name answers with the reason and what to use instead."""

import pytest
import torch

import dilabench.plugins.retired as retired
from dilabench.attention import dilated_attention
from dilabench.conformance.check import registries_with
from dilabench.errors import ConfigError, ExitCode
from dilabench.plugins.manager import REGISTRIES, discover
from dilabench.request import run_request

KINDS = {getattr(discover().catalogue, name).kind: name for name in REGISTRIES}
MADE = tuple(retired.Retired(kind, f"bygone-{kind}", f"no {kind} was faster with it", "another") for kind in KINDS)
REQUESTS = {
    "implementation": lambda name: {"run": {"implementations": [name]}},
    "backend": lambda name: {"run": {"backends": [name]}},
    "workload": lambda name: {"configs": [name]},
    "pattern": lambda name: {"assignments": [f"pattern={name}"]},
}


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(retired, "RETIRED", MADE)


def refusal(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def answer(one):
    return f"{one.kind} {one.name!r} was removed: {one.reason}; use {one.instead}"


@pytest.mark.parametrize("one", [one for one in MADE if one.kind in REQUESTS], ids=lambda one: one.kind)
def test_a_request_for_a_retired_name_is_answered(made, one):
    found = refusal(run_request, discover().catalogue, suite="quick", **REQUESTS[one.kind](one.name))
    assert answer(one) in found


@pytest.mark.parametrize("one", MADE, ids=lambda one: one.kind)
def test_describe_verify_and_check_answer_too(made, one, cli):
    done = cli("describe", one.name)
    assert done.exit_code == ExitCode.BAD_REQUEST
    assert answer(one) in " ".join(done.output.split())
    for kind in (None, one.kind):
        assert refusal(registries_with, one.name, discover().catalogue, kind) == answer(one)


def test_the_library_answers_for_a_backend(made):
    q = torch.zeros(1, 8, 2, 8)
    branches = {"segment_lengths": [8], "dilation_rates": [1]}
    with pytest.raises(ValueError, match=r"backend .bygone-backend. was removed: .*; use another"):
        dilated_attention(q, q, q, **branches, backend="bygone-backend")


def test_a_name_that_stands_for_two_things_answers_for_both(monkeypatch):
    both = [retired.Retired(kind, "twice", f"no {kind}", "another") for kind in ("pattern", "implementation")]
    monkeypatch.setattr(retired, "RETIRED", tuple(both))
    assert str(retired.no_such_name(retired.ANY_KIND, "twice", [])) == "; ".join(map(answer, both))
    assert str(retired.no_such_name("pattern", "twice", [])) == answer(both[0])
    assert "unknown backend 'twice'" in str(retired.no_such_name("backend", "twice", []))

"""Retired names: every place that takes a name answers with the reason and what to use instead."""

import pytest
import torch

import dilabench.retired as retired
from dilabench.attention import dilated_attention
from dilabench.conformance.component import registries_with
from dilabench.errors import ConfigError, ExitCode
from dilabench.plugins.manager import REGISTRIES, discover
from dilabench.record import RunRecord
from dilabench.request import run_request

KINDS = {getattr(discover().catalogue, name).kind: name for name in REGISTRIES}
MADE = tuple(retired.Retired(kind, f"bygone-{kind}", f"no {kind} was faster with it", "another") for kind in KINDS)
REQUESTS = {
    "implementation": lambda name: {"run": {"implementations": [name]}},
    "backend": lambda name: {"run": {"backends": [name]}},
    "workload": lambda name: {"configs": [name]},
    "pattern": lambda name: {"assignments": [f"pattern={name}"]},
}
COMMANDS = {
    "reporter": lambda name: (("report", "latest", "-f", name), ("run", "quick", "-f", name)),
    "command": lambda name: ((name, "latest"), (name, "--help")),
    "option": lambda name: (name.split(), [*name.split(), "value"]),
}


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(retired, "RETIRED", MADE)


def refusal(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def answer(entry):
    return f"{entry.kind} {entry.name!r} was removed: {entry.reason}; use {entry.instead}"


def named(entry):
    return f"{entry.kind} {entry.name}"


@pytest.mark.parametrize("entry", retired.RETIRED, ids=named)
def test_a_entry_is_registered_no_more_and_answers(cli, entry):
    catalogue = discover().catalogue
    if entry.kind in KINDS:
        assert entry.name not in getattr(catalogue, KINDS[entry.kind])
    if entry.kind in REQUESTS:
        assert answer(entry) in refusal(run_request, catalogue, suite="quick", **REQUESTS[entry.kind](entry.name))
    for command in (
        ("describe", "--", entry.name),
        *COMMANDS.get(entry.kind, lambda _: ())(entry.name),
    ):
        done = cli(*command)
        assert done.exit_code == ExitCode.BAD_REQUEST
        assert answer(entry) in " ".join(done.output.split())


@pytest.mark.parametrize("entry", [entry for entry in retired.RETIRED if entry.kind == "option"], ids=named)
def test_a_default_for_a_retired_option_answers(cli, tmp_path, entry):
    command, option = entry.name.split()
    (tmp_path / "dilabench.toml").write_text(f"[{command}]\n{option.lstrip('-')} = true\n")
    done = cli(command)
    assert done.exit_code == ExitCode.BAD_REQUEST
    assert answer(entry) in " ".join(done.output.split())


@pytest.mark.parametrize("form", ["markdown", "json", "csv", "html"])
def test_a_record_with_all_entrys_is_shown(cli, tmp_path, make_row, make_record, form):
    names = {entry.name for entry in retired.RETIRED if entry.kind == "implementation"}
    kinds = {entry.name for entry in retired.RETIRED if entry.kind == "pattern"}
    rows = [make_row(name) for name in sorted(names)]
    rows += [make_row("fused", pattern={"kind": kind, "size_of_old": 7}) for kind in sorted(kinds)]
    path = tmp_path / "old.json"
    path.write_text(make_record(rows).model_dump_json())
    done = cli("report", str(path), "-f", form)
    assert done.exit_code == ExitCode.OK, done.output
    assert all(name in done.stdout for name in names)
    assert RunRecord.model_validate_json(path.read_text()).model_dump_json() == path.read_text()


@pytest.mark.parametrize(
    "entry",
    [entry for entry in MADE if entry.kind in REQUESTS],
    ids=lambda entry: entry.kind,
)
def test_a_request_for_a_entry_is_answered(made, entry):
    assert answer(entry) in refusal(
        run_request, discover().catalogue, suite="quick", **REQUESTS[entry.kind](entry.name)
    )


@pytest.mark.parametrize("entry", MADE, ids=lambda entry: entry.kind)
def test_describe_verify_and_check_answer_too(made, entry, cli):
    done = cli("describe", "--", entry.name)
    assert done.exit_code == ExitCode.BAD_REQUEST
    assert answer(entry) in " ".join(done.output.split())
    for kind in (None, entry.kind):
        assert refusal(registries_with, entry.name, discover().catalogue, kind) == answer(entry)


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

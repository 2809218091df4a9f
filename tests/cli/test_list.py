"""`dilabench list` and `describe`."""

import json
import re

import pytest

from dilabench.cli.show import list as listing
from dilabench.machine import Machine
from dilabench.plugins.manager import Problem, discover


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    machine = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
    monkeypatch.setattr(listing, "detect", lambda: machine)
    monkeypatch.setattr("dilabench.cli.show.describe.detect", lambda: machine)


def test_everything_is_listed(cli):
    result = cli("list")
    assert result.exit_code == 0
    for text in (
        "gather = dilated",
        "sdpa-flash",
        "longnet_32k",
        "quick",
        "markdown",
        "wall",
        "builtin",
        "50000 100000 200000",
    ):
        assert text in result.stdout


def test_what_cannot_be_used_says_why(cli):
    lines = cli("list", "backends").stdout.splitlines()
    line = next(line for line in lines if line.startswith("sdpa-cudnn"))
    assert line.split()[1] == "no"
    # Those that lack the same are told together.
    (told,) = [one for one in lines if one.startswith("sdpa-efficient, sdpa-cudnn, flex cannot be used here: ")]
    assert told.endswith("needs a CUDA GPU (no NVIDIA GPU is visible)")


def test_why_adds_the_limits(cli):
    assert "patterns: dilated" not in cli("list", "implementations").stdout
    line = next(
        line for line in cli("list", "implementations", "--why").stdout.splitlines() if line.startswith("gather =")
    )
    assert "patterns: dilated" in line
    assert "one device" in line


def test_json_has_all_kinds_and_reasons(cli):
    found = json.loads(cli("list", "--json").stdout)
    assert set(found) == {
        "patterns",
        "implementations",
        "backends",
        "workloads",
        "suites",
        "reporters",
        "timers",
        "plugins",
        "problems",
    }
    by_name = {entry["name"]: entry for entry in found["backends"]}
    assert by_name["math"]["usable"] is True
    assert by_name["sdpa-cudnn"]["reasons"] == ["needs a CUDA GPU (no NVIDIA GPU is visible)"]


def test_one_kind_only(cli):
    assert set(json.loads(cli("list", "suites", "--json").stdout)) == {"suites", "problems"}
    result = cli("list", "sweets")
    assert result.exit_code == 2
    assert "'sweets' is not one of" in result.stderr


def test_a_broken_plugin_is_shown_with_its_error(cli, monkeypatch):
    found = discover()
    found.problems.append(Problem("theirs", "ImportError: No module named 'nowhere'"))
    monkeypatch.setattr(listing, "discover", lambda: found)
    result = cli("list", "plugins")
    assert result.exit_code == 0
    assert "broken plug-in theirs: ImportError: No module named 'nowhere'" in result.stdout
    assert json.loads(cli("list", "plugins", "--json").stdout)["problems"] == [
        {"plugin": "theirs", "why": "ImportError: No module named 'nowhere'"}
    ]


def test_describe_a_preset(cli):
    text = cli("describe", "seed_medium").stdout
    for fact in (
        "2x4K H8 D64 bf16 causal",
        "pattern.dilation_rates: (1, 2, 4)",
        "FLOPs:",
        "attended pairs:",
        "family:",
    ):
        assert fact in text
    assert "dense:" in text
    assert "no: pattern dilated is not supported (has dense)" in text


def test_describe_shows_every_thing_of_that_name(cli):
    text = cli("describe", "medium").stdout
    assert "workload medium" in text
    assert "4x8K H24 D128 bf16 causal" in text
    assert "range medium" in text
    assert "32768 49152 65536 98304 131072" in text


def test_describe_an_alias_and_a_set(cli):
    text = cli("describe", "standard").stdout
    assert "alias of:" in text
    assert "dilabench.impls.dense:build" in text
    assert "dilabench.backends.math:attend" in text
    assert "qwen3_4b, qwen3_14b, qwen3_32b" in cli("describe", "gqa").stdout


def test_describe_an_unknown_name(cli):
    result = cli("describe", "stridet")
    assert result.exit_code == 2
    assert "unknown name 'stridet'; did you mean strided" in result.stderr


def test_description_as_json_holds_every_sheet_of_a_name(cli):
    document = json.loads(cli("describe", "block-sparse", "--json").stdout)
    # An implementation and a suite have that name.
    assert [sheet["kind"] for sheet in document] == ["implementation", "suite"]
    for sheet in document:
        facts = dict(sheet["facts"])
        assert facts["plug-in"] == "builtin"
        assert facts["summary"]


def test_a_suite_says_what_it_answers_and_how_many_rows_run(cli):
    told = " ".join(cli("describe", "quick").stdout.split())
    assert "answer: the fastest by length" in told
    assert re.search(r"rows here: \d+, (all of which run|of which \d+ run)", told)


def test_other_names_are_explained_where_there_are_any(cli):
    line = "a = b: b is another name of a"
    assert line in cli("list", "suites").stdout
    assert line not in cli("list", "reporters").stdout

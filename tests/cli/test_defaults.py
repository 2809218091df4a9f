"""Defaults from dilabench.toml or pyproject.toml: found, checked, and weaker than the command line."""

import json
from pathlib import Path

import pytest


def lengths(result):
    assert result.exit_code == 0, result.output
    return [case["workload"]["seq_len"] for case in json.loads(result.stdout)]


def test_a_file_sets_what_the_command_line_does_not(cli, tmp_path, monkeypatch):
    text = 'device = "cpu"\njson = true\n[run]\nlengths = ["1K", 512]\nimplementations = ["gather"]\n'
    (tmp_path / "dilabench.toml").write_text(text)
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert lengths(cli("run", "quick", "--dry-run")) == [1024, 512]
    assert lengths(cli("run", "quick", "--dry-run", "--lengths", "256")) == [256]
    # A key at the top is for the commands that have such an option.
    assert json.loads(cli("list", "suites").stdout)


def test_the_table_of_a_project_file_counts_as_well(cli):
    Path("pyproject.toml").write_text("[tool.dilabench.run]\nseq-length = 96\ndry_run = true\njson = true\n")
    assert set(lengths(cli("run", "implementations", "-i", "gather", "--device", "cpu"))) == {96}
    # A file without such a table is not the end of the search, and no error.
    Path("pyproject.toml").write_text("[tool.other]\n")
    assert cli("list", "suites").exit_code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devise = 1", "unknown option 'devise'; did you mean device"),
        ("[runs]\na = 1", "unknown command 'runs'; did you mean run?"),
        ("[run]\nbudge = 1", "unknown option of run 'budge'; did you mean budget?"),
        ("[run", "cannot be read"),
        ('[[run]]\nbudget = "1s"', "run [{'budget': '1s'}] is no table; write the command's options below [run]"),
        ("[[check]]\nbudget = 1", "check [{'budget': 1}] is no table; write the command's options below [check]"),
        ("run.budget.a = 1", "budget = {'a': 1}"),
        (f"{'a.' * 20_000}a = 1", "a key in it has over 64 parts"),
        (f"[run]\nbudget = {{{'a . ' * 20_000}a = 1}}", "a key in it has over 64 parts"),
        (f"[{'a.' * 20_000}a]", "a key in it has over 64 parts"),
        (f"a = '{'x' * 2_000_000}'", "it has over 1048576 letters"),
        ('[run]\nsessions = "many"', "'--sessions'"),
        ('[run]\nsessions = "many"', "dilabench.toml': sessions = 'many'"),
        ('seed = 3\njson = true\n[run]\nbudget = "abc"', "dilabench.toml': budget = 'abc', seed = 3, json = True"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused(cli, text, message):
    Path("dilabench.toml").write_text(text)
    result = cli("run", "quick", "--dry-run")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_mistake_on_the_command_line_is_not_laid_at_the_file(cli):
    Path("dilabench.toml").write_text('[run]\nbudget = "60s"\n')
    result = cli("run", "quick", "--dry-run", "--budget", "abc")
    assert result.exit_code == 2
    assert "dilabench.toml" not in result.stderr


def test_a_run_that_goes_on_does_so_as_it_was_asked_for(cli):
    Path("dilabench.toml").write_text("[run]\nseed = 5\n")
    result = cli("run", "quick", "--resume", "abc")
    assert "run 'abc' does not exist, and 'benchmark_results' has no runs" in result.stderr

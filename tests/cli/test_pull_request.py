"""Markdown for pull requests: the answer first, what is long folded, and never longer than GitHub takes."""

import pytest

from dilabench.comparison.comparison import Comparison
from dilabench.plugins.manager import discover
from dilabench.record import Failed
from dilabench.report.findings import sections_of
from dilabench.report.pull_request import MOST_CHARACTERS, of_comparison, of_run


def test_the_answer_stands_before_what_is_folded(make_row, make_record):
    broken = make_row("ring", outcome=Failed(stage="time", code="crash", why="a | pipe"))
    record = make_record([make_row(), make_row("gather", ns=2e7, position=1), broken])
    text = of_run(record, sections_of(record, discover().catalogue))
    opening, *folded = text.split("<details>")
    assert "strided" in opening
    assert "| length |" in opening
    assert [part.split("</summary>")[0].removeprefix("<summary>") for part in folded][-2:] == ["Results", "Command"]
    assert "a \\| pipe" in text
    assert text.count("<details>") == text.count("</details>")


def test_what_is_too_long_for_a_comment_is_left_out_and_said_so(make_row, make_record):
    record = make_record([make_row(seq_len=64 + index, rounds=1, samples=1) for index in range(400)])
    text = of_run(record, ())
    assert len(text) < MOST_CHARACTERS
    assert "Results omitted: too long for a comment" in text
    assert "<summary>Command" in text


@pytest.mark.parametrize(("ns", "word"), [(1e7, "verdict: ok"), (2e7, "verdict: REGRESSION")])
def test_a_comparison_says_its_verdict_and_appends_it_to_the_job(
    cli, make_row, make_record, monkeypatch, tmp_path, ns, word
):
    for run_id, time in (("base", 1e7), ("new", ns)):
        rows = [make_row(ns=time, sessions=5, seed=run_id), make_row("gather", sessions=5, seed=run_id)]
        (tmp_path / f"{run_id}.json").write_text(make_record(rows, run_id=run_id).model_dump_json())
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.chdir(tmp_path)
    printed = cli("compare", "base.json", "new.json", "-f", "markdown", "--github-summary")
    assert printed.stdout.startswith(f"### dilabench: {word}")
    assert ("| SLOWER | strided over math |" in printed.stdout.partition("<details>")[0]) == (ns == 2e7)
    assert "| no change above " in printed.stdout.partition("<details>")[2]
    assert summary.read_text().strip() == printed.stdout.strip()


def test_no_job_no_summary(cli, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    refused = cli("report", "latest", "--github-summary")
    assert refused.exit_code == 2
    assert "-f pull-request" in refused.stderr


@pytest.mark.parametrize(
    ("line", "markdown"),
    [
        (
            "to decide: `run a_b --budget 10s` (about 3_4 s), then `x`",
            "to decide: `run a_b --budget 10s` (about 3\\_4 s), then `x`",
        ),
        ("`x` or `y", "`x` or \\`y"),
        ("no command", "no command"),
    ],
)
def test_commands_that_decide_can_be_copied(line, markdown):
    verdict = "verdict: UNDECIDED (no pairs; exit code 0)"
    assert of_comparison(Comparison(pairs=()), f"{line}\n{verdict}").splitlines() == [
        f"### dilabench: {verdict}",
        "",
        markdown,
    ]

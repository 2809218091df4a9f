"""`dilabench compare` of two runs as a page, and of more as a matrix in every format."""

import json

import pytest

from dilabench.comparison.across import compare_across
from dilabench.comparison.matrix import compare_all
from dilabench.stats.decisions.decide import Policy


@pytest.fixture
def runs(make_row, make_record, tmp_path):
    """Three runs of which the last is twice as slow; the names of their files."""
    for run_id, ns, version in (("aaaa", 1e7, "1"), ("bbbb", 1e7, "1"), ("cccc", 2e7, "<2>")):
        rows = [make_row(ns=ns, sessions=5, seed=run_id), make_row("gather", sessions=5, seed=run_id)]
        record = make_record(rows[: 1 if run_id == "bbbb" else 2], run_id=run_id, tool_version=version)
        (tmp_path / f"{run_id}.json").write_text(record.model_dump_json())
    return ["aaaa.json", "bbbb.json", "cccc.json"]


def test_two_runs(cli, runs, tmp_path):
    result = cli("compare", *runs[:2], "-f", "html", "-o", "out")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "comparison.html").read_text()
    assert "SAME" in text
    assert "Not compared" in text
    assert "verdict: ok" in result.stdout


@pytest.mark.parametrize(
    ("ns", "options", "code", "colour"),
    [(1e7, (), 0, ""), (1e7, ("--fail-on", "inconclusive"), 7, "skipped"), (2e7, (), 6, "failed")],
    ids=["undecided", "undecided, asked for", "slower"],
)
def test_the_banner_has_the_colour_of_the_exit_code(cli, make_row, make_record, tmp_path, ns, options, code, colour):
    """A comparison that is undecided, which fails only if asked for; one that is slower."""
    sessions = 5 if ns > 1e7 else 1
    for run_id, taken in (("aaaa", 1e7), ("bbbb", ns)):
        record = make_record([make_row(ns=taken, sessions=sessions, seed=run_id)], run_id=run_id)
        (tmp_path / f"{run_id}.json").write_text(record.model_dump_json())
    result = cli("compare", "aaaa.json", "bbbb.json", "-f", "html", "-o", "page.html", *options)
    assert (result.exit_code, f"exit code {code}" in result.stdout) == (code, True)
    assert f'<section class="banner {colour}"' in (tmp_path / "page.html").read_text()


def test_a_matrix_has_every_pair(cli, runs, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    shown = cli("compare", *runs)
    assert shown.exit_code == 6
    assert max(map(len, shown.stdout.splitlines())) <= 80
    rows = [line.split() for line in shown.stdout.splitlines() if line.startswith("strided over math")]
    # Base, then a time on the diagonal with the ratios of later runs to the right of it.
    assert [row[3] for row in rows] == ["aaaa", "bbbb", "cccc"]
    assert [len(row) for row in rows] == [8, 7, 6]
    assert "gather over math, 1x96" in shown.stdout
    assert "bbbb: not in the record" in " ".join(shown.stdout.split())
    document = json.loads(cli("compare", *runs, "--json").stdout)
    assert document["runs"] == ["aaaa", "bbbb", "cccc"]
    codes = {
        (one["base"], one["new"], cell["candidate"]["implementation"]): cell["verdict"]["code"]
        for one in document["comparisons"]
        for cell in one["cells"]
    }
    assert codes == {
        ("aaaa", "bbbb", "strided"): "SAME",
        ("aaaa", "cccc", "strided"): "SLOWER",
        ("aaaa", "cccc", "gather"): "SAME",
        ("bbbb", "cccc", "strided"): "SLOWER",
    }
    text = cli("compare", *runs, "-f", "markdown").stdout
    assert text.index("SLOWER |") < text.index("<details>") < text.index("| gather over math |")


def test_verdicts_of_a_matrix_are_corrected_together(make_row, make_record):
    records = [make_record([make_row(sessions=6, seed=run, ns=1e7)], run_id=run) for run in "abcd"]
    alone = compare_across([records[0]], [records[1]], policy=Policy.for_device("cpu")).pairs[0].verdict.numbers
    matrix = compare_all("abcd", [[one] for one in records], policy=Policy.for_device("cpu"))
    among = matrix.comparisons[0, 1].pairs[0].verdict.numbers
    assert len(matrix.comparisons) == 6
    assert (among.log_ratio, among.p_slower) == (alone.log_ratio, alone.p_slower)
    assert among.p_adjusted > alone.p_adjusted


def test_a_matrix_of_more_ends_with_the_gravest_code(cli, runs, tmp_path):
    result = cli("compare", *runs, "-f", "html", "-o", "out")
    assert result.exit_code == 6, result.output
    text = (tmp_path / "out" / "comparison.html").read_text()
    assert text.count("verdict on ") == 2
    assert "SLOWER" in text
    # What differs between the environments, escaped.
    assert "&lt;2&gt;" in text
    assert "<2>" not in text


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        (["aaaa.json", "-f", "html"], "name two or more"),
        (["aaaa.json", "--by", "implementation", "-f", "html"], "dilabench report -f html"),
        (["aaaa.json", "bbbb.json", "-o", "x"], "add -f html"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_way_out(cli, runs, arguments, way_out):
    result = cli("compare", *arguments)
    assert result.exit_code == 2
    assert way_out in result.stderr

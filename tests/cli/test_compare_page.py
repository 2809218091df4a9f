"""`dilabench compare -f html`: one page of a baseline and any number of candidates."""

import pytest


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
        (["aaaa.json", "bbbb.json", "cccc.json"], "more than two with -f html"),
        (["aaaa.json", "-f", "html"], "name two"),
        (["aaaa.json", "--by", "implementation", "-f", "html"], "dilabench report -f html"),
        (["aaaa.json", "bbbb.json", "-o", "x"], "add -f html"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_way_out(cli, runs, arguments, way_out):
    result = cli("compare", *arguments)
    assert result.exit_code == 2
    assert way_out in result.stderr

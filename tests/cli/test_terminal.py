"""Tables on terminals of any width: nothing is ever cut off. And what is said where there is no terminal."""

import pytest

from dilabench.cli.run.progress_bar import progress_shown
from dilabench.cli.terminal import print_table

COLUMNS = ("verdict", "case", "baseline", "95 % CI", "A12")
ROW = ("INCONCLUSIVE (advisory)", "strided over sdpa-flash against gather", "2.74 ms", "0.855 to 0.906", "0.24")


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 200])
def test_every_cell_is_there_whole(monkeypatch, capsys, width):
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    print_table("a title", COLUMNS, [ROW, ROW], right=COLUMNS[2:])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert {word for text in (*COLUMNS, *ROW) for word in text.split()} <= set(printed.split())
    # Texts fold first, and numbers not before there is no other way.
    for number in ROW[2:]:
        assert printed.count(number) == 2


def test_rows_that_do_not_fit_side_by_side_are_lists(monkeypatch, capsys):
    monkeypatch.setenv("TERMINAL_WIDTH", "30")
    print_table(None, ("name", "note", "time"), [("a" * 20, "", "1 ms"), ("b" * 20, "new", "2 ms")], right=("time",))
    first, second = capsys.readouterr().out.split("\n\n")
    assert [line.split() for line in first.splitlines()] == [["name", "a" * 20], ["time", "1", "ms"]]
    assert [line.split() for line in second.splitlines()] == [["name", "b" * 20], ["note", "new"], ["time", "2", "ms"]]


def test_a_width_that_is_none_is_refused(cli, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "wide")
    result = cli("list", "suites")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "TERMINAL_WIDTH 'wide' is not a number" in result.stderr


def test_a_job_that_waits_says_why_once(capsys):
    with progress_shown() as progress:
        for _ in range(3):
            progress.waiting("the device is in use by run abc; waiting for it")
    assert capsys.readouterr().err == "the device is in use by run abc; waiting for it\n"

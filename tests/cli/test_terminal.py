"""Tables on terminals of any width: nothing is ever cut off. And what is said where there is no terminal."""

import io
import re

import pytest
from rich.console import Console

from dilabench.cli.run.progress_bar import (
    CheckedLines,
    ProgressBar,
    ProgressDisplay,
    ProgressLines,
    RunProgress,
    bar_on,
    progress_shown,
)
from dilabench.cli.terminal import note, print_table
from dilabench.machine import Machine
from dilabench.predict.time import case_expected_s, case_seconds
from dilabench.record import Case, Failed, Measured, PlannedCase, Row, Skipped, Verification
from dilabench.store.run_files import read_record
from dilabench.workload.spec import WorkloadRequest, flops
from tests.conftest import stored_record

COLUMNS = ("verdict", "case", "baseline", "95 % CI", "A12")
ROW = ("no change above 6.6 %", "strided over sdpa-flash against gather", "2.74 ms", "0.855 to 0.906", "0.24")
OTHER = ("SLOWER", "gather over math", "3.74 ms", "0.955 to 0.996", "0.34")


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 200])
def test_every_cell_is_there_whole(monkeypatch, capsys, width):
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    print_table("a title", COLUMNS, [ROW, OTHER], right=COLUMNS[2:])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert {word for text in (*COLUMNS, *ROW, *OTHER) for word in text.split()} <= set(printed.split())
    # Texts fold first, and numbers not before there is no other way.
    for number in (*ROW[2:], *OTHER[2:]):
        assert printed.count(number) == 1


def test_a_narrow_table_says_once_what_rows_have_in_common(monkeypatch, capsys):
    monkeypatch.setenv("TERMINAL_WIDTH", "40")
    rows = [(name, "sdpa-flash", length, "12.3 MiB") for name in ("gather", "strided") for length in ("1K", "2K")]
    print_table(None, ("implementation", "backend", "length", "peak memory"), rows, right=("length", "peak memory"))
    printed = capsys.readouterr().out
    assert printed.startswith("backend sdpa-flash · peak memory 12.3\nMiB\n")
    assert printed.count("sdpa-flash") == printed.count("12.3") == 1, printed


def test_where_that_is_not_enough_rows_stand_under_their_name_and_spare_columns_go(monkeypatch, capsys):
    monkeypatch.setenv("TERMINAL_WIDTH", "24")
    rows = [(name * 8, str(length), f"{length}1.5 ms", f"0.{length}") for name in "ab" for length in (1, 2)]
    columns = ("name", "length", "time", "A12-of-samples")
    print_table(None, columns, rows, right=columns[1:], spare=("A12-of-samples",))
    printed = capsys.readouterr().out
    assert printed.startswith("aaaaaaaa\n")
    assert "0.1" not in printed
    assert printed.endswith("omitted at 24 columns:\nA12-of-samples\n")
    assert printed.count("21.5") == 2


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


def test_errors_and_notes_are_no_wider_than_the_terminal(cli, monkeypatch, capsys):
    monkeypatch.setenv("TERMINAL_WIDTH", "40")
    refused = cli("describe", "no-such-name-at-all")
    assert refused.exit_code == 2
    note("so many words that they do not fit into one line of this terminal")
    for text in (refused.stderr, capsys.readouterr().err):
        assert len(text.splitlines()) > 1
        assert max(map(len, text.splitlines())) <= 40


def test_a_job_that_waits_says_why_once(capsys):
    with progress_shown() as progress:
        for _ in range(3):
            progress.waiting("the device is in use by run abc")
    assert capsys.readouterr().err == "waiting: the device is in use by run abc\n"


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("budget_s", [None, 600.0])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_has_count_times_and_what_fits_of_the_stage(width, budget_s):
    screen, clock = Console(file=io.StringIO(), width=width, force_terminal=True), Clock()
    row = row_of("measured", 2**20)
    with bar_on(screen) as bar:
        listener = ProgressBar(RunProgress(budget_s, clock), bar)
        listener.run_started({f"case {number}": 90.0 for number in range(120)})
        clock.now += 10
        listener.row_done(row)
        listener.stage_started(row.case, "verify")
        lines = screen.file.getvalue().splitlines()[-1].split("\r")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", lines[-1]).rstrip()
    assert re.match(r"[━╸╺ ]{16} +1/120 \d:\d\d:\d\d about \d+(\.\d)? (h|min) left ver", shown), shown
    assert len(shown) <= width


def test_a_run_in_a_pipe_says_now_and_then_how_far_it_is(capsys):
    clock = Clock()
    lines = ProgressLines(RunProgress(60.0, clock), clock)
    skipped, failed, measured = (
        row_of(status, length) for status, length in (("skipped", 256), ("failed", 512), ("measured", 1024))
    )
    expected = {f"later {number}": 6.0 for number in range(7)}
    clock.now += 1000
    lines.device_held()  # waiting for the device takes nothing from the budget
    lines.run_started({skipped.case.case_id: 0.0, measured.case.case_id: 6.0, failed.case.case_id: 6.0, **expected})
    lines.row_done(skipped)
    clock.now += 6
    lines.stage_started(measured.case, "verify")
    lines.row_done(measured)
    clock.now += 6
    lines.row_done(failed)
    lines.stage_started(measured.case, "time")
    clock.now += 60
    lines.stage_started(measured.case, "memory")
    assert capsys.readouterr().err.splitlines() == [
        "0 of 10 rows; about 54 s left, 60 s of the budget left; now: starting",
        "failed: gather, 32x512 H8 D64 fp32 causal: broke",
        "3 of 10 rows; about 42 s left, 48 s of the budget left; now: time gather, 32x1K H8 D64 fp32 causal",
        "3 of 10 rows; budget used up; now: memory gather, 32x1K H8 D64 fp32 causal",
    ]


@pytest.mark.parametrize(
    ("procedure", "first_s", "left"), [("interleaved", 40, "about 40 s left"), ("isolated", 10, "about 70 s left")]
)
def test_rows_that_end_together_do_not_multiply_the_time_left(procedure, first_s, left):
    """Two workloads of four rows, 10 s each; the first row of those in common rounds ends when all four do."""
    clock = Clock()
    progress = RunProgress(None, clock)
    rows = [row_of("measured", 512 + number, procedure=procedure) for number in range(8)]
    progress.expect({row.case.case_id: 10.0 for row in rows})
    progress.group_started([row.planned for row in rows[:4]])
    clock.now += first_s
    progress.add(rows[0])
    assert progress.left == left


@pytest.mark.parametrize("name", ["cpu-flash", "cpu-block-sparse", "h200-range", "h200-extreme-gather-dense"])
@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("slower", [0.5, 1, 2])
def test_the_time_left_follows_the_work_of_the_open_cases(name, slower, longest_first):
    """Rows of real runs; the machine may be faster or slower than the prediction."""
    record = read_record(stored_record(name))
    machine = Machine(device=record.device.partition(":")[0], gpus=record.environment.gpus)
    rows = [row for row in record.rows if isinstance(row.outcome, Measured)]
    took_s = {case_id: slower * seconds for case_id, seconds in case_seconds(rows, 300.0).items()}
    rows.sort(key=lambda row: flops(row.case.workload), reverse=longest_first)
    clock = Clock()
    progress = RunProgress(None, clock)
    progress.expect({row.case.case_id: case_expected_s(row.case, machine, 2) for row in rows})
    left_s = sum(took_s.values())
    for row in rows[: -len(rows) // 4]:
        clock.now += took_s[row.case.case_id]
        left_s -= took_s[row.case.case_id]
        progress.add(row)
        assert left_s / 3.5 < progress.expected_left_s(clock.now) < 3.5 * left_s


def test_a_notebook_has_one_bar_that_is_drawn_anew_for_rows_and_now_and_then():
    class Shown:
        def __init__(self):
            self.drawn = []

        def update(self, data, raw):
            assert raw
            self.drawn.append(data)

    clock, shown = Clock(), Shown()
    bar = ProgressDisplay(RunProgress(60.0, clock), lambda data, raw, display_id: shown, clock)
    row = row_of("measured")
    bar.run_started({row.case.case_id: 0.0})
    for _ in range(20):
        clock.now += 0.1
        bar.stage_started(row.case, "<time>")
    bar.row_done(row)
    texts = [data["text/plain"] for data in shown.drawn]
    assert len(texts) <= 4
    assert texts[0].startswith("0 of 1 rows; 60 s of the budget left · starting")
    assert "&lt;time&gt;" in shown.drawn[1]["text/html"]
    assert texts[-1] == "1 of 1 rows"
    assert shown.drawn[-1]["text/html"].startswith('<progress value="1" max="1">')


def test_verify_speaks_up_only_where_its_table_is_silent(capsys):
    clock = Clock()
    silent = CheckedLines(10, clock)
    for done in range(1, 11):
        clock.now += 4
        if done == 4:
            silent.spoke()
        silent.checked(done, f"check {done}")
    assert capsys.readouterr().err.splitlines() == [
        "3 of 10 checked, about 28 s left; last: check 3",
        "7 of 10 checked, about 12 s left; last: check 7",
    ]


def test_the_first_check_foretells_no_duration(capsys):
    moments = iter([0.0, 12.0, 12.0])
    CheckedLines(167, lambda: next(moments)).checked(1, "first")
    assert capsys.readouterr().err == "1 of 167 checked; last: first\n"


def row_of(status, length=512, **planned):
    case = Case(implementation="gather", workload=WorkloadRequest(batch_size=32, seq_len=length).resolve("float32"))
    outcomes = {
        "skipped": Skipped(code="budget", why="no time"),
        "failed": Failed(stage="build", code="exception", why="broke"),
        "measured": Measured(verification=Verification(checks=()), timings=()),
    }
    return Row(planned=PlannedCase(case=case, **planned), outcome=outcomes[status])

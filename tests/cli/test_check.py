"""`dilabench check`: the gate, with a measurer that answers what the test wants."""

import json
import re
from collections.abc import Sequence
from functools import partial
from math import exp

import pytest

from dilabench.errors import EnvironmentNotReady
from dilabench.record import Failed, Verification
from dilabench.runs import check
from dilabench.runs.check import SessionBudget
from dilabench.store.archive import Archive

WRONG = Failed(stage="verify", code="wrong_output", why="out differs", verification=Verification(checks=()))
LEVELS = (0.997, 1.002, 1.0, 0.999, 1.003, 1.001)


@pytest.fixture
def baseline(cli, make_row, make_record):
    """Six sessions of 12 s with two cases of one group and one of another, named main."""
    archive = Archive()
    for index, level in enumerate(LEVELS):
        rows = [make_row(name, seed=index, ns=1e7 * level, position=i) for i, name in enumerate(("gather", "strided"))]
        took = {"started_at": "2026-01-02T03:04:05+00:00", "finished_at": "2026-01-02T03:04:17+00:00"}
        archive.add(make_record([*rows, make_row("other", seq_len=7, seed=index)], run_id=f"base{index}", **took))
    assert cli("baseline", "save", "main", *(f"base{index}" for index in range(6))).exit_code == 0


@pytest.fixture
def measured(monkeypatch, make_row, make_record):
    """Stands in for the engine: the n-th measurement finds `strided` slower by the n-th ratio. Keeps what was asked.

    `spread`: how far sessions lie apart, every other one above, in log units.
    """

    class Measurer:
        ratios: Sequence[float] = ()
        spread = 0.0
        hard = None
        outcome = None
        asked: list = []  # noqa: RUF012

        def __init__(self, found, like, output, store, progress, budget_s):
            self.like = like

        def here(self):
            return make_record([], hard=self.hard)

        def sessions(self, planned, count):
            ratio = self.ratios[len(self.asked)]
            self.asked.append(([one.case.implementation for one in planned], count))
            records = []
            for session in range(count):
                rows = [
                    make_row(
                        one.case.implementation,
                        seed=50 + session,
                        position=turn,
                        seq_len=one.case.workload.seq_len,
                        ns=1e7
                        * exp(self.spread * (-1) ** session)
                        * (ratio if one.case.implementation == "strided" else 1),
                        outcome=self.outcome if one.case.implementation == "strided" else None,
                    )
                    for turn, one in enumerate(planned)
                ]
                records.append(make_record(rows, run_id=f"new{len(self.asked)}{session}", hard=self.hard))
            return records

    Measurer.asked = []
    monkeypatch.setattr("dilabench.runs.remeasure.Remeasure", Measurer)
    return Measurer


@pytest.mark.usefixtures("baseline")
def test_the_same_code_passes_without_a_second_look(cli, measured):
    measured.ratios = [1.0]
    result = cli("check", "--against", "main")
    assert result.exit_code == 0, result.stdout
    assert measured.asked == [(["gather", "strided", "other"], 3)]
    assert result.stdout.splitlines()[-1].startswith("verdict: ok")


@pytest.mark.usefixtures("baseline")
@pytest.mark.parametrize(
    ("first", "second", "code", "word"),
    [(1.2, 1.0, 0, "3 SAME"), (1.2, 1.2, 6, "1 SLOWER"), (0.8, 0.8, 0, "1 FASTER"), (0.8, 1.0, 0, "3 SAME")],
)
def test_only_the_second_data_of_a_flagged_case_decide_in_either_direction(cli, measured, first, second, code, word):
    """The whole group is measured again, so that the case has its neighbours; other groups are not."""
    measured.ratios = [first, second]
    result = cli("check", "--against", "main")
    assert result.exit_code == code, result.stdout
    assert measured.asked == [(["gather", "strided", "other"], 3), (["gather", "strided"], 3)]
    assert "measuring 2 of 3 cases in 3 fresh sessions" in result.stderr
    assert "first look: " in result.stdout
    assert word in result.stdout.splitlines()[-1]


@pytest.mark.usefixtures("baseline")
def test_before_measuring_it_says_how_long_that_takes(cli, measured):
    measured.ratios = [1.0]
    assert "a session of 3 cases takes about 12 s here; SAME is expected after 3 sessions (36 s)\n" in (
        cli("check", "--against", "main").stderr
    )
    measured.asked.clear()
    short = cli("check", "--against", "main", "--budget", "30s")
    assert "(36 s), for which --budget 80s should suffice" in short.stderr
    assert [count for _, count in measured.asked] == [1]


@pytest.mark.usefixtures("baseline")
def test_sessions_are_added_while_the_budget_holds_them_and_then_it_says_which_would_do(
    cli, measured, monkeypatch, make_row
):
    """Time passes only while something is measured, 12 s a session."""
    clock = partial(SessionBudget, clock=lambda: 12.0 * sum(count for _, count in measured.asked))
    monkeypatch.setattr(check, "SessionBudget", clock)
    measured.ratios, measured.spread = [1.0] * 9, 0.017
    result = cli("check", "--against", "main", "--budget", "60s", "--fail-on", "inconclusive")
    assert result.exit_code == 7, result.stdout
    assert [count for _, count in measured.asked] == [2, 1]
    needed, suggested = re.search(r"--budget (\d+)s should suffice \((\d+) sessions", result.stdout).groups()[::-1]
    measured.asked.clear()
    allowed = SessionBudget([make_row("strided").planned], int(suggested), clock.keywords["clock"])
    allowed.took_s = {make_row("strided").case.case_id: 12.0}
    while more := allowed.further({make_row("strided").case.case_id}, sum(count for _, count in measured.asked)):
        measured.asked.append(([], more))
    assert sum(count for _, count in measured.asked) >= int(needed)


@pytest.mark.usefixtures("baseline")
def test_sessions_that_lie_too_far_apart_for_the_baseline_end_it_early(cli, measured):
    measured.ratios, measured.spread = [1.0], 0.05
    result = cli("check", "--against", "main")
    assert "too much for the baseline's 6" in result.stdout
    assert len(measured.asked) == 1


@pytest.mark.usefixtures("baseline")
@pytest.mark.parametrize(
    ("outcome", "code"),
    [(WRONG, 5), (Failed(stage="worker", code="crash", why="segmentation fault"), 4)],
)
def test_a_case_that_fails_now(cli, measured, outcome, code):
    measured.ratios, measured.outcome = [1.0], outcome
    result = cli("check", "--against", "main")
    assert result.exit_code == code
    assert outcome.why in result.stdout


@pytest.mark.usefixtures("baseline")
def test_another_machine_is_an_environment_that_is_not_ready(cli, measured):
    measured.hard = {"device": "cpu", "cpu": "another"}
    result = cli("check", "--against", "main")
    assert result.exit_code == 3
    assert "cpu: test against another" in result.stderr
    assert measured.asked == []


@pytest.mark.usefixtures("baseline")
def test_margin_and_selection(cli, measured):
    measured.ratios = [1.1]
    result = cli("check", "--against", "main", "--threshold", "20%", "-k", "strided", "--sessions", "2", "--json")
    assert result.exit_code == 0
    assert measured.asked == [(["strided"], 2)]
    (cell,) = json.loads(result.stdout)["cells"]
    assert (cell["verdict"]["code"], cell["verdict"]["numbers"]["sessions"]) == ("SAME", 2)


@pytest.mark.usefixtures("baseline")
def test_times_relative_to_a_reference_are_measured_with_it_and_judged_without(cli, measured):
    measured.ratios = [1.0]
    result = cli("check", "--against", "main", "-k", "strided", "--relative-to", "gather", "--json")
    assert measured.asked == [(["strided", "gather"], 3)]
    document = json.loads(result.stdout)
    assert [cell["verdict"]["code"] for cell in document["cells"]] == ["SAME"]
    assert "times are relative to gather in the same rounds, itself 1x its baseline's" in document["warnings"]


@pytest.mark.usefixtures("baseline")
def test_an_unknown_reference_is_refused_before_anything_is_measured(cli, measured):
    result = cli("check", "--against", "main", "--relative-to", "gathr", "--sessions", "2")
    assert (result.exit_code, measured.asked) == (2, [])
    assert "unknown reference 'gathr'; did you mean gather" in result.stderr


@pytest.mark.usefixtures("baseline")
def test_a_record_instead_of_a_measurement(cli, measured, tmp_path, make_row, make_record):
    path = tmp_path / "new.json"
    path.write_text(make_record([make_row("strided", seed=9)], run_id="new").model_dump_json())
    result = cli("check", "--against", "main", "--run", str(path))
    assert result.exit_code == 0
    assert measured.asked == []
    assert "missing: gather" in result.stdout
    assert cli("check", "--against", "main", "--run", str(path), "--fail-on", "inconclusive").exit_code == 7


@pytest.mark.usefixtures("baseline")
def test_a_record_to_judge_and_sessions_to_measure_exclude_each_other(cli, measured):
    result = cli("check", "--against", "main", "--run", "base0", "--sessions", "3")
    assert (result.exit_code, measured.asked) == (2, [])
    assert "--run base0 and --sessions 3 each say what is judged; give one of them" in result.stderr


@pytest.mark.usefixtures("baseline")
def test_a_slower_record_that_cannot_be_confirmed_here_is_undecided(
    cli, measured, monkeypatch, tmp_path, make_row, make_record
):
    """A run of another machine was brought to one without its GPU."""

    def no_gpu(self, *_):
        raise EnvironmentNotReady("device 'cuda' cannot be used")

    monkeypatch.setattr(measured, "here", no_gpu)
    path = tmp_path / "new.json"
    path.write_text(make_record([make_row("strided", ns=2e7)], run_id="new").model_dump_json())
    result = cli("check", "--against", "main", "--run", str(path))
    assert result.exit_code == 0
    assert "cannot be used" in result.stderr
    assert "was not measured again" in result.stdout


def test_below_five_sessions_times_only_advise(cli, measured, make_row, make_record):
    Archive().add(make_record([make_row("strided")], run_id="base"))
    cli("baseline", "save", "main")
    measured.ratios = [3.0]
    result = cli("check", "--against", "main")
    assert result.exit_code == 0
    assert "advisory" in result.stdout
    assert "one session does not show the spread between sessions" in result.stderr
    assert len(measured.asked) == 1


def test_no_baseline_is_ever_made_silently(cli, measured):
    result = cli("check", "--against", "main")
    assert result.exit_code == 2
    assert "`dilabench run quick` makes one, then `dilabench baseline save main` gives it this name" in result.stderr
    assert Archive().names() == []


@pytest.mark.usefixtures("baseline")
def test_a_selection_that_fits_nothing(cli, measured):
    result = cli("check", "--against", "main", "-k", "nonesuch")
    assert result.exit_code == 2
    assert "'nonesuch'" in result.stderr


def test_update_makes_a_baseline_and_adds_only_what_passes(cli, tmp_path, make_row, make_record):
    def record_of(run_id, peak):
        record = make_record([make_row(seed=run_id, peak=peak)], run_id=run_id)
        (tmp_path / f"{run_id}.json").write_text(record.model_dump_json())
        return f"{run_id}.json"

    def sessions():
        return json.loads(cli("baseline", "list", "--json").stdout)["main"]["runs"]

    made = cli("check", "--against", "main", "--run", record_of("a", 2**24), "--update")
    assert made.exit_code == 0, made.output
    assert len(sessions()) == 1
    assert cli("check", "--against", "main", "--run", record_of("b", 2**24), "--update").exit_code == 0
    assert len(sessions()) == 2
    assert cli("check", "--against", "main", "--run", record_of("c", 2**25), "--update").exit_code == 6
    assert len(sessions()) == 2
    for run_id in range(12):
        cli("check", "--against", "main", "--run", record_of(f"d{run_id}", 2**24), "--update")
    assert len(sessions()) == 10
    assert "d11" in sessions()[-1]

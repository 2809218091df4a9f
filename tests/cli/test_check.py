"""`dilabench check`: the gate, with a measurer that answers what the test wants."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import exp

import pytest

from dilabench.cli.compare.deciding import OTHERWISE, longer_run
from dilabench.comparison.across import compare_across
from dilabench.errors import EnvironmentNotReady
from dilabench.record import Failed, Skipped, Verification
from dilabench.runs import against_baseline
from dilabench.runs.against_baseline import SessionBudget
from dilabench.stats.decisions.decide import Policy
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

    `spread`: how far sessions lie below or above every third one, in log units.
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
                        * exp(self.spread * (session % 3 - 1))
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
    [(1.2, 1.0, 0, "3 no change"), (1.2, 1.2, 6, "1 SLOWER"), (0.8, 0.8, 0, "1 FASTER"), (0.8, 1.0, 0, "3 no change")],
)
def test_only_the_second_data_of_a_flagged_case_decide_in_either_direction(cli, measured, first, second, code, word):
    """The whole group is measured again, so that the case has its neighbours; other groups are not."""
    measured.ratios = [first, second]
    result = cli("check", "--against", "main")
    assert result.exit_code == code, result.stdout
    assert measured.asked == [(["gather", "strided", "other"], 3), (["gather", "strided"], 3)]
    assert "measuring 2 of 3 cases in 3 fresh sessions" in result.stderr
    assert "after a second measurement: strided" in result.stdout
    assert word in result.stdout.splitlines()[-1]


@pytest.mark.usefixtures("baseline")
def test_before_measuring_it_says_how_long_that_takes(cli, measured):
    measured.ratios = [1.0]
    said = cli("check", "--against", "main").stderr
    assert "a session of 3 cases takes about 12 s here; the budget of 5.0 min has time for 24\n" in said
    measured.asked.clear()
    short = cli("check", "--against", "main", "--budget", "30s")
    assert "the budget of 30 s has time for 2\n" in short.stderr
    assert [count for _, count in measured.asked] == [1]


@pytest.mark.usefixtures("baseline")
def test_sessions_are_added_while_the_budget_holds_them(cli, measured, monkeypatch):
    """Time passes only while something is measured, 12 s a session. At the end one is kept for a second measurement."""
    clock = partial(SessionBudget, clock=lambda: 12.0 * sum(count for _, count in measured.asked))
    monkeypatch.setattr(against_baseline, "SessionBudget", clock)
    measured.ratios, measured.spread = [1.0] * 9, 0.2
    result = cli("check", "--against", "main", "--budget", "61s", "--fail-on", "undecided")
    assert result.exit_code == 7, result.stdout
    assert [count for _, count in measured.asked] == [3, 1]
    to_decide, verdict = result.stdout.splitlines()[-2:]
    assert to_decide.startswith("to decide: ")
    assert verdict == "verdict: UNDECIDED (3 undecided; exit code 7)"


def test_the_budget_that_should_decide_is_named(make_row, make_record):
    sides = [make_record([make_row()], run_id="a")], [make_record([make_row(ns=1.1e7)], run_id="b")]
    found = compare_across(*sides, policy=Policy.for_device("cpu"))
    (pair,) = found.pairs
    numbers = replace(pair.verdict.numbers, sessions_needed=8)
    found = replace(found, pairs=(replace(pair, verdict=replace(pair.verdict, numbers=numbers)),))
    budget = SessionBudget([make_row().planned], 30.0, took_s={pair.candidate.case_id: 12.0})
    # Eight sessions, and six for a change that may show.
    assert budget.sufficient(found) == "--budget 170s"
    assert budget.sufficient(replace(found, pairs=())) is None


@pytest.mark.usefixtures("baseline")
@pytest.mark.parametrize(
    ("spread", "purpose", "verdict"), [(0.09, "to exclude smaller changes", "ok"), (0.2, "to decide", "UNDECIDED")]
)
def test_sessions_that_lie_too_far_apart_for_the_baseline_need_a_larger_one(
    cli, measured, monkeypatch, spread, purpose, verdict
):
    clock = partial(SessionBudget, clock=lambda: 12.0 * sum(count for _, count in measured.asked))
    monkeypatch.setattr(against_baseline, "SessionBudget", clock)
    measured.ratios, measured.spread = [1.0] * 9, spread
    result = cli("check", "--against", "main")
    assert [count for _, count in measured.asked] == [3, 3, 6, 10]
    to_decide = " ".join(result.stdout.split())
    assert re.search(
        purpose + r": .*--sessions \d+ -o more-sessions` \(about [\d.]+ min\), then `dilabench baseline save main "
        rf"more-sessions/\* --add` verdict: {verdict} \(",
        to_decide,
    )


@pytest.mark.parametrize("details", [(), ("--details",)])
def test_rows_that_never_had_a_time_are_counted(cli, make_row, make_record, details):
    late = Skipped(code="budget", why="budget of 55 s used up before its turn")
    rows = [make_row(), make_row("gather", outcome=late), make_row("fused", outcome=late)]
    for run_id, part in (("base", rows), ("new", rows[:1])):
        Archive().add(make_record(part, run_id=run_id))
    text = " ".join(cli("compare", "base", "new", *details).stdout.split())
    assert ("not compared: 2 rows without a time in the baseline; --details says why" in text) == (not details)
    assert ("before its turn" in text) == bool(details)


@pytest.mark.parametrize("given", [(), ("-o", "old"), ("--output", "old", "--sessions", "5"), ("--output=old",)])
@pytest.mark.parametrize(("needed", "rest"), [((8, 4), ""), ((8, None), ", for 1 of 2 rows")])
def test_the_run_that_decides_has_its_own_folder_and_sessions(make_row, make_record, given, needed, rest):
    argv = ("run", "quick", *given, "--lengths", "1K")
    record = make_record([make_row()], run_id="a").model_copy(update={"argv": argv})
    found = compare_across([record], [make_record([make_row(ns=1.1e7)], run_id="b")], policy=Policy.for_device("cpu"))
    (pair,) = found.pairs
    assert pair.verdict.undecided
    pairs = [
        replace(pair, verdict=replace(pair.verdict, numbers=replace(pair.verdict.numbers, both_needed=sessions)))
        for sessions in needed
    ]
    run = "`dilabench run quick --lengths 1K --sessions 8 -o more-sessions`"
    command, *others = longer_run(record, pairs, "SAVE")
    assert command == f"{run}, then `SAVE`{rest}"
    assert others == ([f"for the other 1: {OTHERWISE}"] if rest else [])
    script = record.model_copy(update={"argv": ("notebook.py",)})
    assert longer_run(script, pairs, "SAVE") == []


@pytest.mark.usefixtures("baseline")
@pytest.mark.parametrize(
    ("against", "command"), [("base0", "more base0 more-sessions/*"), ("latest", "more base5 more-sessions/*")]
)
def test_against_a_run_the_sessions_that_decide_make_a_baseline_with_it(cli, measured, against, command):
    """A run's id, its file or `latest` is no name of a baseline."""
    measured.ratios, measured.spread = [1.0], 0.2
    shown = cli("check", "--against", against, "--sessions", "3").stdout
    assert f"then `dilabench baseline save {command}`" in " ".join(shown.split())


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
    assert any("relative to gather in the same rounds, which itself took" in text for text in document["warnings"])


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
    assert cli("check", "--against", "main", "--run", str(path), "--fail-on", "undecided").exit_code == 7


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


@pytest.mark.parametrize(
    ("ratio", "code", "counts"), [(3.0, 6, [3, 3]), (1.5, 6, [3, 3]), (1.25, 6, [3, 3]), (1.0, 0, [3, 3])]
)
def test_one_stored_session_is_enough(cli, measured, make_row, make_record, ratio, code, counts):
    """Three new ones find a large change; six show how far sessions spread here, and so that nothing changed."""
    Archive().add(make_record([make_row("strided")], run_id="base"))
    cli("baseline", "save", "main")
    measured.ratios, measured.spread = [ratio] * 2, 0.01
    result = cli("check", "--against", "main")
    assert (result.exit_code, [count for _, count in measured.asked]) == (code, counts)
    assert (result.stdout.splitlines()[-1] == "verdict: ok (1 no change; exit code 0)") is (ratio == 1.0)


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

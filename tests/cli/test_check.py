"""`dilabench check`: the gate, with a measurer that answers what the test wants."""

import json
from collections.abc import Sequence

import pytest

from dilabench.cli.compare import remeasure
from dilabench.errors import EnvironmentNotReady
from dilabench.record import Failed, Verification
from dilabench.store.archive import Archive

WRONG = Failed(stage="verify", code="wrong_output", why="out differs", verification=Verification(checks=()))
LEVELS = (0.997, 1.002, 1.0, 0.999, 1.003, 1.001)


@pytest.fixture
def baseline(cli, make_row, make_record):
    """Six sessions of two cases of one cell, named main."""
    archive = Archive()
    for index, level in enumerate(LEVELS):
        rows = [make_row(name, seed=index, ns=1e7 * level, position=i) for i, name in enumerate(("gather", "strided"))]
        archive.add(make_record([*rows, make_row("other", seq_len=7, seed=index)], run_id=f"base{index}"))
    assert cli("baseline", "save", "main", *(f"base{index}" for index in range(6))).exit_code == 0


@pytest.fixture
def measured(monkeypatch, make_row, make_record):
    """Stands in for the engine: the n-th measurement finds `strided` slower by the n-th ratio. Keeps what was asked."""

    class Measurer:
        ratios: Sequence[float] = ()
        hard = None
        outcome = None
        asked: list = []  # noqa: RUF012

        def __init__(self, found, like, output, store):
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
                        seq_len=one.case.workload.seq_len,
                        ns=1e7 * (ratio if one.case.implementation == "strided" else 1.0),
                        outcome=self.outcome if one.case.implementation == "strided" else None,
                    )
                    for one in planned
                ]
                records.append(make_record(rows, run_id=f"new{len(self.asked)}{session}", hard=self.hard))
            return records

    Measurer.asked = []
    monkeypatch.setattr(remeasure, "Remeasure", Measurer)
    return Measurer


@pytest.mark.usefixtures("baseline")
def test_the_same_code_passes_without_a_second_look(cli, measured):
    measured.ratios = [1.0]
    result = cli("check", "--against", "main")
    assert result.exit_code == 0, result.stdout
    assert measured.asked == [(["gather", "strided", "other"], 1)]
    assert result.stdout.splitlines()[-1].startswith("verdict: ok")


@pytest.mark.usefixtures("baseline")
@pytest.mark.parametrize(("second", "code"), [(1.0, 0), (1.2, 6)])
def test_only_the_second_data_of_a_flagged_cell_decide(cli, measured, second, code):
    """The whole cell is measured again, so that the case has its neighbours; other cells are not."""
    measured.ratios = [1.2, second]
    result = cli("check", "--against", "main")
    assert result.exit_code == code, result.stdout
    assert measured.asked == [(["gather", "strided", "other"], 1), (["gather", "strided"], 3)]
    assert "hold slower cases" in result.stderr
    assert "first look: " in result.stdout


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
    assert "--run base0 is judged instead of 3 sessions measured now; leave one of them out" in result.stderr


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
    assert len(measured.asked) == 1


def test_no_baseline_is_ever_made_silently(cli, measured):
    result = cli("check", "--against", "main")
    assert result.exit_code == 2
    assert "'main' is neither a file, nor a baseline" in result.stderr
    assert Archive().names() == []


@pytest.mark.usefixtures("baseline")
def test_a_selection_that_fits_nothing(cli, measured):
    result = cli("check", "--against", "main", "-k", "nonesuch")
    assert result.exit_code == 2
    assert "'nonesuch'" in result.stderr

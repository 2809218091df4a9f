"""`dilabench history`."""

import json
import re

import pytest

from dilabench.record import Failed, GitInfo, Skipped
from dilabench.stats.decisions.steps import steps
from dilabench.store.archive import Archive


@pytest.fixture
def runs(make_row, make_record):
    """A month in which the tenth day brought 20 %, a failure, and two days on another machine."""
    archive = Archive()
    for day in range(1, 21):
        row = make_row("strided", seed=day, ns=1e7 if day < 10 else 1.2e7)
        if day == 15:
            row = make_row("strided", outcome=Failed(stage="time", code="crash", why="killed by SIGSEGV"))
        hard = {"device": "cpu", "cpu": "slow one"} if day in (4, 5) else None
        date = f"2026-01-{day:02}T00:00:00+00:00"
        archive.add(make_record([row, make_row("gather", ns=1e7)], run_id=f"day{day}", started_at=date, hard=hard))
    return archive


@pytest.mark.usefixtures("runs")
def test_runs(cli):
    result = cli("history", "--limit", "3")
    assert [line.split()[2] for line in result.stdout.splitlines()[2:]] == ["day18", "day19", "day20"]
    assert len(json.loads(cli("history", "--json", "--limit", "99").stdout)) == 20


@pytest.mark.parametrize(
    ("code", "length", "status"),
    [
        ("budget", 4096, "incomplete"),
        ("budget", None, "complete"),
        ("unsupported", 4096, "incomplete"),
        ("unsupported", None, "complete"),
    ],
)
def test_a_run_that_lacks_rows_is_incomplete(cli, make_row, make_record, code, length, status):
    fields = {"seq_len": length} if length else {}
    rows = [make_row("strided"), make_row("gather", outcome=Skipped(code=code, why="late"), **fields)]
    Archive().add(make_record(rows, run_id="part"))
    (run,) = json.loads(cli("history", "--json").stdout)
    assert (run["status"], run["measured"], run["rows"]) == (status, 1, 2)


@pytest.mark.usefixtures("runs")
def test_trend_with_its_step(cli):
    result = cli("history", "strided fp32")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    (step,) = [line for line in lines if "<- step" in line]
    assert "day10" in step
    assert "20" in step.split("step:")[1]
    assert "slower" in step
    assert any("failed: killed by SIGSEGV" in line for line in lines)
    assert sum("[case" in line for line in lines) == 2
    assert len(set(re.findall("machine ([0-9a-f]+)", result.stdout))) == 2


@pytest.mark.usefixtures("runs")
def test_the_newest_of_a_trend_with_a_step_that_older_ones_tell(cli):
    shown = cli("history", "strided", "fp32", "--limit", "11").stdout.split("[case")[1].splitlines()
    days = {line.split()[2]: line for line in shown if line.startswith("2026")}
    assert list(days) == [f"day{day}" for day in range(10, 21)]
    assert "<- step" in days["day10"]
    groups = json.loads(cli("history", "strided", "--json", "--limit", "3").stdout)
    assert sorted(len(group["cells"]) for group in groups) == [2, 3]


def test_another_timer_is_no_step(cli, make_row, make_record):
    for day in range(1, 17):
        row = make_row(seed=day, **({"timer": "hot", "ns": 5e6} if day % 8 > 3 else {}))
        Archive().add(make_record([row], run_id=f"day{day}", started_at=f"2026-01-{day:02}T00:00:00+00:00"))
    shown = cli("history", "strided").stdout
    assert "machine" not in shown, "one machine needs no name"
    assert shown.count("hot") == shown.count("wall") == 8
    assert "<- step" not in shown


@pytest.mark.usefixtures("runs")
def test_json(cli):
    groups = json.loads(cli("history", "strided", "--json").stdout)
    assert sorted(len(group["cells"]) for group in groups) == [2, 18]
    (steps,) = [group["steps"] for group in groups if len(group["cells"]) == 18]
    (step,) = steps.values()
    assert step["after_ns"] / step["before_ns"] == pytest.approx(1.2, rel=0.01)


def test_reindex_and_an_unreadable_index(cli, runs):
    index = runs.root / "history.sqlite"
    first = cli("history").stdout
    index.write_bytes(b"garbage that is long enough" * 100)
    again = cli("history")
    assert again.stdout == first
    assert "unreadable" in again.stderr
    assert cli("history", "--reindex").stdout == first


def test_a_cut_off_run_file(cli, runs):
    path = runs.folder / runs.names()[0]
    path.write_bytes(path.read_bytes()[:200])
    result = cli("history")
    assert result.exit_code == 0
    assert f"{path.name}' is damaged" in result.stderr


def test_no_store_and_no_such_case(cli):
    assert "no runs in" in cli("history").stdout
    result = cli("history", "nonesuch")
    assert result.exit_code == 2
    assert "'nonesuch'" in result.stderr
    assert "no run with a measured case is stored here" in cli("history", "-f", "html").stderr


@pytest.mark.usefixtures("runs")
def test_the_page_begins_with_the_steps(cli, tmp_path):
    result = cli("history", "-i", "strided", "-f", "html", "-o", "out")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "history.html").read_text()
    banner = text.split('id="steps"')[1].split("</section>")[0]
    assert "day10" in banner
    assert "slower" in banner
    # Two machines, so two trends; levels before and after the step are curves of their own.
    assert text.count('class="chart" data-plot=') in (0, 2)
    plots = json.loads(text.split('id="data">')[1].split("</script>")[0])["plots"]
    assert sorted(len(plot["curves"]) for plot in plots.values()) == [1, 2]
    assert "gather" not in banner


@pytest.mark.usefixtures("runs")
def test_one_implementation_by_its_name(cli):
    assert "gather" not in cli("history", "-i", "strided").stdout
    assert cli("history", "-i", "stride").exit_code == 2
    assert cli("history", "-i", "improved").stdout == cli("history", "-i", "strided").stdout


def test_texts_of_a_record_are_no_html(cli, make_row, make_record, tmp_path):
    for commit in ("<b>", "plain"):
        git = {"sha": commit, "dirty": False}
        record = make_record([make_row("strided")], run_id=commit.strip("<>"))
        environment = record.environment.model_copy(update={"git": GitInfo(**git)})
        Archive().add(record.model_copy(update={"environment": environment}))
    assert cli("history", "-f", "html", "-o", "page.html").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    assert "<td>&lt;b&gt;</td>" in text
    assert "<td>plain</td>" in text


def test_the_history_of_one_run_draws_nothing(cli, make_row, make_record, tmp_path):
    Archive().add(make_record([make_row("strided")]))
    assert cli("history", "-f", "html", "-o", "page.html").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    assert "strided" in text
    assert json.loads(text.split('id="data">')[1].split("</script>")[0])["plots"] == {}


def test_cases_of_one_run_follow_those_that_can_be_compared(cli, make_row, make_record, tmp_path):
    for run_id, names in (("a", ("gather", "strided")), ("b", ("strided",))):
        rows = [make_row(name, position=place) for place, name in enumerate(names)]
        Archive().add(make_record(rows, run_id=run_id))
    assert cli("history", "-f", "html", "-o", "page.html").exit_code == 0
    cases = (tmp_path / "page.html").read_text().split('<h2 id="cases">')[1]
    assert cases.index("strided") < cases.index("<summary>1 case with fewer than two times") < cases.index("gather")


@pytest.mark.parametrize(("runs", "verdict"), [(1, "1 run"), (2, "2 runs"), (3, "3 runs"), (4, None), (6, None)])
def test_a_history_too_short_for_steps_says_so_and_is_not_green(cli, make_row, make_record, tmp_path, runs, verdict):
    for day in range(1, runs + 1):
        Archive().add(make_record([make_row()], run_id=f"run{day}", started_at=f"2026-01-{day:02d}T00:00:00+00:00"))
    assert cli("history", "-f", "html", "-o", "page.html").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    banner = text[text.index('<section class="banner') : text.index("</section>")]
    if verdict:
        assert f"{verdict}: too few for steps." in banner
    else:
        assert "No step in the times of 1 case." in banner
    assert ('class="banner "' in banner) == (verdict is None)
    folded = text.index("<details>")
    assert (f" in {runs} runs</p>" in text[:folded]) == (runs > 1)
    assert "in the newest run" in text[:folded]
    assert folded < text.index(", machine "), "ids are for those who open the runs"
    assert len(steps([float(2**point) for point in range(runs)])) == 0 or verdict is None

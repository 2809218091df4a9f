"""`report` of several runs: what it shows, and what it refuses."""

import json
import shlex
from pathlib import Path

import pytest

from dilabench.record import Verification
from dilabench.report.leaderboard import leaderboard
from dilabench.store.run_files import read_record


def test_several_runs_are_ranked_and_it_refuses_what_was_edited_and_says_when_nothing_is_left(
    cli, make_row, make_record, tmp_path
):
    row = make_row("strided")
    unproven = row.model_copy(
        update={"outcome": row.outcome.model_copy(update={"verification": Verification(checks=())})}
    )
    records = {"good": make_record([row]), "edited": make_record([unproven], "bbbb"), "none": make_record([], "cccc")}
    records["empty"] = make_record([], "dddd")
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_text(record.model_dump_json())
    good, edited, none, empty = (str(tmp_path / f"{name}.json") for name in records)
    shown = cli("report", good, none)
    assert shown.exit_code == 0
    assert "strided over math" in shown.stdout
    assert json.loads(cli("report", good, none, "--json").stdout)["boards"][0]["family"] == "dense, causal"
    refused = cli("report", good, edited)
    assert refused.exit_code == 2
    assert "has a time but no passed verification" in refused.stderr
    assert "are the same run, aaaa; name it once" in " ".join(cli("report", good, good).stderr.split())
    assert cli("report", none, empty).exit_code == 8
    assert cli("report", good, none, "-f", "html", "-o", str(tmp_path)).exit_code == 0
    assert "strided over math" in (tmp_path / "leaderboard.html").read_text()


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.json.xz"))[::7])
def test_every_command_on_a_board_can_be_run(path, cli):
    """As far as it can be known without the device."""
    found = leaderboard([read_record(path)])
    commands = {entry.command for board in found.boards for contest in board.contests for entry in contest.entries}
    for command in sorted(filter(None, commands))[:5]:
        words = shlex.split(command.replace("--device cuda", "--device cpu"))
        assert words.pop(0) == "dilabench"
        done = cli(*words, "--dry-run")
        assert done.exit_code == 0, (command, done.output)

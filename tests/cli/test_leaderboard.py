"""`leaderboard`: what it shows, and what it refuses."""

import json

from dilabench.record import Verification


def test_the_command_refuses_what_was_edited_and_says_when_nothing_is_left(cli, make_row, make_record, tmp_path):
    row = make_row("strided")
    unproven = row.model_copy(
        update={"outcome": row.outcome.model_copy(update={"verification": Verification(checks=())})}
    )
    records = {"good": make_record([row]), "edited": make_record([unproven], "bbbb"), "none": make_record([], "cccc")}
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_text(record.model_dump_json())
    good, edited, none = (str(tmp_path / f"{name}.json") for name in records)
    shown = cli("leaderboard", good, none)
    assert shown.exit_code == 0
    assert "strided over math" in shown.stdout
    assert json.loads(cli("leaderboard", good, "--json").stdout)["boards"][0]["family"] == "dense, causal"
    refused = cli("leaderboard", good, edited)
    assert refused.exit_code == 2
    assert "has a time but no passed verification" in refused.stderr
    assert "are the same run, aaaa; name it once" in " ".join(cli("leaderboard", good, good).stderr.split())
    assert cli("leaderboard", none).exit_code == 8
    assert cli("leaderboard", good, "-f", "html", "-o", str(tmp_path)).exit_code == 0
    assert "strided over math" in (tmp_path / "leaderboard.html").read_text()

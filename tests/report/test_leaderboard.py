"""Leaderboards: places by the rule of `compare`, one board per device and family, and how each row is repeated."""

from dilabench.report.leaderboard import BOARD_COLUMNS, leaderboard, to_html

GPUS = {"gpus": ({"name": "H200", "compute_capability": "9.0"},) * 2}


def on_h200(record):
    environment = record.environment.model_validate({**record.environment.model_dump(), **GPUS})
    return record.model_copy(update={"environment": environment, "device": "cuda:0"})


def places(board):
    return [(one.place_text, one.name) for contest in board.contests for one in contest.entries]


def test_rows_share_a_place_where_nothing_is_proven(make_row, make_record):
    # The yardstick is not ranked.
    rows = [
        make_row("gather", ns=2e7),
        make_row("strided", ns=1e7, position=1),
        make_row("fused", ns=1e7, position=2),
        make_row("dense", ns=1e6, role="yardstick", position=3),
    ]
    (board,) = leaderboard([make_record(rows)]).boards
    assert {name for place, name in places(board) if place == "1 ="} == {"strided over math", "fused over math"}
    assert places(board)[2] == ("3", "gather over math")
    assert 1.8 < board.contests[0].entries[2].behind < 2.2
    (unproven,) = leaderboard([make_record([make_row("gather", rounds=2), make_row("strided", rounds=2)])]).boards
    assert [place for place, _ in places(unproven)] == ["1 ?", "1 ?"]


def test_an_unopposed_row_has_no_place(make_row, make_record):
    (board,) = leaderboard([make_record([make_row("gather"), make_row("strided", seq_len=64)])]).boards
    shown = {column.name: [column.value_text(line) for line in board.lines] for column in BOARD_COLUMNS}
    assert (shown["place"], shown["behind"]) == (["alone"] * 2, ["–"] * 2)


def test_boards_are_those_of_devices_and_families_and_runs_keep_their_places(make_row, make_record):
    first = make_record([make_row("gather"), make_row("gather", seq_len=64), make_row("gather", causal=False)], "old")
    later = make_record([make_row("strided", ns=1e6)], "new", started_at="2026-02-02T00:00:00+00:00")
    found = leaderboard([first, later, on_h200(make_record([make_row("fused")], "gpu"))])
    assert [(board.device, board.family) for board in found.boards] == [
        ("test (2 threads)", "dense, causal"),
        ("test (2 threads)", "dense, not causal"),
        ("H200", "dense, causal"),
    ], "that of the newest run first"
    ran, older = (
        [(contest.workload, contest.run_id) for contest in contests]
        for contests in (found.boards[0].contests, found.boards[0].older)
    )
    assert ran == [("1x64 H2 D24 fp32 causal · forward", "old"), ("1x96 H2 D24 fp32 causal · forward", "new")]
    assert older == [("1x96 H2 D24 fp32 causal · forward", "old")]
    text = to_html(found)
    assert text.index("1 older result of these workloads") < text.rindex('<td data-name="run" class="named">old</td>')
    assert [one.run_id for one in found.runs] == ["new", "old", "gpu"]


def test_the_page_says_how_to_repeat_each_row(make_row, make_record):
    record = make_record([make_row("strided")], argv=("run", "quick", "--budget", "<1m>"))
    text = to_html(leaderboard([record]))
    assert "dilabench run quick --budget &#39;&lt;1m&gt;&#39;" in text
    assert "dilabench 0 · commit " in text
    assert 'href="#run-aaaa"' in text


def test_an_implementation_that_was_removed_has_no_place_and_a_plugins_has(make_row, make_record):
    rows = [
        make_row("gather", ns=3e7),
        make_row("block-sparse-flex", ns=1e7, position=1),
        make_row("theirs", ns=2e7, position=2),
    ]
    theirs = rows[2].planned.model_copy(update={"source": "their-attention 1.0"})
    rows[2] = rows[2].model_copy(update={"planned": theirs})
    found = leaderboard([make_record(rows)])
    assert places(found.boards[0]) == [("1", "theirs over math"), ("2", "gather over math")]
    assert found.boards[0].contests[0].entries[0].behind == 1
    assert not leaderboard([make_record([make_row("block-sparse-flex")])]).boards

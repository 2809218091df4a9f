import json
from pathlib import Path

import pytest

from dilabench.metadata import ABOVE_PEAK_FLOPS, LAUNCH_BOUND
from dilabench.plugins.manager import discover
from dilabench.record import Check, GpuInfo, Measured, Note, Row, RunRecord, Skipped
from dilabench.report.columns import row_name
from dilabench.report.content import environment_rows, headline, note_groups, reproduce_command, time_spent, unmeasured
from dilabench.report.findings import render
from dilabench.store.run_files import read_record

GOLDEN = Path(__file__).parents[1] / "golden" / "run_record.v1.json"


@pytest.fixture
def record() -> RunRecord:
    return read_record(GOLDEN)


def test_headline_counts_every_row_once(record: RunRecord) -> None:
    text = headline(record)
    assert "17 of 21 rows verified and measured, 3 more could not run, 4 FAILED (3 did not pass verification)." in text
    assert "The run was interrupted" in text


def test_failures_come_first_and_equal_reasons_are_gathered(record: RunRecord) -> None:
    assert [(entry.status, entry.stage, entry.rows) for entry in unmeasured(record)] == [
        ("failed", "verify", "shifted over sdpa-flash (1x1K, 1x4K, 1x16K H8 D64 fp32 causal)"),
        ("failed", "time", "strided over math (2x1536 H10/5 D80 bf16 causal window 512,0)"),
        ("skipped", None, "fused (1x1K, 1x4K, 1x16K H8 D64 fp32 causal)"),
    ]


def test_rows_of_several_implementations_share_a_reason(record: RunRecord) -> None:
    skipped = Skipped(code="budget", why="the budget is used up")
    rows = [row.model_copy(update={"outcome": skipped}) for row in record.rows[:2]]
    (entry,) = unmeasured(record.model_copy(update={"rows": tuple(rows)}))
    label = "1x1K H8 D64 fp32 causal"
    assert entry.rows == f"gather over sdpa-flash ({label}), strided over sdpa-flash ({label})"


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (Check(name="out", passed=False), "out: failed"),
        (Check(name="out", passed=False, error=0.25, tolerance=1e-6), "out: error 0.25, allowed 1e-06"),
        (Check(name="dq", passed=False, where="b=0 n=3", detail="NaN"), "dq: NaN; at b=0 n=3"),
    ],
)
def test_check_text_says_how_far_and_where(check: Check, text: str) -> None:
    assert check.text == text


def test_a_note_alone_names_the_row_the_figure_the_limit_and_the_way_out(record: RunRecord) -> None:
    (group,) = note_groups(record)
    assert group.brief == (
        "strided +pool 1G over math, 1x16K H8 D64 fp32 causal: the budget ended the row early"
        " (seen 5, limit 20); give --budget 2m"
    )


def test_notes_of_one_kind_are_counted_and_severe_ones_come_first(record: RunRecord) -> None:
    def noted(row: Row, *notes: Note) -> Row:
        assert isinstance(row.outcome, Measured)
        return row.model_copy(update={"outcome": row.outcome.model_copy(update={"notes": notes})})

    measured = [row for row in record.rows if isinstance(row.outcome, Measured)][:3]
    late = [LAUNCH_BOUND.note("late", observed=1e3 * micros, threshold=2e3, hint="try a graph") for micros in (5, 7)]
    rows = [noted(measured[0], late[0]), noted(measured[1], late[1]), noted(measured[2], ABOVE_PEAK_FLOPS.note("much"))]
    groups = note_groups(record.model_copy(update={"rows": tuple(rows)}))
    assert [(group.meaning, group.severe, group.count) for group in groups] == [
        (ABOVE_PEAK_FLOPS.meaning, True, 1),
        (LAUNCH_BOUND.meaning, False, 2),
    ]
    ((head, *lines),) = groups[1].texts
    assert groups[1].brief == head == "2 rows: late; try a graph"
    names = [f"{row_name(row)} (host {micros} µs, GPU 2 µs)" for row, micros in zip(rows, ("5", "7"), strict=False)]
    assert [", ".join(line.partition(": ")[2] for line in lines)] == [", ".join(names)]

    rows[1] = noted(measured[1], LAUNCH_BOUND.note("later", hint="try a graph"))
    _, differing = note_groups(record.model_copy(update={"rows": tuple(rows)}))
    assert differing.brief == f"2 rows: {LAUNCH_BOUND.meaning}; try a graph"


def test_environment_shows_gpus_only_where_there_are_some(record: RunRecord) -> None:
    assert "GPU" not in dict(environment_rows(record))
    gpu = GpuInfo(name="Example GPU", memory_bytes=2**37, driver="570.1")
    environment = record.environment.model_copy(update={"gpus": (gpu, gpu)})
    with_gpus = record.model_copy(update={"environment": environment, "device": "cuda"})
    rows = environment_rows(with_gpus)
    assert [value for what, value in rows if what == "GPU"] == ["Example GPU, 128.0 GiB"] * 2
    assert headline(with_gpus).startswith("Suite quick on 2 x Example GPU: ")


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (("/usr/bin/dilabench", "run", "quick", "--set", "a=1 2"), "dilabench run quick --set 'a=1 2'"),
        (("/x/dilabench/__main__.py", "run", "quick"), "dilabench run quick"),
        (("run", "quick"), "dilabench run quick"),
        ((), "dilabench run quick --seed 7"),
        (
            ("/tmp/out", "--budget", "200s", "a\nrm b"),
            "# no command repeats this run: a script made it, with the arguments /tmp/out --budget 200s 'a rm b'",
        ),
        (
            ("/usr/bin/dilabench",),
            "# no command repeats this run: a script made it, with the arguments /usr/bin/dilabench",
        ),
        (
            ("run", "quick", "-i", "flex,natten"),
            "dilabench run quick -i flex,natten\n"
            "# implementation 'natten' was removed: it never ran against the real library; "
            "use NATTEN itself, or block-sparse with pattern=window_sink",
        ),
    ],
)
def test_reproduce_command(record: RunRecord, argv: tuple[str, ...], command: str) -> None:
    assert reproduce_command(record.model_copy(update={"argv": argv})) == command


@pytest.mark.parametrize("reporter", ["table", "markdown", "html", "json"])
@pytest.mark.parametrize("has_built_in", [True, False])
def test_a_row_of_a_plug_in_says_where_it_comes_from(make_row, make_record, reporter, has_built_in):
    theirs = [make_row("sleepy", role="plain", position=0), make_row("quick", position=1)]
    rows = [
        one.model_copy(update={"planned": one.planned.model_copy(update={"source": "sleepy-bench 1.0"})})
        for one in theirs
    ]
    record = make_record(rows + [make_row("gather", role="plain", position=2)] * has_built_in)
    catalogue = discover().catalogue
    text = render(catalogue.reporters.get(reporter), record, None, (), catalogue)
    if reporter == "json":
        sources = [row["planned"].get("source") for row in json.loads(text)["rows"]]
        assert sources == ["sleepy-bench 1.0"] * 2 + [None] * has_built_in
        return
    words = " ".join(text.split())
    assert "sleepy (sleepy-bench 1.0)" in words
    assert "gather (" not in words
    assert ("refer to sleepy over math of sleepy-bench 1.0" in words) is not has_built_in


def test_the_time_of_a_run_is_summed_by_stage_the_longest_first(make_record, make_row):
    rows = []
    for wall_ns in ({"verify": 2_000_000_000, "time": 1_000_000_000}, {"time": 3_000_000_000, "of_a_plugin": 7}):
        row = make_row("gather")
        rows.append(row.model_copy(update={"outcome": row.outcome.model_copy(update={"wall_ns": wall_ns})}))
    moments = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:08Z"}
    record = make_record(rows).model_copy(update=moments)
    expected = "timing 4 s, verification 2 s, of_a_plugin 7 ns, everything else 2 s of 8 s"
    assert time_spent(record) == dict(environment_rows(record))["time spent"] == expected
    assert time_spent(make_record([make_row("gather")])) is None

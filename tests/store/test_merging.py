"""Shards become one record; what is no set of shards is refused with the reason."""

import pytest

from dilabench.errors import ConfigError
from dilabench.metadata import ABOVE_PEAK_FLOPS, matmul_key
from dilabench.record import Failed, RunHeader, Skipped, Verification
from dilabench.store.merging import merged
from dilabench.store.run_files import RunFolder, read_record, refuse_other_rows


@pytest.fixture
def shard(make_row, make_record):
    """The k-th of n shards: two implementations on its share of six lengths, dealt back and forth."""

    def made(index, count=2, **more):
        dealt = [*range(1, count + 1), *range(count, 0, -1)]
        lengths = [32 * length for length in range(1, 7) if dealt[(length - 1) % (2 * count)] == index]
        rows = [make_row(name, seq_len=length) for length in lengths for name in ("gather", "strided")]
        config = {"suite": "quick", "shard": [index, count], **more.pop("config", {})}
        return make_record(rows, f"run{index}", config=config, **more)

    return made


def test_shards_are_joined_in_the_order_planned(shard):
    a, b = shard(1, started_at="2026-01-02T03:04:05+00:00"), shard(2, started_at="2026-01-01T00:00:00+00:00")
    record = merged([b, a], ["b", "a"])
    assert [row.case.workload.seq_len for row in record.rows] == [
        length for n in range(1, 7) for length in (n * 32,) * 2
    ]
    assert all(row in a.rows or row in b.rows for row in record.rows)
    assert record.config == {"suite": "quick"}
    assert record.argv == ("merge", "run1", "run2")
    assert record.started_at == b.started_at
    assert merged([a, b], ["a", "b"]).run_id == record.run_id != a.run_id


def changed(record, **fields):
    return record.model_copy(update=fields)


def test_shards_that_overlap_or_miss_are_refused(shard):
    first, second = shard(1), shard(2)
    for records, why in (
        ([first, changed(first, run_id="again")], "0 and 1 are both shard 1/2; leave one of them out"),
        ([shard(1, 4), shard(4, 4)], r"shards 2 and 3 of 4 are missing: run it with --shard 2/4, then merge all"),
        ([first], "shard 2 of 2 is missing: run it with --shard 2/2, then merge all"),
        ([first, shard(2, 3)], "these are shards of 2 and 3; merge shards of the same number"),
        ([first, changed(second, config={"suite": "quick"})], "1 is no shard .* ranks several runs together"),
        ([changed(first, config={}), changed(second, config={})], "0 is no shard"),
        ([first, shard(2, config={"lengths": [1]})], "0 and 1 are shards of different requests"),
        ([changed(first, config={"suite": "quick"})], "one run is given"),
        ([first, first], "0 and 1 are the same run, run1; name it once"),
        ([first, changed(second, config={"suite": "quick", "shard": [3, "x"]})], "shard"),
        ([first, changed(second, status="interrupted")], "run 1 did not end .* --resume 1`, then merge"),
    ):
        with pytest.raises(ConfigError, match=why):
            merged(records, [str(index) for index in range(len(records))])


def test_shards_that_were_not_measured_alike_are_refused(shard, make_row, make_record):
    a, b = shard(1), shard(2)
    same_workload = make_record([make_row("flex", seq_len=32)], "c", config=b.config)
    for records, why in (
        ([a, changed(b, tool_version="9")], "not measured alike: dilabench: 0 against 9"),
        ([a, shard(2, hard={"device": "cpu", "cpu": "other"})], "not measured alike: cpu: test against other"),
        ([a, same_workload], "1x32 H2 D24 fp32 causal is in 0 and in 1; only interleaved rows are compared"),
    ):
        with pytest.raises(ConfigError, match=why):
            merged(records, ["0", "1"])


@pytest.fixture
def halves(make_row, make_record):
    """The two shards of a request: one row of 64 tokens with the given outcome, one row of 32."""

    def made(ceilings=None, **row):
        config = {"suite": "quick"}
        first = make_record(
            [make_row(seq_len=64, **row)], "a", config={**config, "shard": [1, 2]}, ceilings=ceilings or {}
        )
        return first, make_record([make_row(seq_len=32)], "b", config={**config, "shard": [2, 2]})

    return made


def test_a_time_without_proof_is_refused(halves, make_row):
    unproven = make_row(seq_len=64).outcome.model_copy(update={"verification": Verification(checks=())})
    with pytest.raises(ConfigError, match="strided on 1x64 H2 D24 fp32 causal has a time but no passed verification"):
        merged(halves(outcome=unproven), ["a", "b"])
    quick, other = halves(ns=10, ceilings={matmul_key("float32"): 1e9})
    with pytest.raises(
        ConfigError, match=r"is more than this device can do .* and no note says so; the record was edited"
    ):
        merged([quick, other], ["a", "b"])
    noted = quick.rows[0].outcome.model_copy(update={"notes": (ABOVE_PEAK_FLOPS.note("it is"),)})
    honest = changed(quick, rows=(quick.rows[0].model_copy(update={"outcome": noted}),))
    assert len(merged([honest, other], ["a", "b"]).rows) == 2


@pytest.mark.parametrize(
    "slot", [{"samples_ns": (9, 0)}, {"samples_ns": (9, -1)}, {"rank_samples_ns": ((9, 9), (9, 0))}]
)
def test_a_time_that_no_call_takes_is_refused(make_row, make_record, slot):
    row = make_row(seq_len=64)
    timing = row.outcome.timings[0]
    slots = tuple(other.model_copy(update=slot) for other in timing.slots)
    outcome = row.outcome.model_copy(update={"timings": (timing.model_copy(update={"slots": slots}),)})
    record = make_record([row.model_copy(update={"outcome": outcome})], "a")
    with pytest.raises(ConfigError, match=r"has a sample of (0|-1) ns, which no call takes; the record was edited"):
        merged([record, make_record([make_row(seq_len=32)], "b")], ["a", "b"])


def test_a_record_that_its_own_lines_contradict_is_refused(tmp_path, make_row, make_record):
    record = make_record([make_row(seq_len=32), make_row(seq_len=64)])
    folder = RunFolder.create(tmp_path, "quick", "aaaa")
    folder.start(RunHeader.model_validate(record.model_dump(include=RunHeader.model_fields.keys())))
    # What had no time, and was planned no more by a dilabench that went on with the run.
    folder.row(make_row(seq_len=128, outcome=Skipped(code="budget", why="no time")))
    for row in record.rows:
        folder.row(row)
    folder.finish(record)
    refuse_other_rows(folder.path, read_record(folder.path))
    faster = record.rows[0].model_copy(update={"outcome": make_row(seq_len=32, ns=1).outcome})
    for rows, why in (
        ((faster, record.rows[1]), "differ on strided on 1x32"),
        (record.rows[1:], "run.json lacks 1 of the rows in rows.jsonl"),
        ((*record.rows, make_row(seq_len=96)), "differ on strided on 1x96"),
    ):
        with pytest.raises(ConfigError, match=why):
            refuse_other_rows(folder.path / "run.json", changed(record, rows=rows))


def test_failed_rows_are_kept(halves):
    failed = Failed(stage="verify", code="wrong_output", why="out")
    assert failed in [row.outcome for row in merged(halves(outcome=failed), ["a", "b"]).rows]

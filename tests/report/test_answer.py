"""The closing answer: who is fastest where, said only as far as it is proven."""

from random import Random
from typing import Any

import pytest

from dilabench.metadata import SPARSITY_REACHED
from dilabench.plugins.axis import DENSITY, LENGTH, RANKS
from dilabench.record import (
    Case,
    Check,
    CpuInfo,
    Environment,
    Measured,
    Memory,
    PlannedCase,
    Row,
    RunRecord,
    Skipped,
    Slot,
    Timing,
    Verification,
)
from dilabench.report.answer import answer
from dilabench.workload.spec import WorkloadRequest


def row(name: str, ms: float, length: int = 1024, *, turn: int = 0, rounds: int = 20, **changes: Any) -> Row:
    """`rounds` turns of three samples of about `ms`, spread by 0.2 %; turns differ, so that rounds pair."""
    draw = Random(f"{name}{ms}{length}")
    slots = [
        Slot(round=at, position=(turn + at) % 5, samples_ns=[int(1e6 * ms * draw.gauss(1, 0.002)) for _ in range(3)])
        for at in range(rounds)
    ]
    outcome = Measured(
        verification=Verification(checks=(Check(name="out", passed=True),)),
        timings=(Timing(timer="wall", proves="host time", slots=tuple(slots)),),
        memory=Memory(peak_bytes=3 * 2**20),
    )
    dense = changes.get("role") == "yardstick"
    workload = WorkloadRequest(seq_len=length).resolve("float32")
    case = Case(
        implementation=name,
        workload=workload.as_dense() if dense else workload,
        world_size=changes.pop("world_size", 1),
    )
    return Row(planned=PlannedCase(case=case, **changes), outcome=outcome)


def unmeasured(name: str, length: int) -> Row:
    case = Case(implementation=name, workload=WorkloadRequest(seq_len=length).resolve("float32"))
    return Row(planned=PlannedCase(case=case), outcome=Skipped(code="budget", why="no time"))


def record(*rows: Row) -> RunRecord:
    environment = Environment(os="Linux", python="3.12", cpu=CpuInfo(model="cpu", cores=1, threads=1))
    return RunRecord(
        tool_version="0", run_id="r", suite="range", started_at="2026-01-01", environment=environment, rows=rows
    )


def test_each_length_has_a_winner_or_says_why_none() -> None:
    rows = [
        *(row("fused", 1, length, turn=0) for length in (1024, 2048)),
        *(row("gather", 2, length, turn=1) for length in (1024, 2048)),
        row("fused", 4.0, 4096, turn=0),
        row("gather", 4.01, 4096, turn=1),
        row("fused", 8, 8192, turn=0, rounds=3),
        row("gather", 16, 8192, turn=1, rounds=3),
        row("gather", 9, 16384),
        unmeasured("gather", 32768),
    ]
    found = answer(record(*rows), LENGTH)
    assert {line.at: line.winner for line in found.rows} == {
        "1K": "fused",
        "2K": "fused",
        "4K": "tie: fused, gather",
        "8K": "fused (unproven)",
        "16K": "only gather",
        "32K": "no time: budget",
    }
    assert found.sentence == (
        "fused is fastest at length 1K, 2K, 8K, by its median only at 8K (too few rounds); tie: fused, gather at "
        "length 4K; only gather at length 16K; no time: budget at length 32K."
    )


def test_lines_follow_the_axis_whatever_the_order_of_the_record() -> None:
    found = answer(record(row("gather", 1, 4096), row("gather", 1, 512), row("gather", 1, 1024)), LENGTH)
    assert [line.at for line in found.rows] == ["512", "1K", "4K"]


@pytest.mark.parametrize(
    ("dense_ms", "shown", "side"), [(0.5, "0.50x", "faster"), (3.0, "3.00x", "slower"), (1.0, "≈1.00x", None)]
)
def test_full_attention_stands_beside_the_winner(dense_ms: float, shown: str, side: str | None) -> None:
    rows = [row("fused", 1, turn=0), row("gather", 2, turn=1), row("dense", dense_ms, role="yardstick", turn=2)]
    found = answer(record(*rows), LENGTH)
    columns, lines, _ = found.table()
    cells = dict(zip(columns, lines[0], strict=True))
    assert (cells["fastest"], cells["vs dense"], cells["memory"], cells["verified"]) == (
        "fused",
        shown,
        "3.0 MiB",
        "✓ all",
    )
    told = f"Full attention (dense), another function, is {side} at length 1K."
    assert found.sentence.endswith(told) if side else "Full attention" not in found.sentence


def test_in_short_it_says_what_to_use_up_to_which_length() -> None:
    def at(length: int, fused: float, dense: float) -> list[Row]:
        ours = [row("fused", fused, length, turn=0), row("gather", 2 * fused, length, turn=1)]
        return [*ours, row("dense", dense, length, role="yardstick", turn=2)]

    short = [*at(1024, 2, 1), *at(2048, 3, 2), *at(4096, 4, 8), *at(8192, 8, 32)]
    in_short = "In short: dense up to length 2K, fused from length 4K on."
    assert answer(record(*short), LENGTH).sentence.endswith(in_short)
    # Not where one comes back, and not where a place is undecided.
    assert "In short" not in answer(record(*short, *at(16384, 16, 8)), LENGTH).sentence
    assert "In short" not in answer(record(*short, *at(16384, 16, 16)), LENGTH).sentence


def test_full_attention_alone_is_an_answer_too() -> None:
    found = answer(record(row("dense", 1, role="yardstick")), LENGTH)
    assert [line.winner for line in found.rows] == ["only dense"]
    assert "vs dense" not in found.table()[0]


def test_the_axis_is_the_suites() -> None:
    ranks = answer(record(row("ring", 2, world_size=2), row("ring", 1, world_size=4)), RANKS)
    assert [(line.at, line.workload) for line in ranks.rows] == [("2", ""), ("4", "")]
    assert "at ranks 2, 4" in ranks.sentence
    half = row("block_sparse", 1, labels=SPARSITY_REACHED.entry(0.5))
    assert [line.at for line in answer(record(half), DENSITY).rows] == ["50.0%"]


def test_workloads_of_one_length_are_told_apart() -> None:
    found = answer(record(row("ring", 2, world_size=2), row("ring", 1, world_size=4)), LENGTH)
    assert [line.workload for line in found.rows] == ["2 ranks", "4 ranks"]
    assert found.table()[0][:3] == ("length", "batch", "workload")

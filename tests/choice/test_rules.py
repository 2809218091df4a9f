"""`-i auto`: measured cells first, the nearest of them, then the rule; and only what can run."""

import json
from pathlib import Path

import pytest

from dilabench.choice.measured import TunedCell, TuneFile, read_tune_file, remember, tune_path
from dilabench.choice.rules import choose
from dilabench.choice.ways import own_ways
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.plugins import Implementation
from dilabench.plugins.manager import discover
from dilabench.record import Case, GpuInfo
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.workload.spec import Workload, WorkloadRequest

CPU = Machine(device="cpu")
H200 = Machine(device="cuda", gpus=(GpuInfo(name="NVIDIA H200", compute_capability="9.0"),))


def workload(**fields: object) -> Workload:
    return WorkloadRequest.model_validate({"batch_size": 1, "head_dim": 64, **fields}).resolve("float32")


def write(path: Path, *cells: TunedCell) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TuneFile(device="cpu", cells=cells).model_dump_json())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path))
    return tmp_path


def test_rule_where_nothing_was_measured(cache: Path) -> None:
    catalogue = discover().catalogue
    assert choose(catalogue, CPU, workload()).implementation == "strided"
    assert choose(catalogue, CPU, workload(pattern="dense")).implementation == "dense"
    assert choose(catalogue, CPU, workload()).source == "rule"


def test_nearest_measured_cell_decides(cache: Path) -> None:
    short, long = workload(seq_len=1024), workload(seq_len=65536)
    write(
        tune_path(CPU),
        TunedCell(workload=short, implementation="gather", backend="math", median_ns=10),
        TunedCell(workload=long, implementation="strided", backend="sdpa-flash", median_ns=10),
    )
    catalogue = discover().catalogue
    near_short = choose(catalogue, CPU, workload(seq_len=2048))
    near_long = choose(catalogue, CPU, workload(seq_len=32768))
    assert (near_short.implementation, near_short.backend, near_short.source) == ("gather", "math", "tuned")
    assert (near_long.implementation, near_long.backend) == ("strided", "sdpa-flash")


@pytest.mark.parametrize("other", [{"causal": False}, {"head_dim": 128}, {"mode": "both"}, {"pattern": "dense"}])
def test_other_kinds_of_work_do_not_count(cache: Path, other: dict[str, object]) -> None:
    write(tune_path(CPU), TunedCell(workload=workload(), implementation="gather", backend="math", median_ns=10))
    assert choose(discover().catalogue, CPU, workload(**other)).source == "rule"


UNNESTED = {"segment_lengths": (1024, 5792, 32768), "dilation_rates": (1, 2, 4), "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"head_dim": 48}, "fused"),
        ({"head_dim": 64}, "fused"),
        ({"head_dim": 96}, "strided"),
        ({"head_dim": 96, "segment_lengths": (1024, 4096, 32768)}, "fused"),
        ({"head_dim": 192}, "strided"),
        ({"head_dim": 96, "window": (1024, 1024)}, "fused"),
        ({"heads": "grouped", "num_heads": 6}, "fused"),
        ({"segment_lengths": (1000, 3000), "dilation_rates": (3, 7)}, "fused"),
    ],
)
def test_fused_is_taken_where_its_kernels_are_faster(cache: Path, fields: dict[str, object], expected: str) -> None:
    asked = workload(**{**UNNESTED, "seq_len": 65536, "causal": False, **fields})
    machine = Machine(device="cuda", gpus=(GpuInfo(name="Another", compute_capability="9.0"),))
    assert choose(discover().catalogue, machine, asked).implementation == expected


def test_a_choice_that_cannot_run_here_is_passed_over(cache: Path) -> None:
    cells = [
        TunedCell(workload=workload(), implementation=name, backend=backend, median_ns=10)
        for name, backend in (("fused", None), ("strided", "flash4"), ("gone", None), ("strided", "gone"))
    ]
    write(tune_path(CPU), *cells)
    assert choose(discover().catalogue, CPU, workload()).source == "rule"


def test_shipped_h200_cells_load_and_are_used(cache: Path) -> None:
    asked = workload(seq_len=131072, num_heads=16, dtype="bfloat16", causal=True)
    catalogue = discover().catalogue
    choice = choose(catalogue, H200, asked)
    if catalogue.implementations.get("fused") and not catalogue.reasons_against(_case("fused", asked), H200):
        assert (choice.implementation, choice.source) == ("fused", "shipped")
    else:
        assert choice.source == "rule"


def _case(name: str, asked: Workload):
    from dilabench.record import Case

    return Case(implementation=name, workload=asked)


def test_a_broken_file_is_refused_with_a_way_out(cache: Path) -> None:
    path = tune_path(CPU)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(ConfigError, match="delete it and tune again"):
        read_tune_file(path)


def test_planner_records_what_auto_chose(cache: Path) -> None:
    catalogue = discover().catalogue
    request = RunRequest(suite="implementations", implementations=("auto",))
    planner = Planner(catalogue, CPU, request)
    (implementation,) = planner.implementations(())
    (planned,) = planner.plan(implementation, WorkloadRequest(seq_len=512))
    assert planned.case.implementation == "strided"
    assert planned.labels["chosen_by"] == "auto (rule)"
    assert planned.skip is None


def test_who_calls_windows_is_not_given_a_backend_without_them() -> None:
    catalogue = discover().catalogue
    windowed = Implementation("windowed", "", "none:build", uses_backend=True, calls_window=True)
    catalogue.implementations.add(windowed, "a test")
    plain = Case(implementation="strided", backend="sdpa-cudnn", workload=workload(causal=True, dtype="bfloat16"))
    case = plain.model_copy(update={"implementation": "windowed"})
    assert any("window" in reason for reason in catalogue.reasons_against_backend(case, H200))
    assert not any("window" in reason for reason in catalogue.reasons_against_backend(plain, H200))


def test_cells_of_patterns_that_the_library_does_not_know_stay_in_the_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in's pattern is unknown to a process of the library, which writes to the same file."""
    known = TunedCell(workload=workload(), implementation="gather", backend="math", median_ns=10)
    fields = json.loads(known.model_dump_json())
    theirs = {**fields, "workload": {**fields["workload"], "pattern": {"kind": "theirs"}}}
    path = tune_path(CPU)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": "cpu", "cells": [theirs, fields]}))
    assert choose(own_ways(), CPU, workload()).source == "tuned"
    another = known.model_copy(update={"workload": workload(head_dim=32)})
    remember(path, CPU, [another])
    file = read_tune_file(path)
    assert (file.cells, file.unread) == ((known, another), (theirs,))


def test_the_library_chooses_among_its_own_ways(cache: Path) -> None:
    """A cell of a plug-in's implementation decides nothing there."""
    write(tune_path(CPU), TunedCell(workload=workload(), implementation="theirs", backend=None, median_ns=10))
    assert choose(own_ways(), CPU, workload()).source == "rule"
    assert not own_ways().implementations.names[0].startswith("ring")
    assert "ring" in own_ways(over_ranks=True).implementations

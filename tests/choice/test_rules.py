"""`-i auto`: measured cells first, the nearest of them, then the rule; and only what can run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dilabench.atomic_file import locked
from dilabench.choice import computation, measured
from dilabench.choice.measured import TunedCell, TuneFile, check_tune_file, read_tune_file, remember, tune_path
from dilabench.choice.rings import RINGS
from dilabench.choice.rules import choose
from dilabench.choice.ways import Way, own_ways
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.patterns.dense import DENSE
from dilabench.plugins import Implementation
from dilabench.plugins.manager import discover
from dilabench.record import Case, GpuInfo
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.workload.spec import UNBOUNDED, Workload, WorkloadRequest

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
        # Slower there than branches over dense kernels, which cap no scores.
        *(
            ({"head_dim": dim, "softcap": 30.0, **fields}, "fused")
            for dim in (96, 192, 256)
            for fields in ({"mode": "both"}, {"dtype": "float32"}, {"layout": "packed", "cu_seqlens": (0, 9, 65536)})
        ),
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


BROKEN = {
    "half of one": b"{",
    "empty": b"",
    "no text": b"\xff\x00",
    "a list": b"[]",
    "a number": b"3",
    "cells that are none": b'{"device": "cpu", "cells": 3}',
    "cells of nothing": b'{"device": "cpu", "cells": [null, {"workload": {"pattern": {"kind": []}}}]}',
    "a field of another version": b'{"device": "cpu", "novel": 1}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_counts_as_none_and_is_kept_beside(
    cache: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tune_path(CPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for _ in range(2):
        assert choose(own_ways(), CPU, workload()).source == "rule"
    assert caplog.text.count("delete it and tune again") == 1
    with pytest.raises(ConfigError, match="delete it and tune again"):
        check_tune_file(path)
    cell = TunedCell(workload=workload(), implementation="gather", backend="math", median_ns=10)
    remember(path, CPU, [cell])
    assert read_tune_file(path).cells == (cell,)
    assert path.with_name(f"{path.name}.unreadable").read_bytes() == content


def test_a_folder_in_the_place_of_the_file_counts_as_none(cache: Path) -> None:
    tune_path(CPU).mkdir(parents=True)
    assert choose(own_ways(), CPU, workload()).source == "rule"


def test_a_cell_of_what_is_gone_decides_nothing(cache: Path) -> None:
    fields = {"workload": workload(), "median_ns": 10}
    for cell in (
        TunedCell(implementation="gone", backend=None, **fields),
        TunedCell(implementation="strided", backend="gone", **fields),
    ):
        write(tune_path(CPU), cell)
        assert choose(own_ways(), CPU, workload()).source == "rule"


def test_processes_that_write_at_once_lose_no_cell(cache: Path) -> None:
    """As ranks do, each of which measures another shape."""
    path = tune_path(CPU)
    code = (
        "import sys; from pathlib import Path; from dilabench.machine import Machine\n"
        "from dilabench.choice import measured\n"
        # However long the others take on a busy machine.
        "measured.LOCK_TIMEOUT_S = 100\n"
        "for cell in sys.argv[2:]:\n"
        "    cells = [measured.TunedCell.model_validate_json(cell)]\n"
        "    measured.remember(Path(sys.argv[1]), Machine(device='cpu'), cells)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = []
    for rank in range(1, 4):
        shapes = [workload(seq_len=1 + at, batch_size=rank) for at in range(5)]
        cells = [TunedCell(workload=shape, implementation="gather", median_ns=10) for shape in shapes]
        written = [cell.model_dump_json() for cell in cells]
        ranks.append(subprocess.Popen([sys.executable, "-c", code, str(path), *written], env=environment))
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0]
    assert len(read_tune_file(path).cells) == 15


def test_two_writes_of_one_moment_are_both_read(cache: Path) -> None:
    path = tune_path(CPU)
    for head_dim in (16, 32):
        remember(path, CPU, [TunedCell(workload=workload(head_dim=head_dim), implementation="gather", median_ns=10)])
        os.utime(path, ns=(1, 1))
        file = read_tune_file(path)
    assert [cell.workload.head_dim for cell in file.cells] == [16, 32]


def test_a_lock_that_another_keeps_costs_no_more_than_its_timeout(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "LOCK_TIMEOUT_S", 0.1)
    cell = TunedCell(workload=workload(), implementation="gather", median_ns=10)
    with locked(tune_path(CPU), "a test"):
        remember(tune_path(CPU), CPU, [cell])
    assert read_tune_file(tune_path(CPU)).cells == (cell,)


@pytest.mark.parametrize(
    "package",
    ["torch", "triton", "nvidia-cudnn-cu13", "flash-attn", "flash_attn_interface", "flash-attn-4", "xformers"],
)
def test_another_version_of_what_can_serve_is_another_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    versions = {"torch": "2.13.0"}
    paths = []
    for version in ("1.0", "1.1"):
        versions[package] = version
        monkeypatch.setattr(measured, "installed_version", versions.get)
        paths.append(tune_path(CPU))
    assert paths[0] != paths[1]


def test_another_driver_gpu_or_kernel_is_another_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuInfo(name="NVIDIA H200", compute_capability="9.0", driver="570.1")
    machines = [
        Machine(device="cuda", gpus=(gpu.model_copy(update=fields), gpu))
        for fields in ({}, {"driver": "580.1"}, {"name": "NVIDIA L40S"})
    ]
    paths = {tune_path(machine) for machine in machines}
    monkeypatch.setattr(measured, "kernel_hash", lambda: "another")
    paths.add(tune_path(machines[0]))
    assert len(paths) == 4


def test_sources_of_kernels_in_cpp_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "KERNELS", tmp_path)
    hashes = set()
    for text in ("int a;", "int b;"):
        (tmp_path / "flash.cpp").write_text(text)
        measured.kernel_hash.cache_clear()
        hashes.add(measured.kernel_hash())
    measured.kernel_hash.cache_clear()
    assert len(hashes) == 2


def test_the_gpu_is_that_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H200", "NVIDIA L40S", "NVIDIA H200"]
    gpus = tuple(GpuInfo(name=name, uuid_hash=str(at)) for at, name in enumerate(names))
    monkeypatch.setattr(computation, "detect", lambda _device: Machine(device="cuda", gpus=gpus))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    computation._machine.cache_clear()
    found = [computation.machine_of(device).gpus[0].uuid_hash for device in ("cuda:0", "cuda:1", "cuda:2", "cuda")]
    assert found == ["0", "1", "2", "2"]
    # CUDA's order may not be NVML's.
    monkeypatch.setattr(torch.cuda, "get_device_name", names[::-1][1:].__getitem__)
    computation._machine.cache_clear()
    assert computation.machine_of("cuda:0").gpus[0].uuid_hash == "1"
    assert {gpu.uuid_hash for gpu in computation.machine_of("cuda:0").gpus} == {"0", "1", "2"}
    computation._machine.cache_clear()


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


RINGS_AHEAD = [one.name for one in RINGS if one.calls_ahead]


@pytest.mark.parametrize(("causal", "window"), [(True, (5, 0)), (True, (5, -1)), (False, (5, 0))])
@pytest.mark.parametrize("name", RINGS_AHEAD)
def test_windows_over_ranks_are_not_given_to_kernels_with_causal_windows_only(
    name: str, causal: bool, window: tuple[int, int]
) -> None:
    ways, asked = own_ways(True), workload(causal=causal, dtype="bfloat16", window=window)
    over, alone = (Way(name, "sdpa-efficient", one, 2) for one in (asked, asked.replace(window=UNBOUNDED)))
    assert any("looks ahead" in reason for reason in ways.reasons_against_backend(over, H200))
    assert not any("looks ahead" in reason for reason in ways.reasons_against_backend(alone, H200))
    # Two ranks that trade heads have whole sequences, and so does one device.
    for whole in (Way("ulysses", "sdpa-efficient", asked, 2), Way("strided", "sdpa-efficient", asked, 1)):
        assert not any("looks ahead" in reason for reason in ways.reasons_against_backend(whole, H200))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RINGS_AHEAD)
def test_a_window_over_ranks_takes_a_kernel_that_looks_ahead(name: str, dtype: str) -> None:
    ways = own_ways(True)
    backend, _ = ways.choose_backend(Way(name, None, workload(causal=True, dtype=dtype, window=(5, 0)), 2), H200)
    assert backend not in {None, "sdpa-efficient"}


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


@pytest.mark.parametrize(
    ("capability", "dims", "served"),
    [
        ("9.0", (192, 128), True),
        ("9.0", (256, 256), True),
        ("9.0", (264, 264), False),
        ("8.0", (192, 128), False),
        ("10.0", (128, 192), False),
        ("8.0", (128, 64), True),
    ],
)
def test_cudnn_takes_wide_heads_where_it_has_kernels_for_them(monkeypatch, capability, dims, served):
    """Those of compute capability 9.0 alone."""
    gpu = GpuInfo(name="a", compute_capability=capability)
    monkeypatch.setattr("dilabench.machine._nvml_gpus", lambda: (gpu,))
    monkeypatch.setattr("dilabench.machine.torch_cuda_version", lambda: "13.0")
    head_dim, value_dim = dims
    workload = Workload(
        pattern=DENSE,
        batch_size=1,
        seq_len=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        dtype="bfloat16",
        value_dim=None if value_dim == head_dim else value_dim,
    )
    reasons = own_ways().backends.get("sdpa-cudnn").supports.reasons(workload, "cuda")
    assert not reasons if served else "is above" in reasons[0]


DECODING = {"pattern": "dense", "seq_len": 4096, "query_len": 1, "causal": True, "dtype": "bfloat16", "mode": "forward"}


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512}, None),
        ({"num_heads": 128, "head_dim": 192, "value_dim": 128}, None),
        ({"num_heads": 8, "num_kv_heads": 1, "head_dim": 512}, None),
        ({"num_heads": 4, "head_dim": 32, "value_dim": 512, "query_len": 4}, None),
        ({"num_heads": 4, "head_dim": 577, "value_dim": 64}, "head_dim 577 is above 576"),
        ({"num_heads": 4, "head_dim": 576}, "value_dim 576 is above 512"),
        ({"num_heads": 4, "head_dim": 64, "value_dim": 513}, "value_dim 513 is above 512"),
        (
            {"num_heads": 129, "num_kv_heads": 1, "head_dim": 64},
            "129 rows of queries read the same keys, more than 128",
        ),
        ({"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "query_len": 4}, None),
        (
            {"num_heads": 103, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "query_len": 5},
            "515 rows of queries read the same keys, more than 512",
        ),
    ],
)
def test_split_keys_takes_the_widths_that_fit_into_a_tile(shape: dict[str, int], reason: str | None) -> None:
    asked, ways = workload(**{**DECODING, **shape}), own_ways()
    reasons = ways.implementations.get("split-keys").supports.reasons(asked, "cuda")
    assert reasons == (() if reason is None else (reason,))

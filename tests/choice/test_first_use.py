"""The automatic choice measures once per configuration, keeps what it finds, and leaves out what does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilabench.attention import as_implementation, dilated_attention
from dilabench.choice import computation, first_use
from dilabench.choice.computation import machine_of
from dilabench.choice.measured import TunedCell, TuneFile, configuration, read_tune_file, remember, tune_path
from dilabench.choice.ways import Way, own_ways
from dilabench.contracts import BuildContext, WithNotes
from dilabench.errors import EnvironmentNotReady
from dilabench.impls import packed as packed_impl
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.workload.spec import Workload, WorkloadRequest

CPU = torch.device("cpu")


def workload(**fields: object) -> Workload:
    asked = {"batch_size": 1, "head_dim": 16, "num_heads": 2, "num_kv_heads": 2, "seq_len": 256}
    return WorkloadRequest.model_validate({**asked, **fields}).resolve("float32")


class Measured:
    """Stands for a machine on which anything may be measured; counts how often, and knows which way is the fastest."""

    def __init__(self) -> None:
        self.fastest, self.others, self.calls = "math", first_use.Cost(1.2, 0.5), 0

    def build(self, way: Way) -> Any:
        return way

    def cost(self, way: Way, *_tensors: object) -> first_use.Cost:
        self.calls += 1
        if way.backend == "sdpa-flash":
            raise RuntimeError("no kernel image")
        return first_use.Cost(1.0, 0.5) if way.backend == self.fastest else self.others


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    found = Measured()
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(first_use, "_cost", found.cost)
    monkeypatch.setattr(first_use, "_may_measure", lambda *_: True)
    monkeypatch.setattr(first_use, "ways_to_measure", ways_of_three)
    return found


def ways_of_three(_ways: object, _machine: object, asked: Workload) -> list[Way]:
    return [Way("strided", name, asked) for name in ("sdpa-flash", "math", "tiled")]


def choose(measured: Measured, **fields: object) -> first_use.Choice:
    return first_use.fastest(own_ways(), machine_of("cpu"), workload(**fields), CPU, measured.build)


def test_the_fastest_way_that_runs_is_taken_and_kept(measured: Measured) -> None:
    found = choose(measured)
    assert (found, found.times) == (first_use.Choice("strided", "math", "first use"), "1 s, strided:tiled 1.2 s")
    (cell,) = read_tune_file(tune_path(machine_of("cpu"))).cells
    assert (cell.backend, cell.median_ns, cell.runner_up) == ("math", 10**9, "strided:tiled")


def test_near_lengths_are_not_measured_again_and_others_are(measured: Measured) -> None:
    choose(measured)
    once = measured.calls
    assert choose(measured, seq_len=300, batch_size=1) == first_use.Choice("strided", "math", "tuned")
    assert choose(measured, scale=0.25).source == "tuned", "which it is without being named"
    assert measured.calls == once
    for other in ({"seq_len": 1024}, {"causal": False}, {"window": (8, 0)}, {"mode": "both"}, {"heads": "grouped"}):
        before = measured.calls
        assert choose(measured, **other).source == "first use", other
        assert measured.calls == before + 3


def test_the_file_is_read_once_for_lengths_that_it_tells_of(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(measured)
    assert choose(measured, seq_len=300).source == "tuned"
    monkeypatch.setattr(TuneFile, "model_validate_json", None)
    assert (choose(measured, seq_len=301).source, measured.calls) == ("tuned", 3)
    assert choose(measured, seq_len=4096).source == "first use", "too far for what is known"


@pytest.mark.parametrize(
    ("gpu", "host", "reached", "beyond", "told"),
    [(2.0, 0.5, 2048, 4096, "2 s"), (0.8, 4.0, 512, 1024, "4 s to launch")],
)
def test_a_clear_lead_is_believed_for_longer_but_not_one_of_the_host(
    measured: Measured, gpu: float, host: float, reached: int, beyond: int, told: str
) -> None:
    measured.others = first_use.Cost(gpu, host)
    assert choose(measured).times == f"1 s, strided:tiled {told}"
    before = measured.calls
    assert choose(measured, seq_len=reached).source == "tuned"
    assert measured.calls == before
    assert choose(measured, seq_len=beyond).source == "first use"


def test_the_host_counts_where_it_is_the_slower_and_of_equals_the_gpu() -> None:
    by_costs = {(0.1, 2.8): "many launches", (0.54, 0.5): "few", (0.2, 0.58): "as few", (0.9, 0.1): "one"}
    found = [(first_use.Cost(*cost), name) for cost, name in by_costs.items()]
    assert [name for _, name in first_use.ranked(found)] == ["as few", "few", "one", "many launches"]


def test_what_a_tune_run_left_in_the_file_stays(measured: Measured) -> None:
    machine = machine_of("cpu")
    cell = TunedCell(workload=workload(head_dim=32), implementation="gather", backend="math", median_ns=10)
    remember(tune_path(machine), machine, [cell], "a-run")
    choose(measured)
    file = read_tune_file(tune_path(machine))
    assert (file.run_id, len(file.cells), file.cells[0]) == ("a-run", 2, cell)


def test_a_single_way_is_nothing_to_choose_from(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "ways_to_measure", lambda *arguments: ways_of_three(*arguments)[:2])
    assert choose(measured).source == "rule"


class Gone:
    def compare_set(self, *_: object) -> bytes:
        raise dist.DistNetworkError("rank 0 has left")


def test_ranks_that_measure_apart_take_one_way(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks with caches of their own, each with another fastest way."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port)
    found = []
    for rank, (store, way) in enumerate([(server, "math"), (client, "tiled"), (client, "math")]):
        monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path / str(rank)))
        monkeypatch.setattr(first_use, "_store_of_ranks", lambda _device, store=store: store)
        measured.fastest = way
        found.append(choose(measured))
    assert [choice.backend for choice in found] == ["math"] * 3
    assert [choice.source for choice in found] == ["first use", "another rank", "first use"]
    measured.fastest = "tiled"
    assert choose(measured, causal=False).backend == "tiled", "of another workload"
    # What cannot run on this rank is not taken.
    monkeypatch.setattr(first_use, "usable", lambda *_, **__: False)
    monkeypatch.setattr(first_use, "_store_of_ranks", lambda _device: server)
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path / "other"))
    assert choose(measured).backend == "tiled"
    assert "cannot run here" in caplog.text
    # Nor does a rank without its store stop.
    monkeypatch.setattr(first_use, "_store_of_ranks", lambda _device: Gone())
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path / "last"))
    assert choose(measured).backend == "tiled"
    assert "rank 0 has left" in caplog.text


def test_ranks_tell_each_other_what_they_take_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    assert first_use._store_of_ranks(gpu) is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert first_use._store_of_ranks(gpu) is None, "there is nobody else"
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        store = first_use._store_of_ranks(gpu)
        assert store is not None
        assert [store.compare_set("way", "", own) for own in ("math", "tiled")] == [b"math"] * 2
        assert first_use._store_of_ranks(CPU) is None
    finally:
        dist.destroy_process_group()


def test_a_cache_that_cannot_be_written_costs_only_the_memory(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise EnvironmentNotReady("no space left on device")

    monkeypatch.setattr(first_use, "remember", full)
    assert choose(measured).source == "first use"
    assert "no space left" in caplog.text


def test_ways_are_those_that_can_serve_the_call() -> None:
    found = {
        (way.implementation, way.backend)
        for way in first_use.ways_to_measure(own_ways(), machine_of("cpu"), workload())
    }
    assert ("strided", "sdpa-flash") in found
    assert not any(name in ("fused", "reference") for name, _ in found)


def test_ways_of_packings_take_them_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(own_ways()), "reasons_against", lambda *_: ())
    monkeypatch.setattr(type(own_ways()), "reasons_against_backend", lambda *_: ())
    monkeypatch.setattr(type(own_ways()), "reasons_untried", lambda *_: ())
    monkeypatch.setattr(type(own_ways()), "preferred_backends", lambda *_: ("flash2", "sdpa-cudnn", "math"))
    packed = workload(layout="packed", cu_seqlens=(0, 100, 256))
    for asked, backends in ((packed, {"flash2"}), (workload(), {"flash2", "sdpa-cudnn", "math"})):
        found = first_use.ways_to_measure(own_ways(), machine_of("cpu"), asked)
        assert {way.backend for way in found if way.implementation == "strided"} == backends
        assert "fused" in {way.implementation for way in found}


def test_one_backend_without_a_kernel_for_packings_stands_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(own_ways()), "reasons_against", lambda *_: ())
    monkeypatch.setattr(type(own_ways()), "reasons_against_backend", lambda *_: ())
    monkeypatch.setattr(type(own_ways()), "reasons_untried", lambda *_: ())
    monkeypatch.setattr(type(own_ways()), "preferred_backends", lambda *_: ("sdpa-cudnn", "flash2", "math"))
    monkeypatch.setattr(packed_impl, "has_kernel", lambda *_: True)
    dense, branches = {"pattern": "dense"}, {"segment_lengths": (32, 64), "dilation_rates": (1, 2)}
    for fields, backends in ((dense, ["sdpa-cudnn", "flash2"]), (branches, ["flash2"])):
        asked = workload(layout="packed", cu_seqlens=(0, 100, 256), **fields)
        found = first_use.ways_to_measure(own_ways(), machine_of("cpu"), asked)
        own = {way.implementation for way in found if way.backend} & {"dense", "strided"}
        assert [way.backend for way in found if way.implementation in own] == backends


@pytest.mark.parametrize(
    ("bounds", "alike"),
    [((0, 60, 120, 180, 256), True), ((0, 10, 200, 230, 256), True), ((0, 128, 256), False), ((0, 256), False)],
)
def test_packings_are_alike_by_their_mean_length(bounds: tuple[int, ...], alike: bool) -> None:
    one, other = (workload(layout="packed", cu_seqlens=ends) for ends in ((0, 64, 128, 192, 256), bounds))
    assert (configuration(one) == configuration(other)) is alike
    assert configuration(one) != configuration(workload())


def test_beside_a_single_way_the_plain_method_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 x 11975 float32 tokens of 192 columns views took an H100's host 30 ms to launch, indexed rows 20."""
    several = first_use.ways_to_measure(own_ways(), machine_of("cpu"), workload())
    monkeypatch.setattr(type(own_ways()), "preferred_backends", lambda *_: ("sdpa-flash",))
    alone = first_use.ways_to_measure(own_ways(), machine_of("cpu"), workload())
    assert {way.implementation for way in several} == {"strided"}
    assert [(way.implementation, way.backend) for way in alone] == [
        ("strided", "sdpa-flash"),
        ("gather", "sdpa-flash"),
    ]


def test_the_library_computes_by_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a call that wants a gradient and for one that does not, each by its own."""
    asked: list[str] = []

    def choose(_ways: object, _machine: object, workload: Workload) -> first_use.Choice:
        asked.append(workload.mode)
        return first_use.Choice("strided", "math", "first use")

    monkeypatch.setattr(computation, "choose", choose)
    q = torch.randn(1, 72, 2, 16)
    options = {"segment_lengths": (24,), "dilation_rates": (2,), "causal": True}
    assert torch.equal(dilated_attention(q, q, q, **options), dilated_attention(q, q, q, **options, backend="math"))
    q.requires_grad_()
    dilated_attention(q, q, q, **options).sum().backward()
    assert asked == ["forward", "both"]


@pytest.mark.parametrize("mode", ["forward", "both"])
def test_what_the_library_takes_is_told_beside_its_row(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Chosen when it is built, for calls in the workload's mode, so that no timed call chooses."""
    asked: list[str] = []

    def choose(_ways: object, _machine: object, workload: Workload) -> first_use.Choice:
        asked.append(workload.mode)
        return first_use.Choice("strided", "math", "first use", "1 ms, strided:sdpa-flash 2 ms")

    monkeypatch.setattr(computation, "choose", choose)
    branches = {"segment_lengths": (24,), "dilation_rates": (2,)}
    built = as_implementation.build(workload(mode=mode, seq_len=73, **branches), BuildContext(device=CPU))
    assert asked == [mode]
    assert isinstance(built, WithNotes)
    (note,) = built.notes
    assert (note.code, note.message) == (
        "chosen",
        "strided:math (first use: 1 ms, strided:sdpa-flash 2 ms)",
    )
    assert note.observed is not None
    q = torch.randn(1, 73, 2, 16)
    assert torch.equal(built(q, q, q), dilated_attention(q, q, q, causal=True, **branches, backend="math"))


def test_a_rule_that_leaves_the_backend_open_is_told_with_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path))
    found = as_implementation.build(workload(layout="packed", cu_seqlens=(0, 100, 256)), BuildContext(device=CPU))
    best = discover().catalogue.preferred_backends(Machine(device="cpu"))[0]
    assert found.notes[0].message == f"strided:{best} (rule)"
    q = torch.randn(256, 2, 16)
    assert found(q, q, q).shape == q.shape

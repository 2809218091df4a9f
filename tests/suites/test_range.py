"""Suite `range`: the lengths as they stand, the batch beside them, and what does not fit as a reason."""

import pytest

from dilabench import machine
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.record import GpuInfo
from dilabench.request import run_request
from dilabench.suites.planner import expand
from dilabench.workload.ranges import RANGES

CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPER = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0", memory_bytes=150 * 10**9),))


def plan(catalogue, machine=CPU, **fields):
    return expand(catalogue, machine, run_request(catalogue, suite="range", **fields))


def test_without_lengths_it_is_the_production_range(catalogue):
    planned = plan(catalogue, run={"implementations": ["gather"]})
    assert tuple(p.case.workload.seq_len for p in planned) == RANGES["production"]
    assert [p.case.workload.batch_size for p in planned] == [1] * 6
    assert all(p.requested_workload.batch_size == "auto" for p in planned)


@pytest.mark.parametrize("lengths", [(12288, 49152, 98304), (50000, 100000, 200000)])
def test_odd_lengths_run_as_they_stand(catalogue, lengths):
    planned = plan(catalogue, run={"implementations": ["strided"], "lengths": list(lengths)})
    assert tuple(p.case.workload.seq_len for p in planned) == lengths
    assert {p.case.workload.pattern.segment_lengths for p in planned} == {(2048, 4096, 8192, 16384, 32768)}


def test_a_batch_that_is_set_stays(catalogue):
    planned = plan(
        catalogue, workload={"batch_size": "3"}, run={"implementations": ["strided"], "lengths": [512, 1024]}
    )
    assert {p.case.workload.batch_size for p in planned} == {3}


def test_a_preset_keeps_its_batch(catalogue):
    planned = plan(catalogue, configs=["seed_medium"], run={"implementations": ["strided"], "lengths": [1024, 2048]})
    assert [(p.case.workload.batch_size, p.case.workload.seq_len) for p in planned] == [(2, 1024), (2, 2048)]


def test_every_implementation_on_heads_that_knows_the_pattern_takes_part(catalogue):
    names = {p.case.implementation for p in plan(catalogue, run={"lengths": [512]})}
    assert {"dense", "gather", "strided", "fused"} <= names
    assert not names & {"reference", "gather-multihead", "strided-multihead"}
    (dense,) = [p for p in plan(catalogue, run={"lengths": [512]}) if p.case.implementation == "dense"]
    assert dense.role == "yardstick"


def test_lengths_that_do_not_fit_say_what_they_need(catalogue):
    planned = plan(catalogue, machine=HOPPER, run={"implementations": ["strided"], "lengths": [2**20, 2**28]})
    short, long = (p.skip and p.skip.why for p in planned)
    assert short is None
    # q, k, v and out of 8 heads of 64 in bfloat16 are 4 KiB per token alone: 1 TiB.
    needed = int(long.partition("(")[2].partition(" bytes")[0])
    assert needed > 2**28 * 4096
    assert long.endswith("this device has 139.7 GiB; use a shorter length or a smaller batch")


def test_memory_of_a_host_is_that_of_its_control_group(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    monkeypatch.setattr("dilabench.machine.GROUPS", tmp_path)
    assert machine.memory_bytes(CPU) == 2**20
    limit.write_text("max\n")
    assert machine.memory_bytes(CPU) > 2**20
    limit.unlink()
    assert machine.memory_bytes(CPU) > 2**20


def test_lengths_out_of_order_are_refused_with_the_right_order(catalogue):
    with pytest.raises(ConfigError, match="lengths 8K,2K are out of order; a range rises: write --lengths 2K,8K"):
        plan(catalogue, run={"lengths": [8192, 2048]})


def test_repeated_lengths_are_refused(catalogue):
    with pytest.raises(ConfigError, match="repeats 2048"):
        plan(catalogue, run={"lengths": [2048, 2048]})


def test_a_gpu_gets_calls_of_as_many_tokens_at_each_length(catalogue):
    planned = expand(catalogue, HOPPER, run_request(catalogue, suite="range", run={"implementations": ["gather"]}))
    assert {one.case.workload.seq_len: one.case.workload.batch_size for one in planned}[1024] == 16

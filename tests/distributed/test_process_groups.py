"""What the library takes of torch's process groups, and gives back."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.flop_counter import FlopCounterMode

from dilabench.attention import ring_attention, sequence_shards
from dilabench.distributed import world as world_module
from dilabench.distributed.transport import transport
from dilabench.distributed.world import World


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def nccl(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> dist.ProcessGroup:
    """The group, which says that it is of NCCL, on a machine whose current GPU is the first."""
    monkeypatch.setattr(world_module.dist, "get_backend", lambda _group: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return group


def number_of_groups() -> int:
    gc.collect()
    return len(distributed_c10d._world.pg_map)


def test_worlds_of_a_group_share_one_control_group(nccl: dist.ProcessGroup) -> None:
    first = World.of_group(nccl)
    assert first.control is not nccl
    before = number_of_groups()
    for _ in range(30):
        shards = sequence_shards(24)
        assert shards.world.control is first.control
    assert number_of_groups() == before == 2


def test_a_control_group_ends_with_its_group(nccl: dist.ProcessGroup) -> None:
    before = number_of_groups()
    other = dist.new_group([0], backend="gloo")
    World.of_group(other)
    assert number_of_groups() == before + 2
    dist.destroy_process_group(other)
    del other
    assert number_of_groups() == before


def test_a_control_group_that_was_ended_is_made_anew(nccl: dist.ProcessGroup) -> None:
    gone = World.of_group(nccl).control
    assert gone is not None
    dist.destroy_process_group(gone)
    control = World.of_group(nccl).control
    assert control is not gone
    assert dist.get_rank(control) == 0


def test_the_device_is_the_groups(nccl: dist.ProcessGroup) -> None:
    assert World.of_group(nccl).device == torch.device("cuda", 0)
    nccl.bound_device_id = torch.device("cuda", 1)
    assert World.of_group(nccl).device == torch.device("cuda", 1)


def test_a_group_without_a_device_takes_that_of_the_tensors(nccl: dist.ProcessGroup) -> None:
    world, second = World.of_group(nccl), torch.device("cuda", 1)
    assert world.on(world.device).device == world.device
    assert world.on(second).device == second
    assert world.on(second).control is world.control
    nccl.bound_device_id = world.device
    with pytest.raises(ValueError, match="tensors are on cuda:1 and the process group on cuda:0"):
        World.of_group(nccl).on(second)


class StandInCopies:
    """Copy engines of devices that are not there: it keeps what it was made for, and can be told to fail."""

    made: ClassVar[list[StandInCopies]] = []
    fails: ClassVar[bool] = False

    def __init__(
        self, rank: int, device: torch.device, group: dist.ProcessGroup, region: int, timeout_s: float
    ) -> None:
        self.device, self.region, self.timeout_s, self.closed = device, region, timeout_s, False
        self.made.append(self)

    @staticmethod
    def most_bytes(device: torch.device, size: int) -> int:
        return 1 << 20

    def try_out(self) -> None:
        if self.fails:
            raise RuntimeError("copies from ranks [1] arrived changed\nat some place")

    def close(self) -> None:
        self.closed = True


class TwoRanks(NamedTuple):
    """Rank 0 of two, the other of which says what `others` says, or else the same."""

    group: dist.ProcessGroup
    device: torch.device = torch.device("cuda", 0)
    rank: int = 0
    size: int = 2
    timeout_s: float = 11.0
    others: tuple[Any, ...] = ()

    def share(self, fact: Any) -> list[Any]:
        return [fact, *self.others] if self.others and isinstance(fact, tuple) else [fact, fact]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandInCopies]:
    monkeypatch.setattr(transport, "Copies", StandInCopies)
    monkeypatch.setattr(StandInCopies, "made", [])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: there < 8)
    monkeypatch.delenv("DILABENCH_TRANSPORT", raising=False)
    return StandInCopies


def test_a_group_has_one_transport_for_each_device(nccl: dist.ProcessGroup, stand_in: type[StandInCopies]) -> None:
    first = transport.transport_of(TwoRanks(nccl))
    assert first.name == "copy engines"
    # Waits end with the group's timeout, the trial sooner.
    assert first.copies is stand_in.made[0]
    assert first.copies.timeout_s == 11.0
    assert transport.transport_of(TwoRanks(nccl)) is first
    second = transport.transport_of(TwoRanks(nccl, torch.device("cuda", 1)))
    assert [copies.device.index for copies in stand_in.made] == [0, 1]
    assert second is not first


def test_copy_engines_end_with_their_group(nccl: dist.ProcessGroup, stand_in: type[StandInCopies]) -> None:
    other = dist.new_group([0], backend="gloo")
    transport.transport_of(TwoRanks(other))
    (copies,) = stand_in.made
    dist.destroy_process_group(other)
    del other
    gc.collect()
    assert copies.closed


@pytest.mark.parametrize(
    ("others", "fails", "name"),
    [
        ((("elsewhere", 1, False),), False, "nccl (ranks on several hosts)"),
        (((platform.node(), 9, False),), False, "nccl (GPU 0 cannot reach the memory of GPU 9)"),
        (((platform.node(), 1, True),), False, "nccl (DILABENCH_TRANSPORT=nccl)"),
        (((platform.node(), 1, False),), True, "nccl (rank 0: copies from ranks [1] arrived changed)"),
    ],
)
def test_nccl_carries_messages_where_copies_cannot_and_the_name_says_why(
    nccl: dist.ProcessGroup,
    stand_in: type[StandInCopies],
    monkeypatch: pytest.MonkeyPatch,
    others: tuple[Any, ...],
    fails: bool,
    name: str,
) -> None:
    monkeypatch.setattr(stand_in, "fails", fails)
    selected = transport.transport_of(TwoRanks(nccl, others=others))
    assert selected == (name, None)
    assert all(copies.closed for copies in stand_in.made)


def test_benchmark_and_library_ask_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """`World.join`, which a worker calls, and the shards of a program's group."""
    asked: list[World] = []

    def asked_of(world: World) -> transport.Transport:
        asked.append(world)
        return transport.Transport("copy engines")

    monkeypatch.setattr(world_module, "transport_of", asked_of)
    monkeypatch.setattr(world_module.dist, "get_backend", lambda _group: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = torch.device("cuda", 0)
    # The ranks meet over gloo, and say that it is NCCL.
    real = dist.init_process_group
    monkeypatch.setattr(
        world_module.dist,
        "init_process_group",
        lambda _backend, *, device_id, **options: real("gloo", **options),
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    world = World.join(dist.HashStore(), 0, 1, gpu, timeout_s=9.0)
    try:
        assert (world.transport, world.timeout_s) == ("copy engines", 9.0)
        assert sequence_shards(24).transport(gpu) == "copy engines"
        benchmark, library = asked
        assert benchmark.group is library.group is dist.group.WORLD
        assert benchmark.timeout_s == library.timeout_s
    finally:
        dist.destroy_process_group()


def test_shards_free_what_they_hold(group: dist.ProcessGroup) -> None:
    shards = sequence_shards(24)
    q = torch.randn(1, 24, 2, 8, requires_grad=True)
    ring_attention(q, q, q, shards).sum().backward()
    functions = [weakref.ref(function) for function in shards._functions.values()]
    assert functions
    del shards
    gc.collect()
    assert [function() for function in functions] == [None]


def test_torchs_tools_see_attention_over_ranks(group: dist.ProcessGroup) -> None:
    """Batched gradients, FLOPs and autocast, as for attention on one device."""
    shards = sequence_shards(24)
    q = torch.randn(1, 24, 2, 8, requires_grad=True)
    out = ring_attention(q, q, q, shards)
    douts = torch.stack([out, -out]).detach()
    (found,) = torch.autograd.grad(out, q, douts, is_grads_batched=True, retain_graph=True)
    assert torch.equal(found[1], torch.autograd.grad(out, q, douts[1])[0])
    with FlopCounterMode(display=False) as counted:
        ring_attention(q, q, q, shards).sum().backward()
    assert counted.get_total_flops() == 14 * 8 * 2 * (24 * 25 // 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ring_attention(q, q, q, shards).dtype == torch.bfloat16


def test_copies_are_the_same_shards(group: dist.ProcessGroup) -> None:
    module = torch.nn.Identity()
    module.shards = sequence_shards(24)
    assert copy.deepcopy(module).shards is module.shards
    assert copy.copy(module.shards) is module.shards
    with pytest.raises(TypeError, match="call sequence_shards in each process"):
        pickle.dumps(module.shards)


@pytest.mark.parametrize("method", ["take", "gather"])
@pytest.mark.parametrize("dim", [0, 1, -1, 7])
def test_a_wrong_axis_is_refused_by_the_names_of_the_call(group: dist.ProcessGroup, method: str, dim: int) -> None:
    with pytest.raises(ValueError, match=rf"x \(2, 23, 4\) with dim={dim}: .* 24 entries"):
        getattr(sequence_shards(24), method)(torch.ones(2, 23, 4), dim=dim)


@pytest.mark.gpu
@pytest.mark.parametrize("group", ["bound", "unbound"])
def test_ranks_attend_on_devices_that_are_not_current(group: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    program = str(Path(__file__).with_name("on_other_devices.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, group]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]

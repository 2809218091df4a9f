"""What the library takes of torch's process groups, and gives back."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.flop_counter import FlopCounterMode

from dilabench.attention import ring_attention, sequence_shards
from dilabench.distributed import world as world_module
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
    assert world.on(world.device) is world
    assert world.on(second).device == second
    assert world.on(second).control is world.control
    nccl.bound_device_id = world.device
    with pytest.raises(ValueError, match="tensors are on cuda:1 and the process group on cuda:0"):
        World.of_group(nccl).on(second)


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
        pytest.skip("there is one GPU")
    program = str(Path(__file__).with_name("on_other_devices.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, group]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]

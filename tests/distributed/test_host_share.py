"""Python work of a repeated call over ranks: function calls, which other work on the machine does not change."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dilabench
from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target
from dilabench.choice.ways import own_ways
from dilabench.contracts import BuildContext
from dilabench.distributed.single_rank import SingleRank
from dilabench.distributed.transport import copies
from dilabench.distributed.transport.ring_buffers import RingBuffers
from dilabench.distributed.world import World
from dilabench.engine.worker.overlap_timing import idle
from dilabench.workload.spec import Workload

HERE = str(Path(dilabench.__file__).parent)
SHAPE = {"batch_size": 1, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "dtype": "float32", "mode": "both"}
PACKED = {"layout": "packed", "cu_seqlens": (0, 60, 64, 111, 128), "seq_len": 128}


@pytest.mark.parametrize(
    ("name", "ranks", "most", "fields"),
    [
        ("zigzag-ring", 2, 215, {}),
        ("zigzag-ring", 4, 450, {}),
        ("ring-overlap", 4, 450, {"causal": False}),
        ("ring-allgather", 4, 255, {}),
        ("zigzag-allgather", 4, 260, {}),
        ("balanced-allgather", 4, 210, PACKED),
    ],
)
def test_a_repeated_call_repeats_no_planning(name, ranks, most, fields):
    """Forward and backward of one rank without kernels and messages: calls of dilabench's functions."""
    ways = own_ways(over_ranks=True)
    workload = Workload.model_validate({"pattern": {"kind": "dense"}, "seq_len": 128, **SHAPE, **fields})
    context = BuildContext(
        device=torch.device("cpu"), backend=idle(load_backend(ways.backends.get("math"))), world=SingleRank.of(1, ranks)
    )
    function = load_target(ways.implementations.get(name).target)(workload, context)
    counted = calls_of_a_repeated(function, 4)
    assert not {"Workload.is_dense", "pieces_between", "select_rows", "branches_of"}.intersection(counted)
    assert len(counted) <= most


def calls_of_a_repeated(function, num_kv_heads):
    """The names of dilabench's functions that a second forward and backward pass calls."""
    workload = function.workload
    lead = () if workload.layout == "packed" else (1,)
    inputs = [
        torch.randn(*lead, function.shards.rows[1], heads, 8, requires_grad=True)
        for heads in (4, num_kv_heads, num_kv_heads)
    ]
    dout = torch.randn_like(inputs[0])
    counted = []

    def count(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            counted.append(frame.f_code.co_qualname)

    torch.autograd.grad(function(*inputs), inputs, dout)
    sys.setprofile(count)
    try:
        torch.autograd.grad(function(*inputs), inputs, dout)
    finally:
        sys.setprofile(None)
    return counted


class Ranks(World):
    """A rank whose peers ask for the same, with copy engines that copy nothing."""

    __slots__ = ()

    def share(self, fact):
        return [fact] * self.size


@pytest.fixture
def copy_engines(monkeypatch):
    """Makes the transfers of a rank among several, whose driver and streams are stand-ins."""
    stream = SimpleNamespace(stream_id=0, cuda_stream=0, wait_event=lambda _event: None, record_event=lambda: None)
    done = SimpleNamespace(**dict.fromkeys(copies._ARGUMENTS, lambda *_arguments: 0))
    monkeypatch.setattr(copies, "_driver", lambda: done)
    monkeypatch.setattr(copies, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def made(rank, ranks):
        transfers = object.__new__(copies.Copies)
        transfers.__dict__.update(
            _rank=rank,
            _size=ranks,
            _device=None,
            _trouble="",
            _captures=False,
            _closed=threading.Event(),
            timeout_s=1.0,
        )
        transfers.__dict__.update(_queues={}, _plans={}, _under_way=[], _inward=copies.StreamQueue(stream))
        transfers._memory = torch.empty(1 << 20, dtype=torch.uint8)
        transfers._buffers = RingBuffers(rank, [peer << 30 for peer in range(ranks)], 1 << 16)
        transfers._watcher = SimpleNamespace(is_alive=lambda: True)
        return transfers

    return made


@pytest.mark.parametrize(
    ("name", "ranks", "most"),
    [
        ("zigzag-allgather", 2, 235),
        ("zigzag-ring", 2, 285),
        ("zigzag-ring", 4, 755),
        ("ulysses", 2, 440),
        ("ulysses", 4, 730),
    ],
)
def test_a_repeated_exchange_by_copy_engines_repeats_no_planning(name, ranks, most, copy_engines):
    """As on GPUs, with stand-ins for kernels and the driver."""
    ways = own_ways(over_ranks=True)
    workload = Workload.model_validate({"pattern": {"kind": "dense"}, "seq_len": 128, **SHAPE, "num_kv_heads": 2})
    device = torch.device("cuda", 0)
    world = Ranks(1, ranks, device, copies=copy_engines(1, ranks), transport="copy engines")
    backend = idle(load_backend(ways.backends.get("math")))
    context = BuildContext(device=torch.device("cpu"), backend=backend, world=world)
    function = load_target(ways.implementations.get(name).target)(workload, context)
    counted = calls_of_a_repeated(function, 2)
    assert "Copies.exchange" in counted
    assert not {"Message.of", "Message.of_rows", "Plan.of_tensors", "counts_of"}.intersection(counted)
    assert len(counted) <= most

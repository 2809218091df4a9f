"""Python work of a repeated call over ranks: function calls, which other work on the machine does not change."""

import sys
from pathlib import Path

import pytest
import torch

import dilabench
from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target
from dilabench.choice.ways import own_ways
from dilabench.contracts import BuildContext
from dilabench.distributed.single_rank import SingleRank
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
    lead = () if workload.layout == "packed" else (1,)
    inputs = [torch.randn(*lead, function.shards.rows[1], 4, 8, requires_grad=True) for _ in range(3)]
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
    assert not {"Workload.is_dense", "pieces_between", "select_rows", "branches_of"}.intersection(counted)
    assert len(counted) <= most

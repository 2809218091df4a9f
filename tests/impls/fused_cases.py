"""Runs `fused` in Triton's interpreter on the CPU and prints its errors against the oracle as JSON.

A script of its own, because TRITON_INTERPRET is read when a kernel is decorated.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle import reference
from dilabench.impls import fused
from dilabench.workload.spec import WorkloadRequest

CASES = {
    "planned": {
        "seq_len": 256,
        "segment_lengths": (64, 128, 256),
        "dilation_rates": (1, 2, 4),
        "causal": False,
    },
    "gqa causal": {
        "seq_len": 192,
        "num_kv_heads": 2,
        "segment_lengths": (64, 96, 192),
        "dilation_rates": (1, 2, 6),
    },
    "rates that do not divide": {
        "batch_size": 2,
        "seq_len": 160,
        "segment_lengths": (32, 100, 160),
        "dilation_rates": (1, 3, 6),
    },
    "window": {"seq_len": 150, "segment_lengths": (64, 100), "dilation_rates": (2, 3), "window": (30, 0)},
    "window of branches that nest": {
        "batch_size": 2,
        "seq_len": 150,
        "num_kv_heads": 2,
        "segment_lengths": (32, 128),
        "dilation_rates": (1, 2),
        "causal": False,
        "window": (20, 9),
        "offset_by": "kv_head",
    },
    "zero keys": {
        "seq_len": 192,
        "segment_lengths": (64, 128),
        "dilation_rates": (1, 2),
        "causal": False,
        "padding": "zero_key",
    },
    "zero keys, ragged": {
        "batch_size": 2,
        "seq_len": 150,
        "segment_lengths": (32, 96, 300),
        "dilation_rates": (1, 3, 4),
        "causal": False,
        "padding": "zero_key",
        "offset": "blocked",
    },
    "detached": {
        "batch_size": 2,
        "seq_len": 150,
        "num_kv_heads": 2,
        "segment_lengths": (64, 128, 300),
        "dilation_rates": (1, 2, 4),
        "merge_grad": "detached",
    },
    "detached, zero keys": {
        "seq_len": 150,
        "segment_lengths": (32, 96, 300),
        "dilation_rates": (2, 3, 4),
        "causal": False,
        "padding": "zero_key",
        "offset": "blocked",
        "merge_grad": "detached",
    },
    "detached, rates that do not divide": {
        "seq_len": 160,
        "segment_lengths": (32, 100, 160),
        "dilation_rates": (1, 3, 6),
        "merge_grad": "detached",
    },
    "detached, window": {
        "seq_len": 160,
        "segment_lengths": (32, 100),
        "dilation_rates": (1, 3),
        "window": (24, 0),
        "merge_grad": "detached",
    },
    "detached, packed": {
        "seq_len": 130,
        "layout": "packed",
        "cu_seqlens": (0, 58, 130),
        "segment_lengths": (64, 128),
        "dilation_rates": (1, 2),
        "merge_grad": "detached",
    },
    "detached, grouped": {
        "seq_len": 130,
        "segment_lengths": (64, 128),
        "dilation_rates": (2, 4),
        "heads": "grouped",
        "merge_grad": "detached",
    },
    "packed": {
        "seq_len": 250,
        "layout": "packed",
        "cu_seqlens": (0, 1, 58, 250),
        "segment_lengths": (64, 128),
        "dilation_rates": (1, 2),
        "causal": False,
        "padding": "zero_key",
    },
    "grouped": {
        "seq_len": 130,
        "segment_lengths": (64, 128),
        "dilation_rates": (2, 4),
        "causal": False,
        "heads": "grouped",
    },
    "grouped, more branches than heads, gqa": {
        "batch_size": 2,
        "seq_len": 130,
        "num_kv_heads": 2,
        "segment_lengths": (32, 64, 128, 200, 512),
        "dilation_rates": (1, 2, 2, 4, 4),
        "heads": "grouped",
    },
    "grouped, rates that do not divide": {
        "seq_len": 130,
        "segment_lengths": (64, 100),
        "dilation_rates": (2, 3),
        "heads": "grouped",
    },
}


def errors(fields: dict[str, object]) -> dict[str, float]:
    request = WorkloadRequest.model_validate(
        {"batch_size": 1, "num_heads": 4, "head_dim": 16, "mode": "both", **fields}
    )
    workload = request.resolve("float32")
    context = BuildContext(device=torch.device("cpu"))
    mine, oracle = fused.build(workload, context), reference.build(workload, context)
    shape = (workload.seq_len,) if workload.layout == "packed" else (workload.batch_size, workload.seq_len)
    q = torch.randn(*shape, workload.num_heads, 16, requires_grad=True)
    k, v = (torch.randn(*shape, workload.num_kv_heads, 16, requires_grad=True) for _ in range(2))
    out, lse = mine.with_lse(q, k, v)
    right, right_lse = oracle.with_lse(q, k, v)
    dout = torch.randn_like(out)
    gradients = zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(right, (q, k, v), dout), strict=True)
    empty = torch.isinf(right_lse)
    found = {
        "out": float((out - right).abs().max()),
        "lse": float((lse - right_lse)[~empty].abs().max()),
        "empty rows": float((torch.isinf(lse) != empty).sum()),
    }
    return found | {f"d{name}": float((a - b).abs().max()) for name, (a, b) in zip("qkv", gradients, strict=True)}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({name: errors(fields) for name, fields in CASES.items()}))  # noqa: T201

"""Run by test_block_sparse.py under TRITON_INTERPRET=1: packed documents in one block plan, against the float64 oracle.

Prints the errors of each case as one line of JSON.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from interpreted_block_cases import compared, poisoned

from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle.reference import Reference
from dilabench.impls.block_sparse import block_sparse, packed
from dilabench.impls.block_sparse.planned import BlockKernels
from dilabench.kernels.block_sparse.backward import block_sparse_backward
from dilabench.kernels.block_sparse.forward import block_sparse_forward
from dilabench.workload.spec import Workload

# Documents of one token, of whole blocks, and some that begin inside of a tile.
BOUNDS = (0, 1, 34, 66, 97)
CASES: dict[str, dict[str, Any]] = {
    "window and sinks": {"pattern": {"kind": "window_sink", "sinks": 3, "window_size": 10}, "causal": True},
    "bounds of columns, both sides": {
        "pattern": {"kind": "column_bounds", "document_lengths": (23, 5)},
        "causal": False,
    },
    "blocks": {
        "pattern": {"kind": "block_sparse", "mask": "random", "block_size": 16, "sparsity": 0.4},
        "causal": False,
    },
    "blocks per head, window": {
        "pattern": {"kind": "block_sparse", "mask": "random", "block_size": 16, "sparsity": 0.4, "per_head": True},
        "causal": True,
        "window": (20, -1),
    },
    "selected blocks": {"pattern": {"kind": "topk_blocks", "block_size": 16, "top_k": 2}, "causal": True},
}


def errors(fields: dict[str, Any]) -> dict[str, float]:
    heads, kv_heads, dim = 4, 2, 16
    workload = Workload.model_validate(
        {
            "layout": "packed",
            "cu_seqlens": BOUNDS,
            "seq_len": BOUNDS[-1],
            "batch_size": 1,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": dim,
            "mode": "both",
            **fields,
        }
    )
    tiles = BlockKernels("tiles", block_sparse_forward, block_sparse_backward)
    with ExitStack() as patched:
        for module in (block_sparse, packed):
            patched.enter_context(mock.patch.object(module, "kernels_for", return_value=tiles))
        union = block_sparse.build(workload, BuildContext(device=torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(BOUNDS[-1], n, dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = Reference(workload.replace(dtype="float64")).with_lse(*wide)
    gradients = torch.autograd.grad(out, wide, dout.double())
    own = [x.requires_grad_() for x in (q, k, v)]
    with poisoned():
        got_out, got_lse = union.with_lse(*own)
        got = torch.autograd.grad(got_out, own, dout)
    return compared((out[None], lse[None], *gradients), (got_out[None], got_lse[None], *got))


if __name__ == "__main__":
    print(json.dumps({name: errors(fields) for name, fields in CASES.items()}))  # noqa: T201 - the parent process reads it

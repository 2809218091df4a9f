"""`fused` with tile shapes given as text, in Triton's interpreter: prints how far each is off.

A script of its own, because TRITON_INTERPRET is read when a kernel is decorated.
"""

from __future__ import annotations

import json
import sys

import torch

from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle import reference
from dilabench.impls import fused
from dilabench.workload.spec import WorkloadRequest

TILES = ("", "forward=32x16x4x2", "backward_query=16x32x4x1,backward_key=32x16x4x1")
FIELDS = {"batch_size": 1, "seq_len": 256, "num_heads": 2, "head_dim": 16, "dtype": "float32", "mode": "both"}
BRANCHES = {"segment_lengths": (64, 256), "dilation_rates": (1, 2)}


def results(build, context: BuildContext, workload) -> list[torch.Tensor]:
    """out, dq, dk and dv."""
    shape = (1, workload.seq_len, workload.num_heads, workload.head_dim)
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = build(workload, context)(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def main() -> None:
    """The largest error of any tensor, relative to its norm, by shape of tiles."""
    workload = WorkloadRequest.model_validate({**FIELDS, **BRANCHES}).resolve("float32")
    cpu = torch.device("cpu")
    exact = results(reference.build, BuildContext(device=cpu), workload)
    found = {}
    for tiles in TILES:
        got = results(fused.build, BuildContext(device=cpu, tiles=tiles), workload)
        found[tiles] = max(((g - w).norm() / w.norm()).item() for g, w in zip(got, exact, strict=True))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

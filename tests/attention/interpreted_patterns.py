"""Runs calls of every pattern by the kernels of a GPU in Triton's interpreter, and prints their errors beside float64.

A script of its own, because TRITON_INTERPRET is read when a kernel is decorated: `test_kernels_of_gpus.py` starts it in
a fresh process. The arguments are names of `every_call.CALLS`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dilabench.attention import call, given_blocks
from dilabench.choice import computation
from dilabench.impls import native_sparse, packed
from dilabench.impls.block_sparse import block_sparse, planned
from dilabench.impls.block_sparse import packed as packed_blocks
from dilabench.impls.selected import tiles
from dilabench.kernels import combine, lse
from dilabench.kernels.block_sparse.backward import block_sparse_backward
from dilabench.kernels.block_sparse.forward import block_sparse_forward
from dilabench.machine import GpuInfo, Machine
from dilabench.workload.spec import Workload
from tests.attention.every_call import CALLS

CPU = Machine(device="cpu")
H200 = Machine(device="cuda", gpus=(GpuInfo(name="NVIDIA H200", compute_capability="9.0"),))
TILES = planned.BlockKernels("block-sparse tiles", block_sparse_forward, block_sparse_backward)
of_this_device, over = planned.kernels_for, computation.backend_of
used: list[str] = []


def on_a_gpu(function: Callable[[Workload, torch.device], Any]) -> Callable[[Workload, torch.device], Any]:
    """The function, which finds an H200 for each dtype but float64."""

    def chosen(workload: Workload, device: torch.device) -> Any:
        exact = workload.dtype == "float64"
        computation.machine_of = lambda _device: CPU if exact else H200
        found = function(workload, device)
        if not exact:
            used.append(type(found[1]).__name__ if isinstance(found, tuple) else found.name)
        return found

    return chosen


def replaced() -> None:
    """Kernels of a GPU for every dtype that they have; those of packages of dense attention run on no CPU."""
    for module in (lse, combine, packed, tiles):
        module.has_kernel = lambda _device, dtype: dtype != torch.float64
    for module in (planned, block_sparse, packed_blocks, native_sparse, given_blocks):
        module.kernels_for = lambda device, dtype: of_this_device(device, dtype) if dtype == torch.float64 else TILES
    computation.backend_of = lambda name, *others: over("math" if name == "auto" else name, *others)
    call.automatic = on_a_gpu(computation.automatic)
    given_blocks.implementation_of = on_a_gpu(computation.implementation_of)


if __name__ == "__main__":
    replaced()
    found = {}
    for name in sys.argv[2:] or CALLS:
        used.clear()
        found[name] = CALLS[name](torch.float32, "cpu"), sorted({*used})
    sys.stdout.write(json.dumps(found))

"""Runs calls of every pattern by the kernels of a GPU in Triton's interpreter, and prints their errors beside float64.

A script of its own, because TRITON_INTERPRET is read when a kernel is decorated: `test_kernels_of_gpus.py` starts it in
a fresh process. The arguments are names of `every_call.CALLS`.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
os.environ["DILABENCH_FIRST_USE"] = "0"

import torch

from dilabench.kernels import lse

# Before others import it.
lse.has_kernel = lambda _device, dtype: dtype != torch.float64

from dilabench.impls.block_sparse import planned
from dilabench.kernels.block_sparse.backward import block_sparse_backward
from dilabench.kernels.block_sparse.forward import block_sparse_forward

of_this_device = planned.kernels_for
tiles = planned.BlockKernels("block-sparse tiles", block_sparse_forward, block_sparse_backward)
planned.kernels_for = lambda device, dtype: of_this_device(device, dtype) if dtype == torch.float64 else tiles

from dilabench.attention import call, given_blocks
from dilabench.choice import computation
from dilabench.machine import GpuInfo, Machine
from dilabench.workload.spec import Workload

H200 = Machine(device="cuda", gpus=(GpuInfo(name="NVIDIA H200", compute_capability="9.0"),))
CPU = Machine(device="cpu")
used: list[str] = []


def as_on_a_gpu(function):
    """The function of a workload and a device, which takes kernels of a GPU for every dtype that they have."""

    def chosen(workload: Workload, device: torch.device):
        computation.machine_of = lambda _device: CPU if workload.dtype == "float64" else H200
        found = function(workload, device)
        if workload.dtype != "float64":
            used.append(type(found[1]).__name__ if isinstance(found, tuple) else found.name)
        return found

    return chosen


over = computation.backend_of
# Packages of dense kernels run on no CPU.
computation.backend_of = lambda name, *others: over("math" if name == "auto" else name, *others)
call.automatic = as_on_a_gpu(computation.automatic)
given_blocks.implementation_of = as_on_a_gpu(computation.implementation_of)

from tests.attention.every_call import CALLS

if __name__ == "__main__":
    found = {}
    for name in sys.argv[2:] or CALLS:
        used.clear()
        found[name] = CALLS[name](torch.float32, "cpu"), sorted({*used})
    sys.stdout.write(json.dumps(found))

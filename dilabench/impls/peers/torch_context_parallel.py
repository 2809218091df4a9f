"""`torch-context-parallel`: torch's own context parallelism around scaled_dot_product_attention.

A user's call under `torch.distributed.tensor.experimental.context_parallel`, with shards that are cut already: DTensors
over a mesh of all ranks, which torch's dispatcher takes to its ring over the chosen kernel. Cutting whole tensors is
outside; DTensor's dispatch, and torch's copies of k and v, are inside. Read in torch 2.10, 2.11 and 2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import zigzag
from dilabench.impls.peers.sharded import PeerOverRanks, world_of
from dilabench.workload.equal_parts import against_equal_pairs
from dilabench.workload.spec import Workload

KERNELS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}


def build_allgather(workload: Workload, context: BuildContext) -> TorchContextParallel:
    """K and V of all ranks come in one gather; dK and dV go from rank to rank. torch's default."""
    return TorchContextParallel(workload, context, "allgather")


def build_alltoall(workload: Workload, context: BuildContext) -> TorchContextParallel:
    """K and V go from rank to rank."""
    return TorchContextParallel(workload, context, "alltoall")


class TorchContextParallel(PeerOverRanks):
    """Causal dense attention on torch's balanced (zigzag) shards. Raises ValueError for a backend that torch lacks.

    torch keeps the rotation in a global of the process, hence it is set again before every pass, the backward one too.
    """

    def __init__(self, workload: Workload, context: BuildContext, rotation: str) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _enable_context_parallel_dispatcher

        ranks = context.world.size if context.world else 1
        world = world_of(context, against_equal_pairs(workload, ranks))
        super().__init__(zigzag(workload.sequences, world.size), world)
        backend = context.require_backend().name
        if backend not in KERNELS:
            raise ValueError(f"torch's context parallelism cannot call {backend!r}; use -b {' or -b '.join(KERNELS)}")
        assert world.group is not None
        self._mesh = DeviceMesh.from_group(world.group, world.device.type)
        self._kernel, self._rotation, self._scale = KERNELS[backend], rotation, workload.softmax_scale
        self._grouped = workload.num_kv_heads != workload.num_heads
        # From here on DTensors that are cut by tokens may meet scaled_dot_product_attention; nothing else changes.
        _enable_context_parallel_dispatcher()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Differentiable. Raises RuntimeError where the kernel cannot be used."""
        from torch.distributed.tensor import DTensor, Shard

        self._select()
        by_token = [Shard(2)]
        queries, keys, values = (
            DTensor.from_local(x.transpose(1, 2), self._mesh, by_token, run_check=False) for x in (q, k, v)
        )
        with sdpa_kernel(self._kernel):
            found = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self._scale, enable_gqa=self._grouped
            )
        assert isinstance(found, DTensor)
        out = found.to_local().transpose(1, 2)
        if out.requires_grad:
            out.register_hook(lambda _: self._select())
        return out

    def _select(self) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _cp_options, set_rotate_method

        set_rotate_method(self._rotation)
        _cp_options.enable_load_balance = True

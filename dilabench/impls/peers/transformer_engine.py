"""`transformer-engine-p2p` and `transformer-engine-a2a`: TransformerEngine's own context parallelism.

Its DotProductAttention chooses its kernel itself (cuDNN's or flash-attn), and takes the same balanced (zigzag) shards
either way. Read on its main branch, August 2026.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import zigzag
from dilabench.impls.peers.sharded import PeerOverRanks, world_of
from dilabench.workload.equal_parts import against_equal_pairs, against_whole_heads_in_pairs
from dilabench.workload.spec import Workload


def build_p2p(workload: Workload, context: BuildContext) -> TransformerEngineAttention:
    """K and V go from rank to rank. Raises ModuleNotFoundError where the package is missing."""
    ranks = context.world.size if context.world else 1
    return TransformerEngineAttention(workload, context, "p2p", against_equal_pairs(workload, ranks))


def build_a2a(workload: Workload, context: BuildContext) -> TransformerEngineAttention:
    """Ranks trade tokens for heads. Raises ModuleNotFoundError where the package is missing."""
    ranks = context.world.size if context.world else 1
    return TransformerEngineAttention(workload, context, "a2a", against_whole_heads_in_pairs(workload, ranks))


class TransformerEngineAttention(PeerOverRanks):
    """Causal dense attention; dropout is off."""

    def __init__(self, workload: Workload, context: BuildContext, way: str, against: str | None) -> None:
        world = world_of(context, against)
        super().__init__(zigzag(workload.sequences, world.size), world)
        from transformer_engine.pytorch import DotProductAttention

        self._module = DotProductAttention(
            workload.num_heads,
            workload.head_dim,
            num_gqa_groups=workload.num_kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal",
            softmax_scale=workload.softmax_scale,
            cp_group=world.group,
            cp_global_ranks=dist.get_process_group_ranks(world.group),
            cp_stream=torch.cuda.Stream(world.device) if world.device.type == "cuda" else None,
            cp_comm_type=way,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Differentiable."""
        out: Tensor = self._module(q, k, v)
        return out.view_as(q)

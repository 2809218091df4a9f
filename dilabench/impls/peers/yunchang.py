"""`yunchang-ulysses` and `yunchang-usp`: Ulysses, and USP's mesh of Ulysses and a ring, of the package yunchang.

Both call flash-attn 2's functions; over another backend that takes their place. The package's own kinds for torch's
kernels have no backward pass, and those for FlashAttention 3 compute no causal mask. Read in version 0.6.4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Shards, Span, contiguous, zigzag
from dilabench.distributed.world import World
from dilabench.impls.peers.flash_attn_stand_in import stand_ins
from dilabench.impls.peers.private_import import imported, imported_together
from dilabench.impls.peers.sharded import PeerOverRanks, world_of
from dilabench.workload.equal_parts import against_usp, against_whole_heads, usp_degrees
from dilabench.workload.spec import Workload

PACKAGE = "yunchang"
INSTALL = "pip install --no-deps yunchang; pip install einops"


class YunchangAttention(PeerOverRanks):
    """A module of the package as an AttentionFn of shards."""

    def __init__(self, shards: Shards, world: World, module: Callable[..., Tensor], workload: Workload) -> None:
        super().__init__(shards, world)
        self._module, self._workload = module, workload

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Differentiable."""
        scale = self._workload.softmax_scale
        return self._module(q, k, v, dropout_p=0.0, softmax_scale=scale, causal=self._workload.causal)


def build_ulysses(workload: Workload, context: BuildContext) -> YunchangAttention:
    """Causal or not, on successive shards. Raises ModuleNotFoundError where the package is missing."""
    world = world_of(context, against_whole_heads(workload, _ranks(context)))
    given = stand_ins(context.require_backend())
    project = imported(f"{PACKAGE}.ulysses.attn_layer", *given, install=INSTALL)
    module = project.UlyssesAttention(sequence_process_group=world.group)
    return YunchangAttention(contiguous(workload.sequences, world.size), world, module, workload)


def build_usp(workload: Workload, context: BuildContext) -> YunchangAttention:
    """Causal, on USP's balanced shards. Raises ModuleNotFoundError where the package is missing."""
    world = world_of(context, against_usp(workload, _ranks(context)))
    given, names = stand_ins(context.require_backend()), (f"{PACKAGE}.globals", f"{PACKAGE}.hybrid.attn_layer")
    settings, project = imported_together(names, *given, install=INSTALL)
    heads, ring = usp_degrees(world.size)
    settings.set_seq_parallel_pg(heads, ring, dist.get_rank(), world.size)
    module = project.LongContextAttention(ring_impl_type="zigzag")
    return YunchangAttention(usp_shards(workload.seq_len, world.size), world, module, workload)


def usp_shards(seq_len: int, ranks: int) -> Shards:
    """Zigzag over the ring, and in each of its places successive parts for the ranks that trade heads."""
    heads, ring = usp_degrees(ranks)
    in_ring = zigzag([(0, seq_len)], ring)
    if heads == 1:
        return in_ring
    # A pair has the two chunks of a place, one each.
    edges = [seq_len * edge // (2 * ring) for edge in range(2 * ring + 1)]
    chunks = [chunk for place in range(ring) for chunk in (place, 2 * ring - 1 - place)]
    return Shards(tuple((Span(edges[chunk], edges[chunk + 1]),) for chunk in chunks))


def _ranks(context: BuildContext) -> int:
    return context.world.size if context.world else 1

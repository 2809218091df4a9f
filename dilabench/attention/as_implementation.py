"""Implementations `library` and `library-over-ranks`: `dilated_attention` and `ring_attention` as a caller gets them.

The choice is in the row's notes. It is made when the function is built, so that measuring at the first use is set-up
and not part of a timed call.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dilabench.attention.function import attention
from dilabench.attention.over_ranks import SequenceShards, ring_attention, shards_in_world
from dilabench.choice.computation import automatic, machine_of
from dilabench.choice.rules import choose
from dilabench.choice.ways import own_ways, way_name
from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Shards
from dilabench.distributed.world import World
from dilabench.metadata import CHOSEN, Note
from dilabench.workload.spec import Workload

# The fields of a dilated pattern that `ring_attention` takes.
BRANCHES = ("segment_lengths", "dilation_rates")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The library's function for one workload. `notes`: its choice, and the time of choosing."""

    options: Mapping[str, Any]
    notes: tuple[Note, ...]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; packed: [T, H, D]."""
        return attention(q, k, v, **self.options)


def build(workload: Workload, context: BuildContext) -> Chosen:
    """Choose like the first call of this configuration; later calls reuse the result."""
    began = time.perf_counter_ns()
    choice, _ = automatic(workload, context.device)
    took_ns = time.perf_counter_ns() - began
    options = {
        "pattern": workload.pattern,
        "causal": workload.causal,
        "window": workload.window,
        "scale": workload.scale,
        "cu_seqlens": workload.cu_seqlens,
    }
    why = f"{choice.source}: {choice.times}" if choice.times else choice.source
    return Chosen(options, (CHOSEN.note(f"{way_name(choice)} ({why})", observed=took_ns),))


@dataclass(frozen=True, slots=True)
class ChosenOverRanks:
    """`ring_attention` for one workload. `notes`: the algorithm that it takes, and the time of choosing."""

    sequence_shards: SequenceShards
    options: Mapping[str, Any]
    notes: tuple[Note, ...]

    @property
    def shards(self) -> Shards:
        """The positions of each rank."""
        return self.sequence_shards.shards

    @property
    def world(self) -> World:
        """The ranks."""
        return self.sequence_shards.world

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out of this rank's q [B, N_local, H, D] and k, v [B, N_local, K, D]; packed: [T_local, H, D]."""
        return ring_attention(q, k, v, self.sequence_shards, **self.options)


def build_over_ranks(workload: Workload, context: BuildContext) -> ChosenOverRanks:
    """Tokens in the order of the algorithm that is expected to be the fastest, which `ring_attention` then takes."""
    began = time.perf_counter_ns()
    world, ways = context.world or World.single(context.device), own_ways(over_ranks=True)
    choice = choose(ways, machine_of(context.device), workload, max(2, world.size))
    sharding = ways.sharding_of(choice.implementation)
    order = (sharding.order(workload) if sharding else None) or "contiguous"
    bounds = workload.cu_seqlens or (0, workload.seq_len)
    shards = shards_in_world(world, bounds, order, workload.window, packed=workload.layout == "packed")
    took_ns = time.perf_counter_ns() - began
    pattern = {} if workload.is_dense else {name: getattr(workload.pattern, name) for name in BRANCHES}
    options = {**pattern, "causal": workload.causal, "window": workload.window, "scale": workload.scale}
    message = f"{choice.implementation} ({choice.source}), tokens {order}"
    return ChosenOverRanks(shards, options, (CHOSEN.note(message, observed=took_ns),))

"""Attention for your own models, without the benchmark around it.

    from dilabench.attention import dilated_attention

    out = dilated_attention(q, k, v, segment_lengths=(2048, 4096), dilation_rates=(1, 2), causal=True)

`dilated_attention` and its modules compute on one device, `ring_attention` over the ranks of a process group; it is
imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dilabench.attention.dilated import DilatedAttention, MultiheadDilatedAttention, dilated_attention

if TYPE_CHECKING:
    from dilabench.attention.over_ranks import SequenceShards, ring_attention, sequence_shards

__all__ = [
    "DilatedAttention",
    "MultiheadDilatedAttention",
    "SequenceShards",
    "dilated_attention",
    "ring_attention",
    "sequence_shards",
]


def __getattr__(name: str) -> Any:
    if name in {"SequenceShards", "ring_attention", "sequence_shards"}:
        return getattr(importlib.import_module("dilabench.attention.over_ranks"), name)
    raise AttributeError(f"module 'dilabench.attention' has no attribute {name!r}")

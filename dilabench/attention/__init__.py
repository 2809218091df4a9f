"""Attention for your own models, without the benchmark around it.

    from dilabench.attention import dilated_attention

    out = dilated_attention(q, k, v, segment_lengths=(2048, 4096), dilation_rates=(1, 2), causal=True)

`dilated_attention` and its modules compute on one device, `ring_attention` over the ranks of a process group.
"""

from dilabench.attention.dilated import DilatedAttention, MultiheadDilatedAttention, dilated_attention
from dilabench.attention.over_ranks import SequenceShards, ring_attention, sequence_shards

__all__ = [
    "DilatedAttention",
    "MultiheadDilatedAttention",
    "SequenceShards",
    "dilated_attention",
    "ring_attention",
    "sequence_shards",
]

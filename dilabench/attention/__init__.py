"""Attention for your own models, without the benchmark around it.

    from dilabench.attention import attention, dilated_attention

    out = attention(q, k, v, causal=True)
    out = dilated_attention(q, k, v, segment_lengths=(2048, 4096), dilation_rates=(1, 2), causal=True)

`attention` computes any pattern; `dilated_attention` and `block_sparse_attention` are its shorthands. They compute on
one device, `ring_attention` over the ranks of a process group. Names that are not imported below load at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dilabench.attention.dilated import DilatedAttention, KeyValueCache, MultiheadDilatedAttention, dilated_attention

if TYPE_CHECKING:
    from dilabench.attention.function import attention, block_sparse_attention
    from dilabench.attention.native_sparse import BlockCompression, NativeSparseAttention, native_sparse_attention
    from dilabench.attention.over_ranks import SequenceShards, ring_attention, sequence_shards

__all__ = [
    "BlockCompression",
    "DilatedAttention",
    "KeyValueCache",
    "MultiheadDilatedAttention",
    "NativeSparseAttention",
    "SequenceShards",
    "attention",
    "block_sparse_attention",
    "dilated_attention",
    "native_sparse_attention",
    "ring_attention",
    "sequence_shards",
]


_LATER = {
    "BlockCompression": "native_sparse",
    "NativeSparseAttention": "native_sparse",
    "SequenceShards": "over_ranks",
    "attention": "function",
    "block_sparse_attention": "function",
    "native_sparse_attention": "native_sparse",
    "ring_attention": "over_ranks",
    "sequence_shards": "over_ranks",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"dilabench.attention.{_LATER[name]}"), name)
    raise AttributeError(f"module 'dilabench.attention' has no attribute {name!r}")

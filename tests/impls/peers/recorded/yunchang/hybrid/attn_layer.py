"""The signature and the shards (`zigzag_extract_local`) of yunchang 0.6.4."""

import torch
import torch.distributed as dist
from attention_over_ranks import attend, zigzag

from yunchang.globals import PROCESS_GROUP


class LongContextAttention(torch.nn.Module):
    def __init__(
        self, scatter_idx=2, gather_idx=1, ring_impl_type="basic", use_pack_qkv=False, use_sync=False, attn_type=None,
        attn_processor=None,
    ):  # fmt: skip
        super().__init__()
        assert ring_impl_type == "zigzag"
        self.heads, self.ring = PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG

    def forward(
        self, query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert causal
        rows = query.shape[1] * self.heads.size()
        positions = zigzag(rows, self.ring).chunk(self.heads.size())[dist.get_rank(self.heads)]
        return attend(query, key, value, positions, causal, softmax_scale)[0]

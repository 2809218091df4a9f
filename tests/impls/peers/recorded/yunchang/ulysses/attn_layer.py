"""The signature of yunchang 0.6.4."""

import torch
import torch.distributed as dist
from attention_over_ranks import attend
from flash_attn import flash_attn_func  # noqa: F401


class UlyssesAttention(torch.nn.Module):
    def __init__(self, sequence_process_group=None, scatter_idx=2, gather_idx=1, use_sync=False, attn_type=None):
        super().__init__()
        self.group = sequence_process_group

    def forward(
        self, query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert query.shape[2] % self.group.size() == key.shape[2] % self.group.size() == 0
        positions = torch.arange(query.shape[1]) + dist.get_rank(self.group) * query.shape[1]
        return attend(query, key, value, positions, causal, softmax_scale, self.group)[0]

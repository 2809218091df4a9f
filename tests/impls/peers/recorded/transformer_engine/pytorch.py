"""The signature of TransformerEngine's DotProductAttention, August 2026: sequences are cut zigzag for every way."""

import torch
from attention_over_ranks import attend, zigzag


class DotProductAttention(torch.nn.Module):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, sequence_parallel=False, tp_size=1,
        get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self", cp_group=None,
        cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
        return_max_logit=False, name=None,
    ):  # fmt: skip
        super().__init__()
        assert qkv_format == "bshd"
        assert cp_comm_type in ("p2p", "a2a")
        assert cp_global_ranks == list(range(cp_group.size()))
        self.causal, self.scale, self.group = attn_mask_type == "causal", softmax_scale, cp_group

    def forward(self, query_layer=None, key_layer=None, value_layer=None):
        positions = zigzag(query_layer.shape[1], self.group)
        out, _ = attend(query_layer, key_layer, value_layer, positions, self.causal, self.scale, self.group)
        return out.flatten(2)

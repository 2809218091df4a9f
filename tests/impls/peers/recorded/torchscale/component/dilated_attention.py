"""The signature of torchscale's DilatedAttention, branch by branch and head by head."""

import torch
from torch import nn

from torchscale.component.flash_attention import flash_attn_func


class DilatedAttention(nn.Module):
    def __init__(
        self, args, embed_dim, num_heads, dropout=0.0, self_attention=False, encoder_decoder_attention=False,
        subln=False,
    ):  # fmt: skip
        super().__init__()
        assert self_attention
        assert not args.multiway
        assert not args.xpos_rel_pos
        self.args, self.num_heads, self.dropout = args, num_heads, dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(
        self, query, key, value, incremental_state=None, key_padding_mask=None, attn_mask=None, rel_pos=None,
        is_first_step=False, is_causal=False,
    ):  # fmt: skip
        assert self.args.flash_attention
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in projected)
        branches = [
            self.branch(q, k, v, segment, rate, is_causal)
            for segment, rate in zip(self.args.segment_length, self.args.dilated_ratio, strict=True)
        ]
        outs, lses = (torch.stack(parts) for parts in zip(*branches, strict=True))
        weights = lses.detach().softmax(0).unsqueeze(-1)
        out = (outs * weights.to(outs)).sum(0)
        return self.out_proj(out.flatten(2)), None

    def branch(self, q, k, v, segment, rate, is_causal):
        """out [B, N, H, D] and lse [B, N, H]; rows off a head's residue have 0 and a weight of nothing."""
        length, per_offset = q.shape[1], -(-self.num_heads // rate)
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -1e8)
        segment = min(segment, length)
        for start in range(0, length, segment):
            for head in range(self.num_heads):
                rows = torch.arange(start + head // per_offset, start + -(-segment // rate) * rate, rate)
                there = rows[(rows < length) & (rows < start + segment)]
                parts = (torch.zeros_like(x[:, :1, [head]].repeat(1, len(rows), 1, 1)) for x in (q, k, v))
                filled = [
                    part.index_copy(1, torch.arange(len(there)), x[:, there][:, :, [head]])
                    for part, x in zip(parts, (q, k, v), strict=True)
                ]
                found, sums = flash_attn_func(*filled, self.dropout, None, None, is_causal)
                place = (slice(None), there, head)
                out = out.index_put(
                    (torch.arange(len(q))[:, None], there, torch.tensor(head)), found[:, : len(there), 0]
                )
                lse[place] = sums[:, 0, : len(there)].to(lse)
        return out, lse

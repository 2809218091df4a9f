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
        self.args, self.embed_dim, self.num_heads, self.dropout = args, embed_dim, num_heads, dropout
        self.head_dim, self.xpos = embed_dim // num_heads, None
        self.inner_attn_ln = nn.LayerNorm(embed_dim, eps=args.layernorm_eps) if subln else None
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
        out = (outs * weights.to(outs)).sum(0).flatten(2)
        return self.out_proj(out if self.inner_attn_ln is None else self.inner_attn_ln(out)), None

    def branch(self, q, k, v, segment, rate, is_causal):
        """out [B, N, H, D] and lse [B, N, H]; rows off a head's residue have 0 and a weight of nothing."""
        batch, length, per_offset = len(q), q.shape[1], -(-self.num_heads // rate)
        segment = min(segment, length)
        starts = torch.arange(0, length, segment)[:, None]
        outs, sums = [], []
        for head in range(self.num_heads):
            rows = starts + head // per_offset + rate * torch.arange(-(-segment // rate))
            # Row `length` is the zero that is padded with, and where results of padding go.
            rows = torch.where((rows < length) & (rows < starts + segment), rows, length)
            padded = (nn.functional.pad(x[:, :, head], (0, 0, 0, 1)) for x in (q, k, v))
            parts = (x[:, rows].flatten(0, 1)[:, :, None] for x in padded)
            found, lse = flash_attn_func(*parts, self.dropout, None, None, is_causal)
            found, lse = found.view(batch, -1, q.shape[-1]), lse.reshape(batch, -1).to(q)
            empty = q.new_zeros(batch, length + 1, q.shape[-1])
            outs.append(empty.index_copy(1, rows.flatten(), found)[:, :length])
            sums.append(q.new_full((batch, length + 1), -1e8).index_copy(1, rows.flatten(), lse)[:, :length])
        return torch.stack(outs, 2), torch.stack(sums, 2)

    # torchscale's steps of a branch, whose names tell its module from others.
    dense_to_sparse = sparse_to_dense = branch

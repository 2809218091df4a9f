"""The signatures of MagiAttention, May 2026; chunks are dealt in turns where its solver would weigh them."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from attention_over_ranks import attend

CHUNKS_PER_RANK = 8


def magi_attn_flex_key(
    q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k, num_heads_q, num_heads_kv, head_dim, pad_size,
    cp_group_or_mesh, dist_attn_config=None, is_same_source=True, is_q_permutable=True, is_k_permutable=True,
    chunk_size=None,
):  # fmt: skip
    group = cp_group_or_mesh
    assert q_ranges == k_ranges == [[0, total_seqlen_q]]
    assert attn_mask_type in ("causal", "full")
    chunks = torch.arange(total_seqlen_q).chunk(CHUNKS_PER_RANK * group.size())
    positions = torch.cat(chunks[dist.get_rank(group) :: group.size()])
    return SimpleNamespace(positions=positions, causal=attn_mask_type == "causal", group=group)


def get_position_ids(key):
    return key.positions


def calc_attn(q, k, v, key, sink=None, softmax_scale=None, softcap=0.0, return_max_logits=False):
    out, lse = attend(q[None], k[None], v[None], key.positions, key.causal, softmax_scale, key.group)
    return out[0], SimpleNamespace(lse=lse[0], max_logits=None)

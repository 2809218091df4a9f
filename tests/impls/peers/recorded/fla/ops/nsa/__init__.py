"""The signature of fla-core 0.6.0's parallel_nsa, without gates. A negative index is no block, and a repeated one
counts twice.
"""

import torch


def parallel_nsa(
    q, k, v, g_cmp=None, g_slc=None, g_swa=None, block_indices=None, block_counts=16, block_size=64, window_size=0,
    scale=None, cu_seqlens=None,
):  # fmt: skip
    assert g_cmp is g_slc is g_swa is cu_seqlens is None
    assert block_indices.dtype == torch.int64
    assert block_indices.is_contiguous()
    assert window_size == 0
    batch, length, kv_heads, selected = block_indices.shape
    assert q.shape[:2] == k.shape[:2] == (batch, length)
    assert k.shape[2] == kv_heads
    assert block_counts == selected
    blocks = -(-length // block_size)
    chosen = block_indices.where(block_indices >= 0, blocks)
    times = torch.zeros(*chosen.shape[:3], blocks + 1, dtype=q.dtype)
    times.scatter_add_(-1, chosen, torch.ones_like(chosen, dtype=q.dtype))
    group = q.shape[2] // kv_heads
    count = times[..., :blocks].repeat_interleave(block_size, -1)[..., :length].transpose(1, 2).tril()
    keys, values = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ keys.mT * scale + count.repeat_interleave(group, 1).log()
    return (scores.softmax(-1) @ values).transpose(1, 2)

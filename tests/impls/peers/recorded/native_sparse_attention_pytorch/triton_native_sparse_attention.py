"""The signature of native-sparse-attention-pytorch 0.2.3's native_sparse_attend. Each token sees its own block, too."""

import torch


def native_sparse_attend(
    fq, fk, fv, block_size, selected_block_indices, fmask, sel_scale=None, include_block_causal=True, return_lse=False,
    block_dk_dv_use_dot=False, return_sliding_window_out=False,
):  # fmt: skip
    assert sel_scale is None
    assert include_block_causal
    assert return_lse is block_dk_dv_use_dot is return_sliding_window_out is False
    batch, kv_heads, length, _ = selected_block_indices.shape
    assert fmask.shape == selected_block_indices.shape
    assert fmask.dtype == torch.bool
    assert (fk.shape[:3], fq.shape[2]) == ((batch, kv_heads, length), length)
    group, dim = fq.shape[1] // kv_heads, fq.shape[3]
    row, blocks = torch.arange(length), -(-length // block_size)
    times = torch.zeros(batch, kv_heads, length, blocks, dtype=fq.dtype)
    times.scatter_add_(-1, selected_block_indices, fmask.to(fq.dtype))
    assert not times[..., row, row // block_size].any()
    times[..., row, row // block_size] = 1
    count = times.repeat_interleave(block_size, -1)[..., :length].tril()
    keys, values = (x.repeat_interleave(group, 1) for x in (fk, fv))
    scores = fq @ keys.mT * dim**-0.5 + count.repeat_interleave(group, 1).log()
    return scores.softmax(-1) @ values

"""The signature of natten 0.21.6, with the mask of its reference kernels in place of them."""

import torch
from attention_over_ranks import masked


def na1d(
    query, key, value, kernel_size, stride=1, dilation=1, is_causal=False, scale=None, additional_keys=None,
    additional_values=None, attention_kwargs=None, backend=None, q_tile_shape=None, kv_tile_shape=None,
    backward_q_tile_shape=None, backward_kv_tile_shape=None, backward_kv_splits=None, backward_use_pt_reduction=False,
    run_persistent_kernel=True, kernel_schedule=None, torch_compile=False, return_lse=False,
):  # fmt: skip
    assert stride == 1
    assert kernel_size > 1
    assert kernel_size * dilation <= query.shape[1]
    places, residues = (f(torch.arange(query.shape[1]), dilation) for f in (torch.floor_divide, torch.remainder))
    length = (query.shape[1] - residues + dilation - 1) // dilation
    left, right = kernel_size // 2, kernel_size // 2 + kernel_size % 2 - 1
    if is_causal:
        start, end = (places - left - right).clamp(min=0), places + 1
    else:
        over = (places + right >= length) * (length - right - places - 1)
        start = (places - left).clamp(min=0) + over
        end = start + kernel_size
    near = (places >= start[:, None]) & (places < end[:, None]) & (residues == residues[:, None])
    out, lse = masked(query, key, value, near, scale)
    return (out, lse) if return_lse else out

"""The signature of ring_flash_attn 0.1.8."""

from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

from ring_flash_attn.blocks import Blocks


def zigzag_ring_flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False, return_attn_probs=False, group=None,
):  # fmt: skip
    assert causal
    kernels = _flash_attn_forward, _flash_attn_backward
    out, lse = Blocks.apply(q, k, v, softmax_scale, causal, lambda r, size: (r, 2 * size - 1 - r), kernels, group)
    return (out, lse, None) if return_attn_probs else out

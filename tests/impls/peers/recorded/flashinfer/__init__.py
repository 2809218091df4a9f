"""The signatures of flashinfer 0.7.2.post1's block-sparse wrappers, whose log-sum-exp has base 2."""

import math

import torch
from attention_over_ranks import masked


class BlockSparseAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, mask=None, packed_mask=None,
        causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type="float16",
        non_blocking=True, block_mask=None, kv_block_lens=None, q2k_indices=None, q2k_num=None, kv_splits=None,
        use_clc=None, q_scale=None, k_scale=None, v_scale=None,
    ):  # fmt: skip
        assert indptr.dtype == indices.dtype == torch.int32
        assert N % C == 0
        blocks = torch.zeros(len(indptr) - 1, N // C, dtype=bool)
        for row in range(len(blocks)):
            blocks[row, indices[indptr[row] : indptr[row + 1]]] = True
        self.visible = blocks.repeat_interleave(R, 0)[:M].repeat_interleave(C, 1)
        self.scale, self.dtype = sm_scale, o_data_type

    def run(
        self, q, k, v, scale_q=None, scale_k=None, scale_v=None, out=None, lse=None, return_lse=False, enable_pdl=None
    ):
        out, lse = (x[0] for x in masked(q[None], k[None], v[None], self.visible, self.scale))
        assert out.dtype == self.dtype
        return (out, lse / math.log(2)) if return_lse else out


class VariableBlockSparseAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8
        self.cake = backend == "cake"

    def plan(
        self, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None,
        rope_theta=None, non_blocking=True, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert (
            block_mask_map.shape[:2] == block_row_sz.shape == block_col_sz.shape == (num_kv_heads, len(block_row_sz[0]))
        )
        if self.cake:
            assert block_mask_map.dtype == torch.bool
            assert num_qo_heads == num_kv_heads
            assert set(torch.cat([block_row_sz, block_col_sz], 1).unique().tolist()) == {64}
            assert set(block_mask_map.sum(-1).unique().tolist()) <= set(range(1, 65))
        visible = [
            mask.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            for mask, rows, columns in zip(block_mask_map, block_row_sz, block_col_sz, strict=True)
        ]
        self.visible = torch.stack(visible).repeat_interleave(num_qo_heads // num_kv_heads, 0)
        self.scale = sm_scale

    def run(self, q, k, v, out=None, lse=None, return_lse=False, enable_pdl=None):
        if self.cake:
            assert not return_lse
            assert all(x.is_contiguous() for x in (q, k, v))
        out, lse = (
            x[0].transpose(0, 1)
            for x in masked(*(x.transpose(0, 1)[None] for x in (q, k, v)), self.visible, self.scale)
        )
        return (out, lse / math.log(2)) if return_lse else out

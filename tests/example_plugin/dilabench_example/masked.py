"""Dilated attention as one dense softmax: log C[h, i, j] is added to the scores."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilabench.contracts import AttentionFn, BuildContext
from dilabench.workload.spec import Workload
from dilabench.workload.work import head_branches, head_offset


def build(workload: Workload, context: BuildContext) -> AttentionFn:
    heads, pattern = workload.num_heads, workload.pattern
    i = torch.arange(workload.seq_len, device=context.device)
    counts = torch.zeros(heads, len(i), len(i), device=context.device)
    for head in range(heads):
        for w, r in head_branches(pattern, head, heads):
            kept = i % w % r == head_offset(pattern, head, r, heads, workload.num_kv_heads)
            counts[head] += kept & kept[:, None] & (i // w == i[:, None] // w)
    bias = (counts.tril() if workload.causal else counts).log().to(getattr(torch, workload.dtype))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, bias, scale=workload.softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)

    return attention

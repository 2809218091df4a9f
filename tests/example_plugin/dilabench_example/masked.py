"""Any pattern as one dense softmax: log C[h, i, j] is added to the scores."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilabench.contracts import AttentionFn, BuildContext
from dilabench.impls.visible_keys import multiplicity
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> AttentionFn:
    def bias_of_scores() -> Tensor:
        rows = torch.arange(workload.seq_len)
        counts = torch.stack([multiplicity(workload, head, rows) for head in range(workload.num_heads)])
        return counts.to(context.device, getattr(torch, workload.dtype)).log()

    # Kept between calls in the cache, whose size a run limits, counts and reports.
    bias = context.patterns.get(("masked", workload), bias_of_scores)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, bias, scale=workload.softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)

    return attention

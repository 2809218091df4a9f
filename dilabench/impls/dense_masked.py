"""`dense-masked`: one dense softmax with log C as its bias. The cost of a pattern without skipping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilabench.contracts import BuildContext
from dilabench.impls.visible_keys import multiplicity
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import alike_heads


def build(workload: Workload, context: BuildContext) -> DenseMasked:
    """The bias [1 or H, N, N] is made here, once."""
    rows = torch.arange(workload.seq_len, device="cpu")
    groups = alike_heads(workload)
    # One bias serves all heads if they are alike.
    kinds = groups if len(groups) == 1 else [[head] for head in range(workload.num_heads)]
    counts = torch.stack([multiplicity(workload, heads[0], rows) for heads in kinds])
    empty = (counts == 0).all(-1)
    # A softmax over no key is NaN: such rows see every key, and their out is set to 0.
    bias = counts.masked_fill_(empty[..., None], 1).double().log().to(context.device, getattr(torch, workload.dtype))
    return DenseMasked(bias, empty.to(context.device) if empty.any() else None, workload.softmax_scale)


@dataclass(frozen=True, slots=True)
class DenseMasked:
    """Torch's attention under a bias [1 or H, N, N]; `empty` [1 or H, N]: the rows that see no key."""

    bias: Tensor
    empty: Tensor | None
    scale: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; differentiable."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        gqa = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, self.bias, scale=self.scale, enable_gqa=gqa)
        if self.empty is not None:
            out = out.masked_fill(self.empty[..., None], 0.0)
        return out.transpose(1, 2)

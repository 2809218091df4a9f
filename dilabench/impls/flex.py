"""`flex` and `flex-permuted`: FlexAttention with the pattern as block mask and log C as score.

`flex` keeps the tokens in their order: an r = 4 branch leaves every block of its segment partly filled, which is what
plain masking costs. `flex-permuted` orders the tokens by residue class first, so that blocks are wholly visible or not
at all; moving the tokens there and back is part of the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from dilabench.contracts import BuildContext
from dilabench.spec import DilatedPattern, Workload
from dilabench.work import head_branches, head_offset

ABSENT = -1
Index = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def build(workload: Workload, context: BuildContext) -> Flex:
    """Tokens in their own order. The block mask is built here, once."""
    return _build(workload, context, None)


def build_permuted(workload: Workload, context: BuildContext) -> Flex:
    """Tokens ordered by residue class inside the longest segment."""
    pattern = _dilated(workload)
    modulus = math.lcm(*pattern.dilation_rates)
    longest = min(max(pattern.segment_lengths), workload.seq_len)
    tokens = torch.arange(workload.seq_len, device=context.device)
    key = (tokens // longest * modulus + tokens % longest % modulus) * longest + tokens % longest
    return _build(workload, context, torch.argsort(key))


@dataclass(frozen=True, slots=True)
class Flex:
    """FlexAttention with a mask and a score; `order` [N] is the token at each place, None for their own order."""

    run: Callable[..., Tensor]
    mask: flex.BlockMask
    score: Score
    scale: float
    order: Tensor | None
    back: Tensor | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; differentiable."""
        if self.order is not None:
            q, k, v = (x.index_select(1, self.order) for x in (q, k, v))
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = self.run(
            *heads_first,
            score_mod=self.score,
            block_mask=self.mask,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        ).transpose(1, 2)
        return out.contiguous() if self.back is None else out.index_select(1, self.back)


def _build(workload: Workload, context: BuildContext, order: Tensor | None) -> Flex:
    count = _multiplicity(workload, context.device, order)
    left, right = workload.window

    def place(index: Tensor) -> Tensor:
        return index if order is None else order[index]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        i_token, j_token = place(i), place(j)
        seen = count(b, h, i, j) > 0
        if workload.causal:
            seen = seen & (j_token <= i_token)
        if left >= 0:
            seen = seen & (j_token >= i_token - left)
        if right >= 0:
            seen = seen & (j_token <= i_token + right)
        return seen

    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return logit + torch.log(count(b, h, i, j).to(torch.float32))

    on_gpu = context.device.type == "cuda"
    make_mask = torch.compile(flex.create_block_mask) if on_gpu else flex.create_block_mask
    mask = make_mask(visible, None, workload.num_heads, workload.seq_len, workload.seq_len, device=str(context.device))
    run = torch.compile(flex.flex_attention, fullgraph=True, dynamic=False) if on_gpu else flex.flex_attention
    back = None if order is None else torch.argsort(order)
    return Flex(run, mask, score, workload.softmax_scale, order, back)


def _multiplicity(workload: Workload, device: torch.device, order: Tensor | None) -> Index:
    """C[h, i, j] without causal mask and window, as elementwise arithmetic on index tensors."""
    pattern = _dilated(workload)
    offsets = torch.full((len(pattern.branches), workload.num_heads), ABSENT, device=device)
    for head in range(workload.num_heads):
        own = head_branches(pattern, head, workload.num_heads)
        for index, (segment, rate) in enumerate(pattern.branches):
            if (segment, rate) in own:
                offsets[index, head] = head_offset(pattern, head, rate, workload.num_heads, workload.num_kv_heads)

    def count(_b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if order is not None:
            i, j = order[i], order[j]
        total = torch.zeros_like(i + j)
        for index, (segment, rate) in enumerate(pattern.branches):
            offset = offsets[index, h]
            same_segment = (i // segment) == (j // segment)
            on_residue = ((i % segment) % rate == offset) & ((j % segment) % rate == offset)
            total = total + (same_segment & on_residue).to(total.dtype)
        return total

    return count


def _dilated(workload: Workload) -> DilatedPattern:
    assert isinstance(workload.pattern, DilatedPattern)
    return workload.pattern

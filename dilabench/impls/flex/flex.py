"""`flex` and `flex-permuted`: FlexAttention with the pattern as block mask and log C as score.

`flex` keeps the tokens in their order: an r = 4 branch leaves every block of its segment partly filled, which is what
plain masking costs. `flex-permuted` orders the tokens by residue class first, so that blocks are wholly visible or not
at all; moving the tokens there and back is part of the call.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from dilabench.contracts import BuildContext
from dilabench.impls.flex.blocks import block_mask, head_offsets
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload

Index = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def build(workload: Workload, context: BuildContext) -> Flex:
    """Tokens in their own order. The block mask is built here, once."""
    return _build(workload, context, None)


def build_permuted(workload: Workload, context: BuildContext) -> Flex:
    """Tokens ordered by residue class inside the longest segment."""
    pattern = DilatedPattern.of(workload)
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
        out = self.run(*(x.transpose(1, 2) for x in (q, k, v)), self.score, self.mask, self.scale).transpose(1, 2)
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

    tokens = torch.arange(workload.seq_len, device=context.device) if order is None else order
    mask = block_mask(workload, tokens, visible)
    run: Callable[..., Tensor] = _attend
    if context.device.type == "cuda":
        # torch.compile gives up on one function after eight classes of shapes: each build compiles its own.
        own_code = types.FunctionType(_attend.__code__.replace(), _attend.__globals__)
        run = torch.compile(own_code, fullgraph=True, dynamic=False)
    back = None if order is None else torch.argsort(order)
    return Flex(run, mask, score, workload.softmax_scale, order, back)


def _attend(q: Tensor, k: Tensor, v: Tensor, score: Score, mask: flex.BlockMask, scale: float) -> Tensor:
    enable_gqa = q.shape[1] != k.shape[1]
    out = flex.flex_attention(q, k, v, score_mod=score, block_mask=mask, scale=scale, enable_gqa=enable_gqa)
    assert isinstance(out, Tensor)
    return out


def _multiplicity(workload: Workload, device: torch.device, order: Tensor | None) -> Index:
    """C[h, i, j] without causal mask and window, as elementwise arithmetic on index tensors."""
    pattern = DilatedPattern.of(workload)
    offsets = torch.tensor(head_offsets(workload), device=device).T.contiguous()

    def count(_b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if order is not None:
            i, j = order[i], order[j]
        total = torch.zeros_like(i + j)
        for index, (segment, rate) in enumerate(pattern.branches):
            offset = offsets[index, h]
            # The segment of each, or what no other has: one comparison is left for every pair.
            mine = torch.where(i % segment % rate == offset, i // segment, -1)
            theirs = torch.where(j % segment % rate == offset, j // segment, -2)
            total = total + (mine == theirs).to(total.dtype)
        return total

    return count

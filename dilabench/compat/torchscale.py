"""torchscale's `DilatedAttention` without flash-attn: any device, any floating type, the same numbers.

    from dilabench.compat.torchscale import patch

    patch(model)  # every dilated attention in a loaded torchscale, LongViT or Prov-GigaPath model

torchscale computes one softmax over all branches, with attended zero keys, blocked head offsets and a merge without
gradient (docs/explanation/semantics.md). Parameters, names and signatures are torchscale's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dilabench.attention import dilated_attention, operands

__all__ = ["DilatedAttention", "Multiway", "XPos", "packed", "patch"]

MergeGrad = Literal["exact", "detached"]


class Multiway(nn.Module):
    """Two copies of a module: A for the positions before `split_position` of dimension `dim`, B for the rest.

    -1, the initial value, is A for all. torchscale's encoders set it on every module with an attribute of that name.
    """

    def __init__(self, module: nn.Module, dim: int = 1) -> None:
        super().__init__()
        self.A, self.B = module, deepcopy(module)
        self.B.reset_parameters()  # type: ignore[operator]
        self.dim, self.split_position = dim, -1

    def forward(self, x: Tensor) -> Tensor:
        """Apply `module` to x, part by part."""
        if self.split_position in (-1, 0):
            return self.A(x) if self.split_position else self.B(x)
        first, second = x.tensor_split([self.split_position], self.dim)
        return torch.cat([self.A(first), self.B(second)], self.dim)


class XPos(nn.Module):
    """Rotary positions whose length decays with distance (xPos, arXiv 2212.10554), in torchscale's convention.

    Raises ValueError for an odd head dim, whose channels do not pair up.
    """

    scale: Tensor

    def __init__(self, head_dim: int, scale_base: float = 512) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"xPos rotates pairs of channels, and head_dim {head_dim} is odd; use an even one")
        self.head_dim, self.scale_base = head_dim, scale_base
        self.register_buffer("scale", (torch.arange(0, head_dim, 2) + 0.4 * head_dim) / (1.4 * head_dim))

    def forward(self, x: Tensor, offset: int = 0, downscale: bool = False) -> Tensor:
        """x [B·H, N, D] turned by its positions, which begin at `offset`; `downscale` is for keys."""
        stop, pairs = x.shape[1] + offset, self.head_dim // 2
        # In the buffer's dtype and in this order, because in half precision every rounding matters.
        power = torch.arange(stop, device=x.device).sub_((stop + 1) // 2).to(self.scale) / self.scale_base
        length = self.scale ** power[:, None]
        frequency = 1.0 / 10000 ** (torch.arange(pairs, device=x.device, dtype=torch.float) / pairs)
        angle = torch.outer(torch.arange(stop, device=x.device, dtype=torch.float), frequency).to(length)
        length, angle = length[offset:], angle[offset:]
        length = 1 / length if downscale else length
        cos, sin = ((turn * length).repeat_interleave(2, -1) for turn in (angle.cos(), angle.sin()))
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * sin


class DilatedAttention(nn.Module):
    """torchscale's module of the same name: the same constructor, call, return and state dict, with or without
    sub-layer norm, multiway and xPos.

    args: an object with torchscale's fields `segment_length`, `dilated_ratio`, `multiway`, `layernorm_eps`,
    `xpos_rel_pos` and `xpos_scale_base`, such as its configurations. `merge_grad` is "detached", torchscale's gradient,
    or "exact", the derivative of the output, which takes less time and memory. Raises ValueError for sizes that do not
    divide, and unless exactly one of self-attention and encoder-decoder attention is set.
    """

    merge_grad: MergeGrad = "detached"
    cu_seqlens: Sequence[int] | None = None

    def __init__(
        self,
        args: Any,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        subln: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if self_attention == encoder_decoder_attention:
            raise ValueError(f"self_attention and encoder_decoder_attention are both {self_attention}; set one of them")
        operands.integers("segment_length", args.segment_length)
        operands.integers("dilated_ratio", args.dilated_ratio)
        self.args, self.embed_dim, self.num_heads, self.dropout = args, embed_dim, num_heads, dropout
        self.self_attention, self.encoder_decoder_attention = self_attention, encoder_decoder_attention
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5

        def linear() -> nn.Module:
            made = nn.Linear(embed_dim, embed_dim)
            return Multiway(made) if args.multiway else made

        self.k_proj, self.v_proj, self.q_proj, self.out_proj = linear(), linear(), linear(), linear()
        self.inner_attn_ln: nn.Module | None = None
        self.xpos: nn.Module | None = None
        if subln and self_attention:
            norm = nn.LayerNorm(embed_dim, eps=args.layernorm_eps)
            self.inner_attn_ln = Multiway(norm) if args.multiway else norm
        if args.xpos_rel_pos and self_attention:
            self.xpos = XPos(self.head_dim, args.xpos_scale_base)

    def reset_parameters(self) -> None:
        """torchscale's initialisation: Xavier-uniform, for q, k and v divided by sqrt(2), and a zero output bias."""
        for projection, gain in ((self.k_proj, 0.5), (self.v_proj, 0.5), (self.q_proj, 0.5), (self.out_proj, 1.0)):
            for linear in projection.modules():
                if isinstance(linear, nn.Linear):
                    nn.init.xavier_uniform_(linear.weight, gain=math.sqrt(gain))
                    if projection is self.out_proj:
                        nn.init.zeros_(linear.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: Any = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,  # noqa: ARG002
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """([B, N, E], None) of query, key and value [B, N, E].

        incremental_state: torchscale's dict of a layer, `prev_key` and `prev_value` [B, H, N, D], to which keys and
        values of these tokens are added. With is_causal, results are the rows of one call over all tokens so far.
        torchscale itself gives a token another place in its segments (without xPos the first).

        key_padding_mask [B, N] is accepted and ignored, as in torchscale: its encoders always pass one, and padded
        positions are attended. Within `packed` N are the tokens of several sequences. Raises ValueError for features
        that torchscale lacks or computes wrongly: other masks, relative positions, keys of another length, states of
        packed sequences, a sequence over several ranks, segments that the rate does not divide; and for dropout of
        attention weights in training.
        """
        if reason := self._why_not(query, key, value, incremental_state, key_padding_mask, attn_mask, rel_pos):
            raise ValueError(reason)
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, self.head_dim))
            for projection, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        if incremental_state is not None:
            k, v = (self._with_earlier(x, incremental_state, name) for x, name in ((k, "prev_key"), (v, "prev_value")))
        if self.xpos is not None:
            q, k = self._turned(q, k.shape[1] - q.shape[1]), self._turned(k, downscale=True)
        bounds = self.cu_seqlens
        out = dilated_attention(
            *((q, k, v) if bounds is None else (q[0], k[0], v[0])),
            segment_lengths=self.args.segment_length,
            dilation_rates=self.args.dilated_ratio,
            causal=is_causal,
            offset="blocked",
            padding="zero_key",
            merge_grad=self.merge_grad,
            cu_seqlens=bounds,
        ).flatten(-2)
        if bounds is not None:
            out = out[None]
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        return self.out_proj(out), None

    @staticmethod
    def _with_earlier(x: Tensor, state: Any, name: str) -> Tensor:
        """[B, N + M, H, D]: the keys or values of a state and x [B, M, H, D] behind them, which it then holds, too."""
        if name in state:
            x = torch.cat([state[name].transpose(1, 2), x], 1)
        state[name] = x.transpose(1, 2)
        return x

    def _turned(self, x: Tensor, offset: int = 0, downscale: bool = False) -> Tensor:
        """Rotate [B, N, H, D] by xPos, which may be torchscale's module and takes [B·H, N, D]. offset: of the first."""
        assert self.xpos is not None
        bounds = self.cu_seqlens or (0, x.shape[1])
        of_heads = x.transpose(1, 2).flatten(0, 1)
        parts = [of_heads[:, start:stop] for start, stop in pairwise(bounds) if stop > start] or [of_heads]
        turned = torch.cat([self.xpos(part, offset=offset, downscale=downscale) for part in parts], 1)
        return turned.to(x.dtype).unflatten(0, (-1, self.num_heads)).transpose(1, 2)

    def _why_not(
        self, query: Tensor, key: Tensor, value: Tensor, state: Any, padding: Tensor | None, *masks: Tensor | None
    ) -> str | None:
        if query.ndim != 3 or query.shape[-1] != self.embed_dim or not query.shape == key.shape == value.shape:
            shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
            return f"{shapes} must all be [B, N, {self.embed_dim}]; keys of another length need dense attention"
        if self.cu_seqlens is not None and (query.shape[0] != 1 or self.cu_seqlens[-1] != query.shape[1]):
            return f"query {tuple(query.shape)} must be [1, {self.cu_seqlens[-1]}, E] for the bounds that are set"
        if padding is not None and padding.shape != query.shape[:2]:
            return f"key_padding_mask {tuple(padding.shape)} must be [B, N], here {tuple(query.shape[:2])}"
        if any(mask is not None for mask in masks):
            return "attn_mask and rel_pos are not supported: flash attention takes none; use is_causal=True or no mask"
        if state is not None and self.cu_seqlens is not None:
            return "incremental_state within `packed`: a state holds a batch of equal lengths; leave out one of them"
        if self.training and self.dropout:
            return (
                f"dropout {self.dropout} of attention weights in training: they are never materialised, so that none "
                "can be dropped; set attention_dropout to 0 (`module.dropout = 0.0`), or call eval()"
            )
        length = query.shape[1]
        if getattr(self.args, "seq_parallel", False) and max(self.args.segment_length) > length and _ranks() > 1:
            return (
                f"seq_parallel over {_ranks()} ranks is not supported: segments reach beyond the {length} positions of "
                "one, and a causal mask in torchscale hides the rank's own keys; give each rank whole sequences "
                "and set seq_parallel=False"
            )
        return None


def patch(model: nn.Module, merge_grad: MergeGrad = "detached") -> list[str]:
    """Replace every dilated attention of torchscale in a model, in place, and return the names of the modules.

    Parameters, buffers, hooks and state dict do not change. A module is recognised by its parts, not by its package,
    because projects ship copies of torchscale. merge_grad: as for `DilatedAttention`. Raises ValueError for an unknown
    merge_grad.
    """
    if merge_grad not in get_args(MergeGrad):
        raise ValueError(f"merge_grad {merge_grad!r} is not one of {', '.join(get_args(MergeGrad))}")
    swapped = []
    for name, module in model.named_modules():
        # Wrappers (torch.compile, FSDP) expose the parts of the wrapped module, but not as their children.
        if all(hasattr(module, part) for part in _PARTS) and "q_proj" in dict(module.named_children()):
            # Only the class changes: references to the module stay valid, and its hooks still run.
            module.__class__ = DilatedAttention
            module.merge_grad = merge_grad
            swapped.append(name)
    return swapped


@contextmanager
def packed(model: nn.Module, cu_seqlens: Sequence[int] | Tensor) -> Iterator[None]:
    """Within this context the dilated attentions of a patched model take [1, T, E] for packed sequences, from
    ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``: segments, zero keys and positions restart in each.

    The model must not mix tokens elsewhere: class tokens and positions of whole sequences are up to the caller. Raises
    ValueError if no module is replaced, and for bounds that do not ascend from 0.
    """
    bounds = operands.bounds(cu_seqlens, 0)
    operands.without_empty(bounds, bounds[-1])
    modules = [module for module in model.modules() if isinstance(module, DilatedAttention)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no dilated attention of dilabench; call patch(model) first")
    for module in modules:
        module.cu_seqlens = bounds
    try:
        yield
    finally:
        for module in modules:
            del module.cu_seqlens


# The attributes that `forward` needs, and the two methods that distinguish torchscale's dilated attention from others.
_PARTS = (
    *("args", "embed_dim", "num_heads", "head_dim", "dropout", "q_proj", "k_proj", "v_proj", "out_proj"),
    *("inner_attn_ln", "xpos", "dense_to_sparse", "sparse_to_dense"),
)


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

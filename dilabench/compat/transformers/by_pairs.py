"""Attention by torch, with a mask for every pair: of calls whose parts dilabench does not compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def by_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: Tensor | None,
    selection: tuple[Tensor, int] | None,
    sinks: Tensor | None,
    softcap: float | None,
    options: dict[str, Any],
) -> Tensor:
    """out [B, M, H, D] by torch's attention with a mask for every pair, bool or added to scores; None is none. It has
    no softcap, with which plain products compute it.
    """
    rows, keys = query.shape[2], key.shape[2]
    if whole is None and options["is_causal"] and rows > 1 and not (selection is None and sinks is None):
        whole = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril()[None, None]
    if selection is not None:
        indices, size = selection
        blocks = -(-keys // size)
        index = indices.transpose(1, 2).long()
        chosen = torch.zeros(*index.shape[:3], blocks + 1, dtype=torch.bool, device=index.device)
        chosen = chosen.scatter(-1, torch.where(index < 0, blocks, index), value=True)[..., :blocks]
        chosen = chosen.repeat_interleave(size, -1)[..., :keys].repeat_interleave(query.shape[1] // index.shape[1], 1)
        if whole is None or whole.dtype == torch.bool:
            whole = chosen if whole is None else whole & chosen
        else:
            whole = torch.where(chosen, whole, torch.finfo(whole.dtype).min)
    if sinks is not None:
        # One more key whose scores are the sinks, and whose value is 0.
        added = query.new_zeros(()) if whole is None else whole
        if added.dtype == torch.bool:
            added = torch.zeros_like(added, dtype=query.dtype).masked_fill(~added, -torch.inf)
        of_sinks = sinks.to(query.dtype)[None, :, None, None].expand(query.shape[0], -1, rows, 1)
        whole = torch.cat([added.expand(query.shape[0], query.shape[1], rows, keys), of_sinks], -1)
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
        if options["position_bias"] is not None:
            options["position_bias"] = torch.nn.functional.pad(options["position_bias"], (0, 1))
    if whole is not None and whole.dtype != torch.bool:
        whole = whole.to(query.dtype)
    if softcap is not None:
        return _by_products(module, query, key, value, whole, softcap, options)
    out: Tensor = sdpa_attention_forward(module, query, key, value, whole, **options)[0]
    return out


def _by_products(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: Tensor | None,
    softcap: float,
    options: dict[str, Any],
) -> Tensor:
    """`by_sdpa` with capped scores, in memory for every pair."""
    scale = query.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = softcap * torch.tanh(query @ key.mT * scale / softcap)
    if options["position_bias"] is not None:
        scores = scores + options["position_bias"]
    rows, keys = scores.shape[-2:]
    if whole is None and options["is_causal"] and rows > 1:
        whole = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril()
    if whole is not None:
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~whole, hidden) if whole.dtype == torch.bool else scores + whole
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.nn.functional.dropout(scores.softmax(-1, wide), options["dropout"], module.training)
    return (weights.to(value.dtype) @ value).transpose(1, 2)

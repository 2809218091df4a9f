"""The keys that a model selects for each query: of tokens (DSA) or of blocks (MSA), as indices of `attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.compat.transformers.masks import Mask
from dilabench.patterns.pattern import Pattern


def selection_of(
    module: torch.nn.Module, query: Tensor, key: Tensor, indices: Tensor | None, block_indices: Tensor | None
) -> tuple[Tensor, int] | None:
    """The selected blocks of each query, [B, M, K or H, S], and the keys in a block; None without a selection."""
    if indices is not None:
        # A static cache has keys that are not there yet.
        there = torch.where(indices < key.shape[2], indices, -1)
        return there[:, :, None].expand(-1, -1, key.shape[1], -1), 1
    if block_indices is None:
        return None
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    heads = block_indices.shape[1]
    if not isinstance(size, int) or query.shape[1] % heads:
        raise ValueError(
            f"{type(module).__name__}: block_indices {tuple(block_indices.shape)} need a number of heads that divides "
            f"{query.shape[1]} and module.indexer.block_size, which is {size}; use attn_implementation='eager'"
        )
    if heads < key.shape[1]:
        block_indices = block_indices.repeat_interleave(key.shape[1] // heads, dim=1)
    there = torch.where(block_indices * size < key.shape[2], block_indices, -1)
    return there.transpose(1, 2), size


def why_not_selected(
    selection: tuple[Tensor, int], pattern: Pattern | None, parts: Mask | None, bounds: Tensor | None
) -> str | None:
    """The part of a selection that dilabench does not compute, or None."""
    _, size = selection
    if pattern is not None:
        return "the model selects its keys"
    if size != 1 and size % 16:
        return f"the model selects blocks of {size} keys, no multiple of 16"
    is_whole = parts is None or (parts.documents is None and parts.seen is None)
    if bounds is not None or (size != 1 and not is_whole):
        return "the model selects blocks of keys that count from the first token of a row, with padding or documents"
    return None


def in_documents(indices: Tensor, bounds: Tensor, tokens: Tensor | None) -> Tensor:
    """[T, K, S] of `indices` [B, N, K, S] of keys: counted from the first token of a document, -1 for keys of others.

    bounds: of documents among T tokens. tokens: int64 [T], their places among B·N; None is all in order.
    """
    batch, length = indices.shape[:2]
    device = indices.device
    tokens = torch.arange(batch * length, device=device) if tokens is None else tokens
    bounds = bounds.to(device=device, dtype=torch.int64)
    row = torch.arange(batch, device=device)[:, None, None, None]
    chosen = (indices.long() + row * length).flatten(0, 1)[tokens]
    is_given = indices.flatten(0, 1)[tokens] >= 0
    place = torch.full((batch * length,), -1, device=device).index_copy(
        0, tokens, torch.arange(len(tokens), device=device)
    )
    document = torch.searchsorted(bounds, torch.arange(len(tokens), device=device), right=True) - 1
    first, end = bounds[document][:, None, None], bounds[document + 1][:, None, None]
    places = place[chosen.clamp(min=0)]
    return torch.where(is_given & (places >= first) & (places < end), places - first, -1)

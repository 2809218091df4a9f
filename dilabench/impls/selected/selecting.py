"""Selectors per query token and key/value head, on the tensors' device: which key blocks each token attends to.

As models select: by mean keys (MoBA; Lu et al. 2025, equations 5 and 6), by attention to compressed keys (NSA; Yuan et
al. 2025, equations 8 to 12) and by a lightning indexer (DSA, DeepSeek-V3.2; MSA, MiniMax). No selection has a gradient.
Indices are int32 [B, N, K, S], -1 for none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilabench.patterns.answers import Compression

# The most scores in memory at a time: 256 MiB in float32.
SCORES_AT_ONCE = 2**26


@dataclass(frozen=True, slots=True)
class Choosing:
    """`top_k` blocks of `block` tokens for each token; of equal scores the earlier block is better.

    The first `initial` blocks, the token's own and the `local` - 1 before it are always chosen. `causal`: none that
    lies ahead.
    """

    block: int
    top_k: int
    causal: bool = True
    initial: int = 0
    local: int = 1

    def best(self, scores: Tensor, rows: Tensor) -> Tensor:
        """int32 [..., R, K, min(top_k, n)] of scores [..., R, K, n] in float32, for the tokens `rows` [R]."""
        blocks, own = torch.arange(scores.shape[-1], device=scores.device), (rows // self.block)[:, None, None]
        # As integers of the same order, so that the block itself can decide between equal scores. -0.0 is 0.0 here.
        bits = (scores.float() + 0.0).view(torch.int32).long()
        ranks = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        if self.local:
            ranks = ranks + (((blocks < self.initial) | ((blocks > own - self.local) & (blocks < own))).long() << 33)
            ranks = ranks + ((blocks == own).long() << 34)
        ranks = ranks * len(blocks) + (len(blocks) - 1 - blocks)
        if self.causal:
            ranks = ranks.masked_fill(blocks > own, torch.iinfo(torch.int64).min)
        best = ranks.topk(min(self.top_k, len(blocks)), dim=-1, sorted=False)
        return best.indices.masked_fill(best.values == torch.iinfo(torch.int64).min, -1).int()


def _shares_of_blocks(compression: Compression, shares: Tensor, block: int, blocks: int) -> Tensor:
    """Shares [..., C] of compressed keys as shares [..., n] of blocks of `block` tokens: NSA's equation 9.

    Each counts once for every `stride` tokens that it has in common with a block. Raises ValueError for a block that is
    no multiple of the stride.
    """
    if block % compression.stride:
        raise ValueError(f"block size {block} is not a multiple of the compression stride {compression.stride}")
    strips = blocks * (block // compression.stride)
    total = torch.zeros(*shares.shape[:-1], strips, dtype=shares.dtype, device=shares.device)
    for shift in range(compression.length // compression.stride):
        width = min(shares.shape[-1], strips - shift)
        total[..., shift : shift + width] += shares[..., :width]
    return total.unflatten(-1, (blocks, block // compression.stride)).sum(-1)


@torch.no_grad()
def select_by_mean_key(q: Tensor, k: Tensor, choosing: Choosing) -> Tensor:
    """Select by query times mean key, with queries summed over the heads that share keys.

    q [B, N, H, D], k [B, N, K, D].

    MoBA selects for each query head; with as many heads of keys as of queries this is the same.
    """
    keys, kv_heads = _block_means(k, choosing.block), k.shape[2]

    def scores(rows: slice) -> Tensor:
        queries = q[:, rows].float().unflatten(2, (kv_heads, -1)).sum(3)
        return torch.einsum("brkd,bnkd->brkn", queries, keys)

    return _in_pieces(q, kv_heads * keys.shape[1], scores, choosing)


@torch.no_grad()
def select_by_compression(
    q: Tensor, keys: Tensor, compression: Compression, scale: float, choosing: Choosing, length: int | None = None
) -> Tensor:
    """Select by the shares of attention to compressed keys, summed over the heads that share keys.

    q [B, M, H, D], the last M tokens; keys [B, C, K, D]. length: the number of tokens, M by default.
    """
    (_, rows, heads, _), (_, count, kv_heads, _) = q.shape, keys.shape
    length = rows if length is None else length
    first = length - rows
    keys = keys.float()
    # Made on the device: a copy from the host would wait for it.
    lasts = torch.arange(count, device=q.device) * compression.stride + compression.length - 1

    def scores(rows: slice) -> Tensor:
        queries = q[:, rows].float().unflatten(2, (kv_heads, -1))
        products = torch.einsum("brkgd,bckd->brkgc", queries, keys) * scale
        if choosing.causal:
            row = torch.arange(first + rows.start, first + rows.stop, device=q.device)
            products.masked_fill_((lasts > row[:, None])[:, None, None], -torch.inf)
        # A row that sees no compressed key has no shares.
        shares = products.softmax(-1).nan_to_num_(0.0).sum(3)
        return _shares_of_blocks(compression, shares, choosing.block, -(-length // choosing.block))

    return _in_pieces(q, heads * max(1, count), scores, choosing, first)


@torch.no_grad()
def select_by_indexer(queries: Tensor, weights: Tensor, keys: Tensor, choosing: Choosing) -> Tensor:
    """Select by a lightning indexer: a token scores sum_i weights[i] · relu(queries[i] · key), a block its largest.

    queries [B, N, K, I, d] of I index heads for each key/value head, weights [B, N, K, I], keys [B, N, K, d].
    """
    length, kv_heads, block = keys.shape[1], keys.shape[2], choosing.block
    missing = -length % block

    def scores(rows: slice) -> Tensor:
        products = torch.einsum("brkid,bnkd->brkin", queries[:, rows].float(), keys.float()).relu_()
        total = torch.einsum("brkin,brki->brkn", products, weights[:, rows].float())
        if choosing.causal:
            token, row = (torch.arange(*span, device=keys.device) for span in ((0, length), (rows.start, rows.stop)))
            total.masked_fill_((token > row[:, None])[:, None], -torch.inf)
        return pad(total, (0, missing), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)

    return _in_pieces(queries, kv_heads * queries.shape[3] * length, scores, choosing)


def _in_pieces(
    q: Tensor, per_row: int, scores: Callable[[slice], Tensor], choosing: Choosing, first: int = 0
) -> Tensor:
    """The best blocks of all rows of q [B, N, ...], some at a time; `per_row`: scores of a row of one batch item.
    first: position of the first row.
    """
    length, at_once = q.shape[1], max(1, SCORES_AT_ONCE // max(1, q.shape[0] * per_row))
    pieces = [slice(start, min(start + at_once, length)) for start in range(0, max(1, length), at_once)]
    best = [
        choosing.best(scores(rows), torch.arange(first + rows.start, first + rows.stop, device=q.device))
        for rows in pieces
    ]
    return torch.cat(best, 1)


def _block_means(x: Tensor, block: int) -> Tensor:
    """[B, n, K, D] in float32: means of successive blocks of x [B, N, K, D], the last of which may be short."""
    rows = x.shape[1]
    total = pad(x, (0, 0, 0, 0, 0, -rows % block)).unflatten(1, (-1, block)).sum(2, dtype=torch.float32)
    sizes = (rows - torch.arange(total.shape[1], device=x.device) * block).clamp_max(block)
    return total / sizes[:, None, None]

"""`flex`: torch's FlexAttention over any pattern, with what the pattern's counts C say as mask and log C as score.

A block mask lists the visible blocks; in those seen in part, the mask function reads C from tiles that equal blocks
share. It reads none if causal mask and window are all that hides; log C is added only if a key counts more than once.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from dilabench.contracts import BuildContext
from dilabench.impls.flex.blocks import BLOCK, Blocks, CountedBlocks, counted_blocks
from dilabench.workload.spec import Workload

# The block of a position, and its place inside: without the signs that // and % have to mind.
SHIFT, INSIDE = BLOCK.bit_length() - 1, BLOCK - 1

# FlashAttention 4, which has only half precision.
FLASH = "BACKEND=FLASH"

Index = Callable[[Tensor, Tensor, Tensor], Tensor]
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def build(workload: Workload, context: BuildContext) -> Flex:
    """The block mask is made here, on the host; the first call compiles.

    `context.tiles`: kernel options as text. Raises ModuleNotFoundError for BACKEND=FLASH without FlashAttention 4.
    """
    return over_counts(workload, context, lambda blocks: _count(blocks, context.device))


def over_counts(workload: Workload, context: BuildContext, count_of: Callable[[CountedBlocks], Index]) -> Flex:
    """As `build`, with C[h, i, j] of visible blocks, before causal mask and window, from `count_of`."""
    options = read_options(context.tiles)
    if options.get("BACKEND") == "FLASH" and not _has_flash4():
        raise ModuleNotFoundError(f"{FLASH} calls FlashAttention 4; pip install 'dilabench[flash4]'")
    blocks = counted_blocks(workload)
    count = count_of(blocks)
    return Flex(
        _block_mask(blocks, workload, _visible(workload, count if blocks.has_holes else None), context.device),
        _score(workload.softcap, count if blocks.counts_twice else None),
        workload.softmax_scale,
        options,
        _compiled(_attend, context.device),
    )


def read_options(text: str) -> dict[str, str | int]:
    """Return the `kernel_options` of `flex_attention`, empty for an empty text. Raises ValueError for another form."""
    found: dict[str, str | int] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = (side.strip() for side in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f"tiles {part!r} is not NAME=VALUE, for example {FLASH} or BLOCK_M=64")
        found[name] = int(value) if value.isdecimal() else value
    return found


@dataclass(frozen=True, slots=True)
class Flex:
    """FlexAttention with a block mask, a score function and kernel options."""

    mask: flex.BlockMask
    score: ScoreFunction | None
    scale: float
    options: Mapping[str, Any]
    run: Callable[..., tuple[Tensor, Any]]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; packed [T, ·, D]. Differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N] (natural log, float32), which carries no gradient."""
        if q.ndim == 3:
            out, lse = self.with_lse(q[None], k[None], v[None])
            return out.squeeze(0), lse.squeeze(0)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, extra = self.run(*heads_first, self.score, self.mask, self.scale, dict(self.options) or None)
        return out.transpose(1, 2), extra.lse.detach()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: ScoreFunction | None,
    mask: flex.BlockMask,
    scale: float,
    options: Any,
) -> tuple[Tensor, Any]:
    return flex.flex_attention(
        q,
        k,
        v,
        score_mod=score,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=options,
        return_aux=flex.AuxRequest(lse=True),
    )


def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """FlexAttention compiled by torch.compile on CUDA; `fullgraph` prevents a silent fallback to the quadratic eager
    form.

    torch.compile gives up on one function after eight classes of shapes, so each build compiles a new function.
    """
    if device.type != "cuda":
        return function
    own_code = types.FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(own_code, fullgraph=True, dynamic=False)


def _has_flash4() -> bool:
    try:
        return all(map(importlib.util.find_spec, ("flash_attn.cute", "cutlass")))
    except ImportError:
        return False


def _count(blocks: CountedBlocks, device: torch.device) -> Index:
    """C[h, i, j] of a visible block, before causal mask and window, from tensors on the device."""
    tiles = torch.from_numpy(blocks.tiles).to(device)
    tile_of = torch.from_numpy(blocks.tile_of).to(device)
    if len(tile_of) == 1:
        of_all = tile_of[0]
        return lambda _h, i, j: tiles[of_all[i >> SHIFT, j >> SHIFT], i & INSIDE, j & INSIDE]
    kinds = torch.tensor(blocks.kind_of_head, dtype=torch.int32, device="cpu").to(device)
    return lambda h, i, j: tiles[tile_of[kinds[h], i >> SHIFT, j >> SHIFT], i & INSIDE, j & INSIDE]


def _visible(workload: Workload, count: Index | None) -> MaskFunction:
    """The mask function: causal mask, window, and C > 0 if the pattern hides more than these."""
    left, right = workload.window
    right = 0 if workload.causal else right

    def visible(_b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (i >= 0) & (j >= 0) if count is None else count(h, i, j) > 0
        if left >= 0:
            seen = seen & (j >= i - left)
        if right >= 0:
            seen = seen & (j <= i + right)
        return seen

    return visible


def _score(softcap: float | None, count: Index | None) -> ScoreFunction | None:
    """The score function of a softcap, and of keys that count several times; None if there is neither."""

    def capped(logit: Tensor, _b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
        return logit if softcap is None else softcap * torch.tanh(logit / softcap)

    def with_log(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert count is not None
        return capped(logit, b, h, i, j) + torch.log(count(h, i, j).to(torch.float32))

    if count is not None:
        return with_log
    return None if softcap is None else capped


def _block_mask(
    blocks: CountedBlocks, workload: Workload, visible: MaskFunction, device: torch.device
) -> flex.BlockMask:
    """The lists of blocks, for each head, or once if all heads are alike.

    Unlike `BlockMask.from_kv_blocks`, which sorts tables of all heads to find the lists by key.
    """
    kinds = blocks.kind_of_head if len(blocks.partly) > 1 else (0,)
    kv_num_blocks, kv_indices = _lists(blocks.partly, kinds, device)
    full_kv_num_blocks, full_kv_indices = _lists(blocks.full, kinds, device)
    q_num_blocks, q_indices = _lists(blocks.partly.transpose(0, 2, 1), kinds, device)
    full_q_num_blocks, full_q_indices = _lists(blocks.full.transpose(0, 2, 1), kinds, device)
    return flex.BlockMask(
        seq_lengths=(workload.seq_len, workload.seq_len),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _lists(marked: Blocks, kinds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many and which blocks are marked in each row of bool [kinds, n, n]: int32 [1, H, n] and [1, H, n, n], whose
    rows begin with the marked blocks, ascending."""
    counts = marked.sum(-1, dtype=np.int32)
    order = np.argsort(~marked, axis=-1, kind="stable").astype(np.int32)
    of_heads = list(kinds)
    found, listed = (torch.from_numpy(part[of_heads])[None].to(device) for part in (counts, order))
    return found, listed

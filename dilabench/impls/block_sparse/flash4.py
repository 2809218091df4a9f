"""`block-sparse-flash4`: FlashAttention 4 (flash_attn.cute) over the same blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.block_sparse.planned import require_whole_plan
from dilabench.kernels.block_sparse.lists import COUNTED_ONCE, TileLists
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.workload.spec import Workload

# The library's tiles of keys on Hopper, forward and backward, up to head dim 128: a block must be one of them.
BLOCK = 128


def build(workload: Workload, context: BuildContext) -> Flash4:
    """Lists are made and moved to the device here; the first call compiles."""
    plan = require_whole_plan(workload)
    by_query, by_key = (block_tensors(plan, direction, context.device) for direction in (False, True))
    return Flash4(by_query, by_key, _causal_mask() if workload.causal else None, workload.softmax_scale)


@dataclass(frozen=True, slots=True)
class Flash4:
    """The library's autograd function with lists of key blocks per query block, and the reverse for its backward."""

    by_query: Any
    by_key: Any
    mask: Callable[..., Any] | None
    scale: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q, k, v [B, N, H, D]; differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N] (natural log, float32)."""
        from flash_attn.cute.interface import flash_attn_func

        # The library launches on the current device.
        with torch.cuda.device_of(q):
            out, lse = flash_attn_func(
                q,
                k,
                v,
                softmax_scale=self.scale,
                mask_mod=self.mask,
                block_sparse_tensors=self.by_query,
                block_sparse_tensors_bwd=self.by_key,
                return_lse=True,
            )
        return out, lse.detach()


def block_tensors(plan: BlockPlan, by_key: bool, device: torch.device) -> Any:
    """The plan's lists as the library takes them."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    parts = padded_lists(plan.lists(BLOCK, BLOCK, by_key))
    return BlockSparseTensorsTorch(*(part.to(device) for part in parts), block_size=(BLOCK, BLOCK))


@lru_cache(maxsize=1)
def _causal_mask() -> Callable[..., Any]:
    """The mask of partly visible blocks, in the library's own language; one object, since kernels are kept by it."""
    from cutlass import cute

    @cute.jit
    def causal(_batch: Any, _head: Any, query: Any, key: Any, _lengths: Any, _tensors: Any) -> Any:
        return query >= key

    kept: Callable[..., Any] = causal
    return kept


class PaddedLists(NamedTuple):
    """Lists of tiles as rectangles, int32: how many partly and wholly visible partners each own tile has [1, heads, own
    tiles], and which, ascending [1, heads, own tiles, longest], then zeros.
    """

    partly_count: Tensor
    partly: Tensor
    full_count: Tensor
    full: Tensor


def padded_lists(lists: TileLists) -> PaddedLists:
    """From lists on the host."""
    first, n_full, n_partly = lists.spans.unbind(-1)
    tiles = lists.entries & (COUNTED_ONCE - 1)

    def rectangle(first: Tensor, count: Tensor) -> Tensor:
        place = torch.arange(max(1, int(count.max())), device="cpu")
        index = (first[..., None] + place).clamp_max(len(tiles) - 1)
        return torch.where(place < count[..., None], tiles[index], 0)

    parts = n_partly, rectangle(first + n_full, n_partly), n_full, rectangle(first, n_full)
    return PaddedLists(*(part[None].contiguous() for part in parts))

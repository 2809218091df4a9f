"""Block-sparse backward through the Hopper kernel of dilated attention (`fused.sm90.backward`).

As in the forward pass, a block mask is to that kernel a group of branches with one class (modulus 1), in which no
tile pair is counted and every mask head is a kind of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.kernels.block_sparse.forward_sm90 import head_kinds, one_segment, serves
from dilabench.kernels.block_sparse.key_items import KeyItems
from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.dq_accumulate import convert_dq
from dilabench.kernels.launch_cache import Launch, LaunchCache
from dilabench.kernels.tuning import TileConfig, select_kernel

_LOG2E = 1.4426950408889634
# A program has a multiprocessor for itself: with fewer of them, or with shorter lists of query tiles in the mean, two
# passes of smaller tiles are faster. At D128 51 steps 1.14 times as fast at once, 26 steps 0.95 times; no narrower head
# gains.
_LEAST_PROGRAMS, _LEAST_STEPS, _SMALLEST_DIM = 512, 48, 65


def backward_tiles(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: Plan) -> TileConfig | None:
    """The tiles of the kernel where it serves these tensors and wins, else None."""
    pairs = plan.pairs(q.shape[2])
    if pairs is None or torch.are_deterministic_algorithms_enabled() or plan.hidden is not None:
        return None
    kernel, tiles = select_kernel(
        "backward_key", q.shape[-1], causal=plan.causal, largest_tile=plan.block_size, hopper=True
    )
    if kernel != "at_once" or q.shape[-1] < _SMALLEST_DIM:
        return None
    key_rows = k.numel() // k.shape[-1]
    if key_rows < _LEAST_PROGRAMS * tiles.block_n or q.shape[0] * pairs < _LEAST_STEPS * tiles.block_m * key_rows:
        return None
    return tiles if serves((q, k, v, dout), plan, tiles, plan.rows // tiles.block_m) else None


def run_backward(
    tensors: dict[str, Tensor],
    dq: Tensor,
    slots: Tensor,
    work: KeyItems,
    plan: Plan,
    scale: float,
    tiles: TileConfig,
    cache: LaunchCache,
) -> None:
    """Write dq, dk and dv; the sums of key tiles that several programs share, to their slots."""
    sums, heads, kv_heads = tensors["sums"], dq.shape[2], tensors["k"].shape[2]
    tensors = tensors | {"slots": slots}
    for first in range(0, heads, sums.shape[2]):
        if first:
            sums.zero_()
        first_kv_head = first * kv_heads // heads

        def prepare(first_kv_head: int = first_kv_head) -> list[Launch]:
            return [_launch(tensors, work, plan, first_kv_head, scale, tiles)]

        cache.launch(("at once", first), [tensors], prepare)
        convert_dq(sums, scale, dq[:, :, first : first + sums.shape[2]])


def _launch(
    tensors: dict[str, Tensor], work: KeyItems, plan: Plan, first_kv_head: int, scale: float, tiles: TileConfig
) -> Launch:
    # The kernel module needs a Triton with Gluon's Hopper instructions.
    from dilabench.kernels.fused.sm90.backward import _backward_kernel, tile_arguments

    q = tensors["q"]
    spans, entries, _ = plan.tables(tiles, by_key=True, device=q.device)
    sets, n_items, _ = work.items.shape
    shared = tile_arguments(tensors, 1, first_kv_head, tiles)
    n_blocks = q.shape[0] * shared["some_kv_heads"]
    own = {
        "slots_ptr": tensors["slots"],
        "items_ptr": work.items,
        "lookup_ptr": spans,
        "entries_ptr": entries,
        "heads_ptr": head_kinds(plan, q.shape[2], q.device),
        "scale": scale,
        "scale_log2": scale * _LOG2E,
        "n_supers": 1,
        "full_supers": 1,
        "n_kinds": plan.mask_heads,
        "n_items": n_items,
        "n_tiles": spans.shape[1],
        **one_segment(plan.keys),
        "n_blocks": n_blocks,
        "item_major": 0,
        "n_slots": work.slots,
        "CAUSAL": plan.causal,
        "RAGGED": False,
        "ADD": False,
        "SHARED": True,
        "PER_HEAD": sets > 1,
        "COUNTED": False,
    }
    return Launch(_backward_kernel, lambda _: ((n_items * n_blocks,), shared | own))

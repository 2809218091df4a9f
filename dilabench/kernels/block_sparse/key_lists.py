# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Work of the backward pass by keys: a tile whose list is far longer than others' is shared by several programs.

Attention sinks, means of blocks and popular keys are seen by every query, and one program would walk over all of them
long after the others end. Each share of a tile writes its float32 sums to a separate place, and a second kernel adds
them in order: no atomics, so the result is deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels import tuning
from dilabench.kernels.block_sparse.lists import TileLists
from dilabench.kernels.fused.row_layout import PER_LENGTH
from dilabench.kernels.launch_cache import Launch, LaunchCache

_ALL = np.iinfo(np.int32).max


class KeyLists(NamedTuple):
    """The lists for programs by key, int32 on a device.

    ``items`` [sets, items, 4]: key tile (-1: none), first and end place in its list, slot (-1: its only item).
    ``shared`` [sets, tiles in several items, 3]: key tile (-1: none), first slot, slots. A set is of one key/value
    head, or of all. ``slots``: how many there are for each head. ``lookup`` [mask heads, key tiles, 3], ``entries``: as
    in `fused.tile_tables.TileTables`.
    """

    items: Tensor
    shared: Tensor
    slots: int
    lookup: Tensor
    entries: Tensor


def whole_lists(lists: TileLists, kv_heads: int) -> KeyLists:
    """Each tile one item, in the order of the first mask head of each key/value head; the host does not wait."""
    order = lists.order
    if len(order) > kv_heads:
        order = order.unflatten(0, (kv_heads, -1))[:, 0]
    elif len(order) > 1:
        order = order.repeat_interleave(kv_heads // len(order), 0)
    items = torch.empty((*order.shape, 4), dtype=torch.int32, device=order.device)
    items[..., 0] = order
    for column, value in enumerate((0, _ALL, -1), start=1):
        items[..., column] = value
    return KeyLists(items, items.new_empty((len(order), 0, 3)), 0, lists.spans, lists.entries)


def balanced_lists(lists: TileLists, num_heads: int, kv_heads: int, device: torch.device) -> KeyLists:
    """The items of lists on the host; tiles with long lists have several, and the longest items are first."""
    counts, group = lists.lengths.numpy(), num_heads // kv_heads
    if len(counts) > 1:
        # The longest list of heads that share keys and have separate masks.
        counts = counts.repeat(num_heads // len(counts), 0).reshape(kv_heads, group, -1).max(1)
    items, shared, slots = balanced_items(counts, group, kv_heads)
    return KeyLists(
        torch.from_numpy(items).to(device),
        torch.from_numpy(shared).to(device),
        slots,
        lists.spans.to(device),
        lists.entries.to(device),
    )


def balanced_items(
    counts: npt.NDArray[np.int64], group: int, kv_heads: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """(items, shared, slots) of lists with these numbers of entries [sets, tiles], which ``group`` heads walk over."""
    steps = int(counts.sum()) * group * (kv_heads // len(counts))
    most = -(-max(tuning.LEAST_SHARED_STEPS, steps // tuning.SHARING_PROGRAMS) // group)
    shares = np.where(counts > 2 * most, -(-counts // most), 1)
    each = -(-counts // shares)
    items, shared, slots = [], [], int(np.where(shares > 1, shares, 0).sum(1).max(initial=0))
    for share, length, count in zip(shares, each, counts, strict=True):
        tile = np.arange(len(share)).repeat(share)
        first = share.cumsum() - share
        number = np.arange(len(tile)) - first[tile]
        low = number * length[tile]
        is_shared = share > 1
        slot = np.where(is_shared, share, 0).cumsum() - np.where(is_shared, share, 0)
        rows = (tile, low, low + length[tile], np.where(is_shared[tile], slot[tile] + number, -1))
        items.append(np.stack(rows, 1)[np.minimum(length[tile], count[tile] - low).argsort(kind="stable")[::-1]])
        shared.append(np.stack((np.arange(len(share)), slot, share), 1)[is_shared])
    return _padded(items), _padded(shared), slots


def _padded(sets: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int32]:
    """int32 [sets, most of a set, columns]; -1 where a set has fewer."""
    padded = np.full((len(sets), max(map(len, sets)), sets[0].shape[1]), -1, np.int32)
    for place, rows in enumerate(sets):
        padded[place, : len(rows)] = rows
    return padded


@triton.jit(do_not_specialize=PER_LENGTH)
def _add_slots_kernel(
    slots_ptr,
    shared_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    n_slots,
    n_shared,
    n_kv_heads,
    key_rows,
    HEAD_DIM: tl.constexpr,
    PER_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    head, place = tl.program_id(0) // n_shared, tl.program_id(0) % n_shared
    kv_head = head % n_kv_heads
    shared_ptr += ((kv_head if PER_HEAD else 0) * n_shared + place) * 3
    tile = tl.load(shared_ptr)
    if tile >= 0:
        slot, count = tl.load(shared_ptr + 1), tl.load(shared_ptr + 2)
        at = slots_ptr + (head.to(tl.int64) * n_slots + slot) * (2 * ROWS * DIM)
        at += tl.arange(0, ROWS)[:, None] * DIM + tl.arange(0, DIM)[None, :]
        dk, dv = tl.zeros([ROWS, DIM], tl.float32), tl.zeros([ROWS, DIM], tl.float32)
        for _ in range(count):
            dk += tl.load(at)
            dv += tl.load(at + ROWS * DIM)
            at += 2 * ROWS * DIM
        row, column = tile * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
        result = (((head // n_kv_heads).to(tl.int64) * key_rows + row) * n_kv_heads + kv_head) * HEAD_DIM + column
        inside = (row < key_rows) & (column < HEAD_DIM)
        tl.store(dk_ptr + result, (dk * scale).to(dk_ptr.dtype.element_ty), inside)
        tl.store(dv_ptr + result, dv.to(dv_ptr.dtype.element_ty), inside)


def add_slots(slots: Tensor, lists: KeyLists, dk: Tensor, dv: Tensor, scale: float, cache: LaunchCache) -> None:
    """Write the tiles of dk and dv [B, N, K, D] that were computed in several items: the sums of their slots.

    ``slots`` float32 [B * K, slots, 2, rows, columns], dk / scale before dv.
    """
    sets, n_shared, _ = lists.shared.shape
    if not n_shared:
        return
    tensors = {"slots": slots, "dk": dk, "dv": dv}

    def prepare() -> list[Launch]:
        _, _, _, rows, columns = slots.shape
        arguments = {
            **{f"{name}_ptr": x for name, x in tensors.items()},
            "shared_ptr": lists.shared,
            "scale": scale,
            "n_slots": lists.slots,
            "n_shared": n_shared,
            "n_kv_heads": dk.shape[2],
            "key_rows": dk.shape[1],
            "HEAD_DIM": dk.shape[3],
            "PER_HEAD": sets > 1,
            "ROWS": rows,
            "DIM": columns,
            "num_warps": 8,
        }
        return [Launch(_add_slots_kernel, lambda _: ((slots.shape[0] * n_shared,), arguments))]

    cache.launch("slots", [tensors], prepare)

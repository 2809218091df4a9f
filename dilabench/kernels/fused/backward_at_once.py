"""Both passes of the backward at once in the Hopper kernel (`sm90.backward`): for which groups of branches, and how."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor

from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.row_layout import L2_RESIDENT_BYTES, on_hopper, segment_arguments
from dilabench.kernels.fused.tile_lists import computed_pairs
from dilabench.kernels.fused.tile_tables import tile_tables
from dilabench.kernels.launches import Arguments, Launch, Launches
from dilabench.kernels.query_sums import write_sums
from dilabench.kernels.row_sums import StatsLayout, row_sums
from dilabench.kernels.tuning import TileConfig, specialized_backward_config

_LOG2E = 1.4426950408889634


class AtOnce(NamedTuple):
    """A group of branches with its tiles and where the statistics of rows stand."""

    group: BranchGroup
    tiles: TileConfig
    stats_layout: StatsLayout

    @classmethod
    def of(cls, group: BranchGroup, q: Tensor, k: Tensor, causal: bool) -> AtOnce | None:
        """None where the kernel does not serve the group, or two passes are faster."""
        if q.element_size() != 2 or not on_hopper(q.device):
            return None
        pairs = q.shape[0] * computed_pairs(group, min(64, group.largest_tile), causal)
        size = (k.numel() // k.shape[-1], pairs)
        tiles = specialized_backward_config(q.shape[-1], group.largest_tile, *size, "branches")
        if tiles is None:
            return None
        where = (group.length, group.modulus, group.super_tokens)
        return cls(group, tiles, StatsLayout.of(*where, tile=tiles.block_m, block=tiles.block_m))


def run_at_once(
    steps: list[AtOnce],
    operands: dict[str, Tensor],
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    sums: Tensor,
    causal: bool,
    scale: float,
    add: bool,
    delta: Tensor | None,
    known: Launches,
) -> None:
    """Write, or ``add``, the gradients of these groups. sums: from `empty_sums`, for some heads after the other. delta:
    of `row_sums`.
    """
    dq, dk, dv = gradients
    dout = operands["dout"][:, : out.shape[1]]
    heads, kv_heads, some = operands["q"].shape[2], operands["k"].shape[2], sums.shape[2]
    stats = [
        row_sums(out, dout, lse, step.stats_layout, known, ("at once", "row sums", index), delta, found=index > 0)
        for index, step in enumerate(steps)
    ]
    tensors = [operands | {"stats": rows, "sums": sums, "dk": dk, "dv": dv} for rows in stats]
    for first in range(0, heads, some):
        if first:
            sums.zero_()
        names = [("at once", index, first) for index in range(len(steps))]
        prepare = partial(_launches, steps, tensors, first * kv_heads // heads, causal, scale, add)
        known.make(names, tensors, prepare)
        write_sums(sums, scale, dq[:, :, first : first + some], add)


def _launches(
    steps: list[AtOnce],
    tensors: list[dict[str, Tensor]],
    first_kv_head: int,
    causal: bool,
    scale: float,
    add: bool,
) -> Iterator[Launch]:
    for index, (step, own) in enumerate(zip(steps, tensors, strict=True)):
        yield _launch(step, own, first_kv_head, causal, scale, add, index > 0)


def _launch(
    step: AtOnce,
    tensors: dict[str, Tensor],
    first_kv_head: int,
    causal: bool,
    scale: float,
    add: bool,
    follows: bool,
) -> Launch:
    """``follows``: directly behind a launch of this kernel, to whose results it adds."""
    # The kernel module needs a Triton with Gluon's Hopper instructions.
    from dilabench.kernels.fused.sm90.backward import _backward_kernel, tile_arguments

    group, config, _ = step
    q, keys = tensors["q"], tensors["k"]
    tables = tile_tables(group, config.block_n, config.block_m, causal, True, q.device)
    shared = tile_arguments(tensors, group.modulus, first_kv_head, config)
    n_items, n_blocks = tables.order.shape[1], q.shape[0] * shared["some_kv_heads"] * group.n_supers

    def arguments(ragged: bool) -> Arguments:
        own = {
            "slots_ptr": None,
            "items_ptr": tables.order,
            "lookup_ptr": tables.lookup,
            "entries_ptr": tables.entries,
            "heads_ptr": tables.heads,
            "scale": scale,
            "scale_log2": scale * _LOG2E,
            "n_supers": group.n_supers,
            "full_supers": group.full_supers,
            "n_kinds": len(group.kinds),
            "n_items": n_items,
            "n_tiles": tables.lookup.shape[3],
            **segment_arguments(group),
            "n_blocks": n_blocks,
            "item_major": int(2 * keys.numel() * keys.element_size() <= L2_RESIDENT_BYTES),
            "n_slots": 0,
            "CAUSAL": causal,
            "RAGGED": ragged and not causal,
            "ADD": add or follows,
            "SHARED": False,
            "PER_HEAD": False,
            "COUNTED": True,
            "launch_pdl": follows,
        }
        return (n_items * n_blocks,), shared | own

    kind = (q.dtype, *q.shape[2:], q.shape[0] > 1, causal, add, follows, config, *group.compiled_for)
    return Launch(_backward_kernel, arguments, group.cuts_tiles(config.longest), kind)

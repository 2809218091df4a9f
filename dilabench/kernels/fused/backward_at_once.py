"""Both passes of the backward at once in the Hopper kernel (`sm90.backward`): for which groups of branches, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dilabench.kernels.bwd_preprocess import StatsLayout
from dilabench.kernels.dq_accumulate import convert_dq
from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.residue_plan import ResiduePlan
from dilabench.kernels.fused.row_layout import on_hopper, segment_arguments
from dilabench.kernels.fused.tile_lists import computed_pairs
from dilabench.kernels.fused.tile_tables import tile_tables
from dilabench.kernels.launch_cache import Arguments, Launch, LaunchCache
from dilabench.kernels.tuning import L2_RESIDENT_BYTES, TileConfig, WorkByKey, at_once_is_faster, select_kernel

_LOG2E = 1.4426950408889634


class AtOnce(NamedTuple):
    """A group of branches with its tiles and where the statistics of rows stand."""

    group: BranchGroup
    tiles: TileConfig
    stats_layout: StatsLayout

    @classmethod
    def of(cls, group: BranchGroup, q: Tensor, causal: bool) -> AtOnce | None:
        """None where the kernel does not serve the group."""
        kernel, tiles = select_kernel(
            "backward_key",
            q.shape[-1],
            causal=causal,
            largest_tile=group.largest_tile,
            itemsize=q.element_size(),
            hopper=on_hopper(q.device),
        )
        if kernel != "at_once":
            return None
        where = (group.length, group.modulus, group.super_tokens)
        return cls(group, tiles, StatsLayout.of(*where, tile=tiles.block_m, block=tiles.block_m))


def groups_at_once(plan: ResiduePlan, q: Tensor, k: Tensor) -> list[AtOnce]:
    """The groups of the plan that one kernel does both passes of: all that it serves, or none where two passes of
    smaller tiles are faster. To mix both ways was hardly ever faster than the better one.
    """
    found = [step for step in (AtOnce.of(group, q, plan.causal) for group in plan.groups) if step is not None]
    return found if found and _is_faster(found, q, k, plan.causal) else []


def _is_faster(steps: list[AtOnce], q: Tensor, k: Tensor, causal: bool) -> bool:
    """As `at_once_is_faster`, of the lists of these groups."""
    dim, lists = q.shape[-1], []
    for group, tiles, _ in steps:
        rows = k.numel() / dim * group.covered_keys
        pairs = q.shape[0] * computed_pairs(group, min(tiles.block_m, group.largest_tile), causal)
        lists.append(WorkByKey(rows / tiles.block_n, pairs / (rows * tiles.block_m)))
    return at_once_is_faster(
        lists,
        dim,
        causal=causal,
        grouped_queries=q.shape[2] != k.shape[2],
        sums=q.numel(),
        processors=torch.cuda.get_device_properties(q.device).multi_processor_count,
    )


def run_at_once(
    steps: list[AtOnce],
    operands: dict[str, Tensor],
    stats: list[Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    sums: Tensor,
    causal: bool,
    scale: float,
    cache: LaunchCache,
) -> None:
    """Write the gradients of these groups. stats: of their rows. sums: from `dq_accumulator`, for some heads after the
    other.
    """
    dq, dk, dv = gradients
    heads, kv_heads, some = operands["q"].shape[2], operands["k"].shape[2], sums.shape[2]
    tensors = [operands | {"stats": rows, "sums": sums, "dk": dk, "dv": dv} for rows in stats]
    for first in range(0, heads, some):
        if first:
            sums.zero_()

        def prepare(first: int = first) -> Iterator[Launch]:
            for index, (step, own) in enumerate(zip(steps, tensors, strict=True)):
                yield _launch(step, own, first * kv_heads // heads, causal, scale, index > 0)

        cache.launch(("at once", first), tensors, prepare)
        convert_dq(sums, scale, dq[:, :, first : first + some])


def _launch(
    step: AtOnce,
    tensors: dict[str, Tensor],
    first_kv_head: int,
    causal: bool,
    scale: float,
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
            "ADD": follows,
            "SHARED": False,
            "PER_HEAD": False,
            "COUNTED": True,
            "launch_pdl": follows,
        }
        return (n_items * n_blocks,), shared | own

    kind = (q.dtype, *q.shape[2:], q.shape[0] > 1, causal, follows, config, *group.compiled_for)
    return Launch(_backward_kernel, arguments, group.cuts_tiles(config.longest), kind)

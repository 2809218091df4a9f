"""Both passes of the backward in one Hopper kernel (`sm90.backward`): for which groups of branches, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilabench.kernels.bwd_preprocess import StatsLayout
from dilabench.kernels.dq_accumulate import convert_dq
from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.packing import ListRequest, key_lists
from dilabench.kernels.fused.residue_plan import ResiduePlan
from dilabench.kernels.fused.row_layout import LOG2E, on_hopper, segment_arguments
from dilabench.kernels.fused.tile_lists import computed_pairs
from dilabench.kernels.launch_cache import Arguments, Launch, LaunchCache
from dilabench.kernels.tuning import L2_RESIDENT_BYTES, TileConfig, WorkByKey, at_once_is_faster, select_kernel


class AtOnce(NamedTuple):
    """A group of branches with its tiles and the place of the statistics of rows."""

    group: BranchGroup
    tiles: TileConfig
    stats_layout: StatsLayout

    @classmethod
    def of(cls, group: BranchGroup, q: Tensor, causal: bool) -> AtOnce | None:
        """None if the kernel does not support the group, such as one with a softcap."""
        if group.softcap:
            return None
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
        if group.documents:
            request = ListRequest(group, tiles.block_n, tiles.block_m, True, tiles.block_m)
            return cls(group, tiles, request.stats_layout(tiles.block_m))
        where = (group.length, group.modulus, group.super_tokens)
        return cls(group, tiles, StatsLayout.of(*where, tile=tiles.block_m, block=tiles.block_m))

    @property
    def request(self) -> ListRequest:
        """Its lists, for documents."""
        return ListRequest(self.group, self.tiles.block_n, self.tiles.block_m, True, self.tiles.block_m)


def groups_at_once(plan: ResiduePlan, q: Tensor, k: Tensor) -> list[AtOnce]:
    """The groups of the plan whose two passes one kernel computes: all that it supports, or none if two passes of
    smaller tiles are faster. Plans that mix both ways were hardly ever faster than the better way.
    """
    found = [step for step in (AtOnce.of(group, q, plan.causal) for group in plan.groups) if step is not None]
    return found if found and _is_faster(found, q, k, plan.causal) else []


def _is_faster(steps: list[AtOnce], q: Tensor, k: Tensor, causal: bool) -> bool:
    """As `at_once_is_faster`, of the lists of these groups."""
    dim, lists = q.shape[-1], []
    for group, tiles, _ in steps:
        rows = k.numel() / dim * group.covered_keys
        sequences, typical = q.shape[0], group
        if group.documents:
            # As if all were of one length: what is chosen for one packing is for every other.
            sequences, typical = (
                group.documents,
                replace(group, length=-(-group.length // group.documents), documents=0),
            )
        pairs = sequences * computed_pairs(typical, min(tiles.block_m, group.largest_tile), causal)
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
    operands: list[dict[str, Tensor]],
    gradients: tuple[Tensor, Tensor, Tensor],
    sums: Tensor,
    causal: bool,
    scale: float,
    cache: LaunchCache,
) -> None:
    """Write the gradients of these groups, each from its operands, named as in the kernel. sums: from `dq_accumulator`,
    for a few heads at a time.
    """
    dq, dk, dv = gradients
    heads, kv_heads, some = dq.shape[2], dk.shape[2], sums.shape[2]
    tensors = [own | {"sums": sums, "dk": dk, "dv": dv} for own in operands]
    for first in range(0, heads, some):
        if first:
            sums.zero_()

        def prepare(first: int = first) -> Iterator[Launch]:
            for index, (step, own) in enumerate(zip(steps, tensors, strict=True)):
                yield _launch(step, own, first * kv_heads // heads, causal, scale, index > 0)

        cache.launch(("at once", first), tensors, prepare)
        convert_dq(sums, scale, dq[:, :, first : first + some], cache, ("dq", first))


def _launch(
    step: AtOnce,
    tensors: dict[str, Tensor],
    first_kv_head: int,
    causal: bool,
    scale: float,
    follows: bool,
) -> Launch:
    """``follows``: directly after a launch of this kernel, to whose results it adds."""
    # The kernel module needs a Triton with Gluon's Hopper instructions.
    from dilabench.kernels.fused.sm90.backward import _backward_kernel, tile_arguments

    group, config, _ = step
    q, keys = tensors["q"], tensors["k"]
    n_items, n_tiles, lists = key_lists(tensors, group, config, causal, "items")
    shared = tile_arguments(tensors, group.modulus, first_kv_head, config)
    n_blocks = q.shape[0] * shared["some_kv_heads"] * group.n_supers
    # Bytes of the keys and values of the heads that have sums.
    keys_and_values = 2 * keys[:, :, : shared["some_kv_heads"]].numel() * keys.element_size() * group.covered_keys

    # Lists of documents leave it too few registers.
    skips = causal and not (group.is_windowed or group.documents) and config.block_n == 2 * config.block_m

    def arguments(ragged: bool) -> Arguments:
        own = {
            "slots_ptr": None,
            "scale": scale,
            "scale_log2": scale * LOG2E,
            "n_supers": group.n_supers,
            "full_supers": group.full_supers,
            "n_kinds": len(group.kinds),
            "n_items": n_items,
            "n_tiles": n_tiles,
            **segment_arguments(group),
            **lists,
            "n_blocks": n_blocks,
            "item_major": int(keys_and_values <= L2_RESIDENT_BYTES),
            "n_slots": 0,
            "CAUSAL": causal,
            "RAGGED": (ragged or group.documents > 0) and not causal,
            "ADD": follows,
            "SHARED": False,
            "PER_HEAD": False,
            "COUNTED": True,
            "SKIPS": skips,
            "launch_pdl": follows,
        }
        return (n_items * n_blocks,), shared | own

    kind = (q.dtype, *q.shape[2:], q.shape[0] > 1, causal, follows, config, *group.compiled_for)
    return Launch(_backward_kernel, arguments, group.cuts_tiles(config.longest), kind)

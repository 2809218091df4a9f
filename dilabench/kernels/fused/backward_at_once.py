"""Both passes of the backward at once in the Hopper kernel (`sm90.backward`): for which groups of branches, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.residue_plan import ResiduePlan
from dilabench.kernels.fused.row_layout import L2_RESIDENT_BYTES, on_hopper, segment_arguments
from dilabench.kernels.fused.tile_lists import computed_pairs
from dilabench.kernels.fused.tile_tables import tile_tables
from dilabench.kernels.launch_cache import Arguments, Launch, LaunchCache
from dilabench.kernels.query_sums import write_sums
from dilabench.kernels.row_sums import StatsLayout
from dilabench.kernels.tuning import TileConfig, specialized_backward_config

_LOG2E = 1.4426950408889634


class AtOnce(NamedTuple):
    """A group of branches with its tiles and where the statistics of rows stand."""

    group: BranchGroup
    tiles: TileConfig
    stats_layout: StatsLayout

    @classmethod
    def of(cls, group: BranchGroup, q: Tensor) -> AtOnce | None:
        """None where the kernel does not serve the group."""
        if q.element_size() != 2 or not on_hopper(q.device):
            return None
        tiles = specialized_backward_config(q.shape[-1], group.largest_tile)
        if tiles is None:
            return None
        where = (group.length, group.modulus, group.super_tokens)
        return cls(group, tiles, StatsLayout.of(*where, tile=tiles.block_m, block=tiles.block_m))


def groups_at_once(plan: ResiduePlan, q: Tensor, k: Tensor) -> list[AtOnce]:
    """The groups of the plan that one kernel does both passes of: all that it serves, or none where two passes of
    smaller tiles are faster. To mix both ways was hardly ever faster than the better one.
    """
    found = [step for step in (AtOnce.of(group, q) for group in plan.groups) if step is not None]
    return found if found and _is_faster(found, q, k, plan.causal) else []


# Milliseconds of both ways on one H100, of a step (a tile of queries against one of keys) up to a head dim, and of a
# launch. Fitted to 212 random plans of one to four branches, up to 56,000 tokens, head dims of 48 to 128
# (docs/figures/h100-backward-at-once.json): the way that they give takes 1.02 times the faster one's time in the mean.
_STEP_MS = {64: 0.00145, 128: 0.0024}
_LAUNCH_MS = 0.0085
# What a program does besides takes as long as so many steps. The longest one, begun first, can be waited for: a share
# of the programs finish with it.
_BESIDE_STEPS = 6.5
_LONGEST_AT_ONCE, _LONGEST_OF_TWO = 0.66, 0.35
# Zeroing the float32 sums of dQ and writing what they become, and by the million of them.
_SUMS_MS, _SUMS_MS_OF_MILLION = 0.0037, 0.005
# The same steps in two passes, and where a program by keys walks over the lists of several heads.
_TWO_PASSES, _OF_SEVERAL_HEADS = 1.27, 1.22


def _is_faster(steps: list[AtOnce], q: Tensor, k: Tensor, causal: bool) -> bool:
    """Whether one launch of each group costs less than two of smaller tiles: those at once overlap, so that only the
    longest program of all is waited for, and pay for sums of dQ.
    """
    dim = q.shape[-1]
    step_ms = next(ms for largest, ms in _STEP_MS.items() if dim <= largest)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    shares = longest_of_all = 0.0
    two_passes = len(steps) * _LAUNCH_MS
    slower = step_ms * _TWO_PASSES * (1 if q.shape[2] == k.shape[2] else _OF_SEVERAL_HEADS)
    for group, tiles, _ in steps:
        rows = k.numel() / dim * group.covered_keys
        pairs = q.shape[0] * computed_pairs(group, min(tiles.block_m, group.largest_tile), causal)
        mean = pairs / (rows * tiles.block_m)
        longest = mean * (2 if causal else 1) + _BESIDE_STEPS
        # Steps of a multiprocessor.
        share = rows / tiles.block_n * (mean + _BESIDE_STEPS) / processors
        shares += share
        longest_of_all = max(longest_of_all, longest)
        two_passes += slower * max(share, _LONGEST_OF_TWO * longest)
    at_once = len(steps) * _LAUNCH_MS + step_ms * max(shares, _LONGEST_AT_ONCE * longest_of_all)
    return at_once + _SUMS_MS + _SUMS_MS_OF_MILLION * q.numel() / 1e6 < two_passes


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
    """Write the gradients of these groups. stats: of their rows. sums: from `empty_sums`, for some heads after the
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
        write_sums(sums, scale, dq[:, :, first : first + some])


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

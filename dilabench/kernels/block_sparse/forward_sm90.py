"""Block-sparse forward through the Hopper kernel of dilated attention (`fused.sm90.forward`).

To that kernel a block mask is a group of branches with one class (modulus 1), in which every tile pair counts once and
every mask head is a kind of its own; only the work lists differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.fused.branch_group import CLASS_BITS, TILE_BITS
from dilabench.kernels.fused.row_layout import is_row_addressable, on_hopper
from dilabench.kernels.launch_cache import Launch, LaunchCache
from dilabench.kernels.tuning import Selected, TileConfig, is_persistent, select_kernel

_LOG2E = 1.4426950408889634


def can_run(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> bool:
    """Whether the kernel serves it and is faster for its head dim."""
    kernel, tiles = _selected(q, plan)
    return kernel == "specialized" and serves((q, k, v), plan, tiles, plan.keys // tiles.block_n)


def _selected(q: Tensor, plan: Plan) -> Selected:
    return select_kernel("forward", q.shape[-1], causal=plan.causal, largest_tile=plan.block_size, hopper=True)


def serves(operands: Sequence[Tensor], plan: Plan, tiles: TileConfig, listed: int) -> bool:
    """Whether the Hopper kernels serve q, k, v and what lies like q: half precision, whole tiles, no window, regular
    strides, on sm_90, lists of so many tiles. Batch items follow each other at one distance, so that of several the
    keys must be the queries' rows.
    """
    q = operands[0]
    whole = all(rows % tiles.longest == 0 for rows in (plan.block_size, plan.rows, plan.keys))
    fits = whole and listed <= 1 << TILE_BITS and (q.shape[0] == 1 or plan.keys == plan.rows)
    unmasked = plan.left < 0 and plan.right == (0 if plan.causal else -1)
    regular = all(is_row_addressable(x) for x in operands)
    return q.element_size() == 2 and fits and unmasked and regular and on_hopper(q.device)


def work_lists(plan: Plan, tiles: TileConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 (items [1, mask heads, tiles, 5], packed entries) on the device, as in `TileTables`."""
    spans, entries, order = plan.tables(tiles, by_key=False, device=device)
    spans = spans.gather(1, order.long()[..., None].expand_as(spans))
    items = torch.cat((torch.zeros_like(order)[..., None], order[..., None], spans), -1)
    return items[None], entries | 1 << (TILE_BITS + CLASS_BITS)


def block_sparse_forward_sm90(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, cache: LaunchCache
) -> tuple[Tensor, Tensor]:
    """As `block_sparse_forward`, for what `can_run` admits. cache: that of this pass for tensors of this layout."""
    batch, rows, num_heads, _ = q.shape
    empty = torch.empty if cache.once("whole", lambda: plan.every_row_has_work) else torch.zeros
    out = empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((batch, num_heads, rows), float("-inf"), dtype=torch.float32, device=q.device)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    cache.launch("forward", [tensors], lambda: [_launch(tensors, plan, scale)])
    return out, lse


def _launch(tensors: dict[str, Tensor], plan: Plan, scale: float) -> Launch:
    # The kernel module needs a Triton with Gluon's Hopper instructions.
    from dilabench.kernels.fused.sm90.forward import _forward_kernel, tile_arguments

    q, k, v, out, lse = tensors.values()
    batch, rows, num_heads, dim = q.shape
    tiles = _selected(q, plan).tiles
    items, entries, heads = _device_lists(plan, tiles, num_heads, q.device)
    bounds = plan.bounds(q.device)
    n_items = items.shape[2]
    n_work = n_items * batch * num_heads
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    persistent = is_persistent(dim, plan.causal, len(bounds) > 0)
    strides = {
        f"{name}_{axis}": x.stride(place)
        for name, x in (("q", q), ("k", k), ("v", v))
        for place, axis in ((1, "token"), (2, "head"))
    }
    arguments = {
        **tile_arguments(q, k, v, 1, tiles),
        "out_ptr": out,
        "lse_ptr": lse,
        "mass_ptr": None,
        "items_ptr": items,
        "entries_ptr": entries,
        "heads_ptr": heads,
        "bounds_ptr": bounds if len(bounds) else None,
        "scale_log2": scale * _LOG2E,
        "n_supers": 1,
        "full_supers": 1,
        "n_kinds": plan.mask_heads,
        "n_items": n_items,
        "n_heads": num_heads,
        **one_segment(rows),
        "n_work": n_work,
        "heads_per_kv": num_heads // k.shape[2],
        "key_rows": plan.keys,
        **strides,
        "R": 1,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "CAUSAL": plan.causal,
        "RAGGED": False,
        "RANGES": len(bounds),
        "MERGE": False,
        "COMPACT": False,
        "STAGES": tiles.num_stages,
        "PERSISTENT": persistent,
        "num_warps": tiles.num_warps,
    }
    grid = (min(processors, n_work) if persistent else n_work,)
    return Launch(_forward_kernel, lambda _: (grid, arguments))


def one_segment(rows: int) -> dict[str, int]:
    """`segment_arguments` of one segment of so many rows and one class."""
    long = dict.fromkeys(("super_rows", "super_tokens", "whole_rows", "length"), rows)
    return (
        long
        | dict.fromkeys(("longer_classes", "window_left", "window_right"), 0)
        | {"SHIFTED": False, "WINDOWED": False}
    )


def _device_lists(plan: Plan, tiles: TileConfig, num_heads: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Work lists on the device, and for each head its (mask head, class shift)."""

    def make() -> tuple[Tensor, Tensor, Tensor]:
        return *work_lists(plan, tiles, device), head_kinds(plan, num_heads, device)

    return plan.keep(("sm90", tiles, num_heads, device), make)


def head_kinds(plan: Plan, num_heads: int, device: torch.device) -> Tensor:
    """int32 [H, 2]: mask head and class shift of each head."""

    def make() -> Tensor:
        heads = torch.arange(num_heads, dtype=torch.int32, device=device) * plan.mask_heads // num_heads
        return torch.stack((heads, torch.zeros_like(heads)), 1)

    return plan.keep(("head kinds", num_heads, device), make)

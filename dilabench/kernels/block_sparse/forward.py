"""Forward of block-sparse attention through the kernels of dilated attention: `fused.forward`, `fused.sm90.forward`.

For them a block mask is a group of branches with one class (rate 1): every tile pair counts once, and every mask head
is a separate kind. Only the work lists differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.fused.branch_group import TILE_BITS, BranchGroup
from dilabench.kernels.fused.forward import _forward_kernel
from dilabench.kernels.fused.row_layout import (
    LOG2E,
    check_head_dim,
    is_row_addressable,
    launch_arguments,
    on_hopper,
    segment_arguments,
)
from dilabench.kernels.launch_cache import COPY_BYTES, Arguments, Launch
from dilabench.kernels.tuning import Selected, TileConfig, is_persistent, select_kernel


def block_sparse_forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, config: TileConfig | None = None
) -> tuple[Tensor, Tensor]:
    """``(out [B, N, H, D], lse [B, H, N] float32)`` over the blocks of ``plan``; D up to 256.

    q [B, N, H, D]; k, v [B, N, K, D] (or as many rows as the plan has keys) with H a multiple of K. ``config`` selects
    the Triton kernel with this tile shape; without it the Hopper kernel runs if it can. Raises ValueError on shapes
    that do not fit the plan.
    """
    dim = q.shape[-1]
    q, k, v = padded(q, k, v)
    cache = plan.launch_cache("forward", (q, k, v), scale, config)
    cache.once("checked", lambda: check(q, k, v, plan))
    hopper = config is None and cache.once("hopper", lambda: can_run(q, k, v, plan))
    # The Hopper kernel does not write rows without work.
    whole = not hopper or cache.once("whole", lambda: plan.every_row_has_work)
    out = (torch.empty if whole else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    if not whole:
        lse.fill_(float("-inf"))
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}

    def prepare() -> list[Launch]:
        return [_hopper_launch(tensors, plan, scale) if hopper else _launch(tensors, plan, scale, config)]

    cache.launch("forward", [tensors], prepare)
    return cut(out, dim), lse


def _launch(tensors: Mapping[str, Tensor], plan: Plan, scale: float, config: TileConfig | None) -> Launch:
    q = tensors["q"]
    config = plan.config(q.shape[3], "forward", q.element_size(), config)
    rows = {"q": config.block_m, "k": config.block_n, "v": config.block_n}
    grid, shared = query_arguments(tensors, rows, plan, scale, config)
    own = {"out_ptr": tensors["out"], "lse_ptr": tensors["lse"], "mass_ptr": None, "MERGE": False, "COMPACT": False}
    return Launch(_forward_kernel, lambda _: (grid, shared | own))


def query_arguments(
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, int],
    plan: Plan,
    scale: float,
    config: TileConfig,
) -> Arguments:
    """The arguments of both Triton kernels by query. ``rows``: rows of each operand in a tile."""
    heads, kv_heads = tensors["q"].shape[2], tensors["k"].shape[2]
    items, entries = plan.query_lists(config, tensors["q"].device)
    group = plan.group(heads, kv_heads)
    grid, shared = kernel_arguments(tensors, rows, items.shape[1], group, heads, plan, scale, config)
    own = {
        "items_ptr": items,
        "entries_ptr": entries,
        "heads_per_kv": group.heads_per_kv,
        # Causal queries never see beyond the end.
        "RAGGED": not plan.causal,
    }
    return grid, shared | own


def kernel_arguments(
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, int],
    n_items: int,
    group: BranchGroup,
    heads_per_batch: int,
    plan: Plan,
    scale: float,
    config: TileConfig,
) -> Arguments:
    """The arguments of all Triton kernels, as `fused.row_layout.launch_arguments` has them."""
    operands = {name: tensors[name] for name in rows}
    tiles = {name: (x if is_read_in_place(x) else x.contiguous(), rows[name]) for name, x in operands.items()}
    grid, shared = launch_arguments(tiles, n_items, group, heads_per_batch, plan.causal, scale, config)
    bounds = plan.bounds(tensors["q"].device)
    own = {
        "heads_ptr": None,
        "bounds_ptr": bounds if len(bounds) else None,
        # Head by head, so that one head's keys stay in the L2 cache.
        "item_major": 0,
        "key_rows": plan.keys,
        "RANGES": len(bounds),
        "ONE_CLASS": True,
    }
    return grid, shared | own


def can_run(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> bool:
    """Whether the Hopper kernel serves it and is faster for its head dim."""
    kernel, tiles = _selected(q, plan)
    return kernel == "specialized" and serves((q, k, v), plan, tiles, plan.keys // tiles.block_n)


def _selected(q: Tensor, plan: Plan) -> Selected:
    tile = plan.block_size
    return select_kernel("forward", q.shape[-1], causal=plan.causal, largest_tile=tile, hopper=True, blocks=True)


def serves(operands: Sequence[Tensor], plan: Plan, tiles: TileConfig, listed: int) -> bool:
    """Return True if the Hopper kernels support q, k, v and tensors with the layout of q: half precision, whole tiles,
    no window, regular strides, sm_90, lists of at most that many tiles. Batch items have one distance, so with several
    the keys must be the queries' rows.
    """
    q = operands[0]
    whole = all(rows % tiles.longest == 0 for rows in (plan.block_size, plan.rows, plan.keys))
    fits = whole and listed <= 1 << TILE_BITS and (q.shape[0] == 1 or plan.keys == plan.rows)
    unmasked = plan.left < 0 and plan.right == (0 if plan.causal else -1)
    regular = all(is_row_addressable(x) for x in operands)
    return q.element_size() == 2 and fits and unmasked and regular and on_hopper(q.device)


def _hopper_launch(tensors: Mapping[str, Tensor], plan: Plan, scale: float) -> Launch:
    """For what `can_run` admits."""
    # The kernel module needs a Triton with Gluon's Hopper instructions.
    from dilabench.kernels.fused.sm90.forward import _forward_kernel, tile_arguments

    q, k, v = (tensors[name] for name in "qkv")
    batch, _, num_heads, dim = q.shape
    tiles = _selected(q, plan).tiles
    items, entries = plan.query_lists(tiles, q.device)
    group = plan.group(num_heads, k.shape[2])
    bounds = plan.bounds(q.device)
    n_items = items.shape[1]
    n_work = n_items * batch * num_heads
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    persistent = is_persistent(dim, plan.causal, len(bounds) > 0)
    strides = {
        f"{name}_{axis}": tensors[name].stride(place) for name in "qkv" for place, axis in ((1, "token"), (2, "head"))
    }
    arguments = {
        **tile_arguments(q, k, v, 1, tiles),
        "out_ptr": tensors["out"],
        "lse_ptr": tensors["lse"],
        "mass_ptr": None,
        "items_ptr": items,
        "entries_ptr": entries,
        "heads_ptr": plan.head_kinds(num_heads, q.device),
        "bounds_ptr": bounds if len(bounds) else None,
        "scale_log2": scale * LOG2E,
        "n_supers": 1,
        "full_supers": 1,
        "n_kinds": plan.mask_heads,
        "n_items": n_items,
        "n_heads": num_heads,
        **segment_arguments(group),
        "n_work": n_work,
        "heads_per_kv": group.heads_per_kv,
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


def check(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Raises ValueError on shapes that do not fit the plan or the kernels."""
    plan.check(q, k, v)
    check_head_dim(q)


def is_read_in_place(x: Tensor) -> bool:
    """Return True if bulk copies can step over x [B, N, H, D] in its layout."""
    steps = all(stride * x.element_size() % COPY_BYTES == 0 for stride in x.stride()[:3])
    return x.stride(3) == 1 and steps and x.data_ptr() % COPY_BYTES == 0


def padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors of one head dim, with zeros behind it where bulk copies could not step over their rows, which changes
    no result.
    """
    x = tensors[0]
    missing = -x.shape[-1] % (COPY_BYTES // x.element_size())
    return tuple(torch.nn.functional.pad(x, (0, missing)) for x in tensors) if missing else tensors


def cut(x: Tensor, dim: int) -> Tensor:
    """The first columns of x, contiguous."""
    return x if x.shape[-1] == dim else x[..., :dim].contiguous()

"""How the fused kernels see tensors and plans: descriptors of the residue-class view, and tile tables on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.residue_plan import ResiduePlan
from dilabench.kernels.fused.tile_tables import tile_tables
from dilabench.kernels.tuning import TileConfig

HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """Tile tables and head frames of one group, on the device; see `TileTables`."""

    items: Tensor
    lookup: Tensor
    order: Tensor
    entries: Tensor
    heads: Tensor


@lru_cache(maxsize=256)
def device_tables(
    group: BranchGroup, own: int, other: int, causal: bool, by_key: bool, device: torch.device
) -> DeviceTables:
    """Tables of `tile_tables` copied to ``device`` once per (group, tiles, direction)."""
    tables = tile_tables(group, own, other, causal, by_key)
    heads = torch.tensor([group.head_kind, group.head_shift], dtype=torch.int32).t().contiguous()
    return DeviceTables(
        torch.from_numpy(tables.items).to(device),
        torch.from_numpy(tables.lookup).to(device),
        torch.from_numpy(tables.order).to(device),
        torch.from_numpy(tables.entries).to(device),
        heads.to(device),
    )


def is_row_addressable(x: Tensor) -> bool:
    """Whether the tokens and heads of ``x`` lie at constant, 16-byte aligned strides through the batch."""
    batch, length, _, dim = x.shape
    aligned = 16 // x.element_size()
    token, head = x.stride(1), x.stride(2)
    regular = x.stride(3) == 1 and token >= head >= dim and (batch == 1 or x.stride(0) == length * token)
    return regular and token % aligned == 0 and head % aligned == 0 and x.data_ptr() % 16 == 0


def row_addressable(x: Tensor) -> Tensor:
    """``x`` itself if `is_row_addressable`, else a contiguous copy."""
    return x if is_row_addressable(x) else x.contiguous()


def class_view(x: Tensor, modulus: int) -> tuple[list[int], list[int]]:
    """(shape, strides) of ``x [B, N, H, D]`` as [B * N / R, columns]: head h of class c starts at column
    ``c * stride(1) + h * stride(2)``.
    """
    batch, length, heads, dim = x.shape
    token, head = x.stride(1), x.stride(2)
    columns = (modulus - 1) * token + (heads - 1) * head + dim
    return [batch * length // modulus, columns], [modulus * token, 1]


def class_rows(x: Tensor, modulus: int, rows: int) -> TensorDescriptor:
    """`class_view` as [B, N / R, columns] in tiles of [1, rows, D]; reads past the end give 0, writes go nowhere."""
    (all_rows, columns), (row, column) = class_view(x, modulus)
    per_item = all_rows // x.shape[0]
    return TensorDescriptor(x, [x.shape[0], per_item, columns], [per_item * row, row, column], [1, rows, x.shape[-1]])


# Below this many bytes of keys and values the L2 cache holds all of them: order is free, so heavy tiles go first.
_L2_RESIDENT_BYTES = 24 << 20
_LOG2E = 1.4426950408889634


def launch_arguments(
    tiles: dict[str, tuple[Tensor, int]],
    work: Tensor,
    group: BranchGroup,
    heads_per_batch: int,
    causal: bool,
    scale: float,
    config: TileConfig,
) -> tuple[tuple[int], dict[str, Any]]:
    """(grid, keyword arguments) that the fused kernels share. ``tiles`` names each operand with its rows per tile;
    ``work`` lists items along its next to last dimension, visited once per super-segment, batch element and one of
    ``heads_per_batch`` heads.
    """
    q, k = tiles["q"][0], tiles["k"][0]
    n_items = work.shape[-2]
    n_blocks = q.shape[0] * heads_per_batch * group.n_supers
    arguments: dict[str, Any] = {
        "scale_log2": scale * _LOG2E,
        "n_supers": group.n_supers,
        "full_supers": group.full_supers,
        "n_kinds": len(group.kinds),
        "n_items": n_items,
        "n_heads": q.shape[2],
        "super_rows": group.super_rows,
        "n_blocks": n_blocks,
        "R": group.modulus,
        "DIM": q.shape[-1],
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": causal,
        "ITEM_MAJOR": 2 * k.numel() * k.element_size() <= _L2_RESIDENT_BYTES,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    for name, (x, rows) in tiles.items():
        arguments[f"{name}_desc"] = class_rows(x, group.modulus, rows)
        arguments[f"{name}_token"], arguments[f"{name}_head"] = x.stride(1), x.stride(2)
    return (n_items * n_blocks,), arguments


def check_operands(q: Tensor, k: Tensor, v: Tensor, plan: ResiduePlan) -> None:
    """Raises ValueError when shapes disagree with each other or with ``plan``, or the head dimension has no kernel."""
    _, length, num_heads, dim = q.shape
    if dim not in HEAD_DIMS:
        raise ValueError(f"head dimension {dim} is not one of {HEAD_DIMS}: use the strided implementation")
    if k.shape != v.shape or k.shape != (q.shape[0], length, plan.num_kv_heads, dim):
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)} and {plan.num_kv_heads} K/V heads"
        )
    if (length, num_heads) != (plan.sequence_length, plan.num_heads):
        raise ValueError(f"q {tuple(q.shape)} does not fit a plan for N={plan.sequence_length}, H={plan.num_heads}")
    if not plan.groups:
        raise ValueError(f"no branch fits residue-class tiles: {plan.leftover}")


def check_scale(scale: float | None, dim: int) -> float:
    """``scale`` or its default 1 / sqrt(D). Raises ValueError unless positive: the running maximum is taken before
    scaling.
    """
    scale = dim**-0.5 if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale {scale} must be positive: fold the sign into q")
    return scale

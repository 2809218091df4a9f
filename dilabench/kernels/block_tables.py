"""A block mask ready for the kernels: tile lists on the device, tile shapes, and descriptors of the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dilabench.kernels.block_lists import BoolArray, Visibility, largest_tile, tile_lists
from dilabench.kernels.row_layout import HEAD_DIMS
from dilabench.kernels.tuning import Direction, TileConfig

# Measured on one H200 by scripts/gpu_block_sparse.py (docs/results/h200-block-sparse.md).
_SM90: dict[tuple[int, Direction], TileConfig] = {
    (64, "forward"): TileConfig(64, 128, 4, 2),
    (128, "forward"): TileConfig(128, 64, 4, 2),
    (64, "backward_query"): TileConfig(64, 64, 4, 2),
    (128, "backward_query"): TileConfig(64, 64, 4, 2),
    (64, "backward_key"): TileConfig(64, 64, 4, 3),
    (128, "backward_key"): TileConfig(64, 64, 4, 2),
}


@dataclass(frozen=True)
class BlockPlan:
    """A block mask [heads or 1, n, n] over blocks of ``block_size`` of ``rows`` rows, with causal edge and window in rows.

    Device tables are made once per tile shape and kept in the plan.
    """

    mask: BoolArray
    block_size: int
    rows: int
    causal: bool
    window: tuple[int, int] = (-1, -1)
    _tables: dict[object, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def mask_heads(self) -> int:
        """Heads in the mask: 1 when all share one."""
        return int(self.mask.shape[0])

    @property
    def left(self) -> int:
        """Rows a query sees behind it; -1 for all."""
        return self.window[0]

    @property
    def right(self) -> int:
        """Rows a query sees ahead of it; -1 for all."""
        return 0 if self.causal else self.window[1]

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raises ValueError when the shapes do not fit each other, the plan or the kernels."""
        batch, rows, heads, dim = q.shape
        if dim not in HEAD_DIMS:
            raise ValueError(f"head dimension {dim} is not one of {HEAD_DIMS}: use the blocked path")
        if k.shape != v.shape or k.shape[:2] != (batch, rows) or k.shape[3] != dim or heads % k.shape[2]:
            raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)}")
        if rows != self.rows or self.mask_heads not in (1, heads):
            raise ValueError(
                f"q {tuple(q.shape)} does not fit a plan of {self.rows} rows and {self.mask_heads} mask heads"
            )
        if not largest_tile(self.block_size):
            raise ValueError(f"block size {self.block_size} is not a multiple of 16: use the blocked path")

    def config(self, dim: int, direction: Direction, itemsize: int, given: TileConfig | None) -> TileConfig:
        """The tile shape for a direction, fitted to the block size."""
        if given is None:
            # float32 operands take twice the shared memory and are multiplied exactly.
            default = TileConfig(64, 64, 8 if dim > 128 else 4, 2)
            given = TileConfig(32, 32, 4, 1) if itemsize > 2 else _SM90.get((dim, direction), default)
        return given.fitted(largest_tile(self.block_size))

    def tables(self, config: TileConfig, by_key: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(spans, entries, order) of `TileLists` on the device."""
        key = (config.block_m, config.block_n, by_key, device)
        if key not in self._tables:
            seen = Visibility(self.rows, self.causal, *self.window)
            lists = tile_lists(self.mask, self.block_size, seen, config.block_m, config.block_n, by_key)
            arrays = (lists.spans, lists.entries, lists.order)
            self._tables[key] = tuple(torch.from_numpy(array).to(device) for array in arrays)  # type: ignore[assignment]
        return self._tables[key]


def head_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """``x [B, N, H, D]`` as [B, H, N, D] in tiles of [1, 1, rows, D]: reads past the end give 0, writes there are dropped."""
    if x.stride(3) != 1 or any(stride * x.element_size() % 16 for stride in x.stride()[:3]) or x.data_ptr() % 16:
        x = x.contiguous()
    view = x.transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, rows, x.shape[3]])

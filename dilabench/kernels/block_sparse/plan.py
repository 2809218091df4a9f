"""A block mask ready for attention: the mask, what hides pairs inside its blocks, and tile lists on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.block_sparse.lists import BoolArray, HiddenTiles, TileLists, Visibility, largest_tile, tile_lists
from dilabench.kernels.tuning import Direction, TileConfig, select_kernel
from dilabench.patterns.hidden_rows import HiddenRows

if TYPE_CHECKING:
    from dilabench.kernels.block_sparse.key_items import KeyItems
    from dilabench.kernels.launch_cache import LaunchCache

KeptT = TypeVar("KeptT")

# (head_dim, direction), bf16 and fp16 on sm_90: the shapes that won in the fused kernels (tuning.py), whose loops are
# the same.
_SM90: dict[tuple[int, Direction], TileConfig] = {
    (64, "forward"): TileConfig(64, 128, 4, 2),
    (128, "forward"): TileConfig(64, 64, 4, 2),
    (64, "backward_query"): TileConfig(64, 64, 4, 2),
    (128, "backward_query"): TileConfig(64, 64, 4, 2),
    (64, "backward_key"): TileConfig(64, 64, 4, 3),
    (128, "backward_key"): TileConfig(64, 64, 4, 2),
}


def shipped() -> tuple[tuple[int, Direction, TileConfig], ...]:
    """Every (head_dim, direction, configuration) of the table."""
    return tuple((*key, config) for key, config in _SM90.items())


class Plan(ABC):
    """What the kernels need to know of blocks of ``block_size`` rows: their lists, and what hides pairs inside them.

    ``rows`` of queries, causal edge and window in rows. With ``key_rows`` the keys are other rows than the queries', as
    on a rank that was sent them. ``hidden``: the rows of queries that single keys are hidden from.
    """

    block_size: int
    rows: int
    causal: bool
    window: tuple[int, int]
    key_rows: int | None
    hidden: HiddenRows | None
    _kept: dict[Hashable, Any]

    @property
    @abstractmethod
    def mask_heads(self) -> int:
        """How many lists there are for each block: successive query heads share them."""

    @abstractmethod
    def seen_blocks(self, mask_head: int, block: int) -> npt.NDArray[np.int64]:
        """The key blocks of a query block, rising, on the host."""

    @abstractmethod
    def tables(self, config: TileConfig, by_key: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(spans, entries, order) of `TileLists` on the device."""

    def key_items(self, config: TileConfig, num_heads: int, kv_heads: int, device: torch.device) -> KeyItems:  # noqa: ARG002
        """The lists by key as work of programs, each of which walks over those of the heads that share keys.

        Here whole lists: how long they are is not known on the host.
        """
        # Triton is not installed everywhere, and only lists of tiles need it.
        from dilabench.kernels.block_sparse.key_items import whole_lists

        return self.keep(
            ("whole lists", config.block_m, config.block_n, kv_heads),
            lambda: whole_lists(_of_kv_heads(self.tables(config, True, device)[2], kv_heads)),
        )

    @property
    def every_row_has_work(self) -> bool:
        """Whether it is certain that no list is empty: what nobody writes to must be zeroed before."""
        return False

    def pairs(self, num_heads: int) -> int | None:  # noqa: ARG002
        """Pairs of query and key rows in the blocks of all heads; None where the host does not know."""
        return None

    @property
    def keys(self) -> int:
        """Rows of keys."""
        return self.rows if self.key_rows is None else self.key_rows

    @property
    def visibility(self) -> Visibility:
        """What hides pairs inside the mask's blocks."""
        return Visibility(self.rows, self.causal, *self.window, self.key_rows, self.hidden)

    @property
    def left(self) -> int:
        """Rows a query sees behind it; -1 for all."""
        return self.window[0]

    @property
    def right(self) -> int:
        """Rows a query sees ahead of it; -1 for all."""
        return self.visibility.ahead

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raises ValueError when the shapes do not fit each other or the plan."""
        batch, rows, heads, dim = q.shape
        if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != dim or heads % k.shape[2]:
            raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)}")
        if (rows, k.shape[1]) != (self.rows, self.keys) or heads % self.mask_heads:
            raise ValueError(
                f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit a plan of {self.rows} query rows, {self.keys} "
                f"key rows and {self.mask_heads} mask heads"
            )

    def config(self, dim: int, direction: Direction, itemsize: int, given: TileConfig | None) -> TileConfig:
        """The tile shape for a direction, fitted to the block size. Raises ValueError when not even 16 rows fit."""
        tile = largest_tile(self.block_size)
        if not tile:
            raise ValueError(f"block size {self.block_size} is not a multiple of 16: use the blocked path")
        if given is None:
            default = TileConfig(64, 64, 8 if dim > 128 else 4, 2)
            given = _SM90.get((dim, direction), default)
            if itemsize > 2:
                given = select_kernel(direction, dim, causal=self.causal, largest_tile=tile, itemsize=itemsize).tiles
        return given.fitted(tile)

    def keep(self, key: Hashable, make: Callable[[], KeptT]) -> KeptT:
        """The result of `make`, called once per key and kept with the plan."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: KeptT = self._kept[key]
        return kept

    def launch_cache(self, name: str, *given: Any) -> LaunchCache:
        """That of a pass for tensors of one layout and these options, which is kept with the plan."""
        # Triton is not installed everywhere, and only its kernels are launched so.
        from dilabench.kernels.launch_cache import LaunchCache, layout

        key = tuple(layout(one) if isinstance(one, Tensor) else one for one in given)
        return self.keep(("launches", name, *key), LaunchCache)

    def hidden_tiles(self, block_n: int) -> HiddenTiles | None:
        """What is hidden of whole key tiles of ``block_n`` rows; None where nothing is."""
        hidden = self.hidden
        if hidden is None:
            return None
        return self.keep(("hidden tiles", block_n), lambda: HiddenTiles.of(hidden, self.rows, block_n))

    def bounds(self, device: torch.device) -> Tensor:
        """int32 [ranges, 2, keys]: starts and stops of the rows that keys are hidden from; ranges may be 0."""

        def make() -> Tensor:
            if self.hidden is None:
                return torch.zeros(0, 2, self.keys, dtype=torch.int32, device=device)
            both = np.stack((self.hidden.starts, self.hidden.stops), axis=1).astype(np.int32)
            return torch.from_numpy(both).to(device)

        return self.keep(("bounds", device), make)


class ListedPlan(Plan):
    """A plan whose lists are made on the host, once per tile shape, and kept with their tables on the device."""

    @abstractmethod
    def make_lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """The tile lists for query tiles of ``block_m`` and key tiles of ``block_n`` rows."""

    @property
    def every_row_has_work(self) -> bool:
        """By the lists of the largest tiles that fit."""
        tile = largest_tile(self.block_size)

        def found() -> bool:
            return bool((self.lists(tile, tile, by_key=False).spans[..., 1:].sum(-1) > 0).all())

        return self.keep("every row has work", found)

    def pairs(self, num_heads: int) -> int | None:
        """By the lists of the largest tiles that fit."""
        tile = largest_tile(self.block_size)

        def found() -> int:
            return int(self.lists(tile, tile, by_key=False).spans[..., 1:].sum()) * tile * tile

        return self.keep("pairs", found) * (num_heads // self.mask_heads)

    def lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """The same, made once."""
        return self.keep(("lists", block_m, block_n, by_key), lambda: self.make_lists(block_m, block_n, by_key))

    def tables(self, config: TileConfig, by_key: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(spans, entries, order) of `TileLists` on the device."""

        def make() -> tuple[Tensor, Tensor, Tensor]:
            lists = self.lists(config.block_m, config.block_n, by_key)
            spans, entries, order = (torch.from_numpy(x).to(device) for x in (lists.spans, lists.entries, lists.order))
            return spans, entries, order

        return self.keep(("tables", config.block_m, config.block_n, by_key, device), make)

    def key_items(self, config: TileConfig, num_heads: int, kv_heads: int, device: torch.device) -> KeyItems:
        """Tiles with long lists in several items."""
        from dilabench.kernels.block_sparse.key_items import balanced_items

        def make() -> KeyItems:
            counts = self.lists(config.block_m, config.block_n, by_key=True).spans[..., 1:].sum(-1)
            if self.mask_heads > 1:
                # Of heads that share keys and have masks of their own, the longest list.
                counts = counts.repeat(num_heads // self.mask_heads, 0)
                counts = counts.reshape(kv_heads, num_heads // kv_heads, -1).max(1)
            return balanced_items(counts, num_heads // kv_heads, kv_heads, device)

        return self.keep(("items", config.block_m, config.block_n, num_heads, kv_heads, device), make)


@dataclass(frozen=True)
class BlockPlan(ListedPlan):
    """A block mask [heads or 1, n, n] over blocks of ``block_size`` of ``rows`` rows, causal edge and window in rows.

    Successive query heads share a head of the mask: 1 for all, or one for each key/value head. With ``key_rows`` the
    keys are other rows than the queries', as on a rank that was sent them: the mask is [heads or 1, blocks of queries,
    blocks of keys], and neither causal edge nor window can hide a pair inside its blocks (ValueError). ``hidden``: the
    rows of queries that single keys are hidden from. Lists and device tables are made once per tile shape and kept.
    """

    mask: BoolArray
    block_size: int
    rows: int
    causal: bool
    window: tuple[int, int] = (-1, -1)
    key_rows: int | None = None
    hidden: HiddenRows | None = None
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.key_rows is not None and (self.causal or self.window != (-1, -1)):
            raise ValueError(
                f"causal={self.causal} and window {self.window} measure distances between rows, which keys of their "
                "own rows do not have: leave them out, or leave key_rows out"
            )

    @property
    def mask_heads(self) -> int:
        """Heads in the mask: 1 when all query heads share one."""
        return int(self.mask.shape[0])

    def seen_blocks(self, mask_head: int, block: int) -> npt.NDArray[np.int64]:
        """A row of the mask."""
        return np.flatnonzero(self.mask[mask_head, block])

    def make_lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """Of the blocks in the mask."""
        return tile_lists(self.mask, self.block_size, self.visibility, block_m, block_n, by_key)


def _of_kv_heads(order: Tensor, kv_heads: int) -> Tensor:
    """[key/value heads or 1, tiles]: the order of the first mask head of each, or that of all."""
    masks = len(order)
    if masks < kv_heads:
        return order if masks == 1 else order.repeat_interleave(kv_heads // masks, 0)
    return order.unflatten(0, (kv_heads, masks // kv_heads))[:, 0]

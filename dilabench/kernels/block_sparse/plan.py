"""A block mask ready for attention: the mask, what hides pairs inside its blocks, and tile lists on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilabench.kernels.block_sparse.lists import (
    BoolArray,
    HiddenTiles,
    QueryLists,
    TileLists,
    Visibility,
    block_lists,
    largest_tile,
    limits_of,
    lists_with_room,
    transposed,
    visible_tiles,
)
from dilabench.kernels.fused.branch_group import MAX_WINDOW, BranchGroup
from dilabench.kernels.tuning import Direction, TileConfig, select_kernel
from dilabench.patterns.answers import HiddenRows

if TYPE_CHECKING:
    from dilabench.kernels.block_sparse.key_lists import KeyLists
    from dilabench.kernels.launch_cache import LaunchCache

KeptT = TypeVar("KeptT")


class Plan(ABC):
    """The kernels' view of blocks of ``block_size`` rows: their lists, and rules that hide pairs inside them.

    ``rows`` of queries, causal edge and window in rows. With ``key_rows`` the keys are other rows than the queries', as
    on a rank that received them. ``hidden``: the query rows that single keys are hidden from.
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
        """The key blocks of a query block, ascending, on the host."""

    @abstractmethod
    def lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """The lists for query tiles of ``block_m`` and key tiles of ``block_n`` rows, on the device of what the plan is
        made of.
        """

    def query_lists(self, tiles: TileConfig, device: torch.device) -> QueryLists:
        """The lists for programs by query, on a device."""

        def make() -> QueryLists:
            lists = QueryLists.of(self.lists(tiles.block_m, tiles.block_n, by_key=False))
            return QueryLists(*(x.to(device) for x in lists))

        return self.keep(("by query", tiles.block_m, tiles.block_n, device), make)

    def key_lists(self, tiles: TileConfig, num_heads: int, kv_heads: int, device: torch.device) -> KeyLists:
        """The lists for programs by key, on a device: each walks over the lists of the heads that share keys.

        Lists are not split, because the host does not know their lengths.
        """
        # Triton is not installed everywhere, and only lists of tiles need it.
        from dilabench.kernels.block_sparse.key_lists import whole_lists

        def make() -> KeyLists:
            return whole_lists(self.lists(tiles.block_m, tiles.block_n, by_key=True), kv_heads)

        return self.keep(("by key", tiles.block_m, tiles.block_n, num_heads, kv_heads, device), make)

    def group(self, num_heads: int, kv_heads: int, by_key: bool = False) -> BranchGroup:
        """The plan as the fused kernels see it: one branch of rate 1 over all rows of queries, or of keys, in which
        every mask head is a kind.
        """
        rows = self.keys if by_key else self.rows
        window_left, window_right = (
            MAX_WINDOW if side < 0 else side for side in (self.left, 0 if self.causal else self.right)
        )
        return BranchGroup(
            branches=(0,),
            modulus=1,
            rates=(1,),
            segment_rows=(rows,),
            super_tokens=rows,
            length=rows,
            kinds=((0,),) * self.mask_heads,
            head_kind=tuple(head * self.mask_heads // num_heads for head in range(num_heads)),
            head_shift=(0,) * num_heads,
            heads_per_kv=num_heads // kv_heads,
            window=None if self.left < 0 and (self.causal or self.right < 0) else (window_left, window_right),
        )

    def head_kinds(self, num_heads: int, device: torch.device) -> Tensor:
        """int32 [H, 2]: mask head and class shift of each head."""

        def make() -> Tensor:
            heads = torch.arange(num_heads, dtype=torch.int32, device="cpu") * self.mask_heads // num_heads
            return torch.stack((heads, torch.zeros_like(heads)), 1).to(device)

        return self.keep(("head kinds", num_heads, device), make)

    @property
    def every_row_has_work(self) -> bool:
        """Return True if no list can be empty; otherwise outputs must be zeroed first."""
        return False

    def pairs(self, num_heads: int) -> int | None:  # noqa: ARG002
        """Pairs of query and key rows in the blocks of all heads; None if unknown on the host."""
        return None

    @property
    def keys(self) -> int:
        """Rows of keys."""
        return self.rows if self.key_rows is None else self.key_rows

    @property
    def visibility(self) -> Visibility:
        """Rules that hide pairs inside the mask's blocks."""
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
        if given is not None:
            return given.fitted(tile)
        kernel = select_kernel(direction, dim, causal=self.causal, largest_tile=tile, itemsize=itemsize, blocks=True)
        return kernel.tiles

    def keep(self, key: Hashable, make: Callable[[], KeptT]) -> KeptT:
        """The result of `make`, called once per key and kept with the plan."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: KeptT = self._kept[key]
        return kept

    def launch_cache(self, name: str, tensors: Sequence[Tensor], *options: Hashable) -> LaunchCache:
        """The launch cache of a pass for tensors of one layout and these options, kept with the plan."""
        # Triton is not installed everywhere, and only its kernels are launched so.
        from dilabench.kernels.launch_cache import LaunchCache, layout

        return self.keep(("launches", name, options, *map(layout, tensors)), LaunchCache)

    def hidden_tiles(self, block_n: int) -> HiddenTiles | None:
        """The ranges of rows that whole key tiles of ``block_n`` rows are hidden from, on the plan's device; None
        without ranges.
        """
        if self.hidden is None:
            return None
        return self.keep(
            ("hidden tiles", block_n),
            lambda: HiddenTiles.of(self.bounds(torch.device("cpu")), self.rows, block_n),
        )

    def bounds(self, device: torch.device) -> Tensor:
        """int32 [ranges, 2, keys]: starts and stops of the rows that keys are hidden from; ranges may be 0."""

        def make() -> Tensor:
            hidden = self.hidden
            limits = (
                torch.zeros(0, 2, self.keys, dtype=torch.int32, device="cpu") if hidden is None else limits_of(hidden)
            )
            return limits.to(device)

        return self.keep(("bounds", device), make)


class ListedPlan(Plan):
    """A plan whose lists are made on the host, once per tile shape, and kept with their copies on the device."""

    @abstractmethod
    def make_lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """As `lists`, without the cache."""

    def lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """The lists of `make_lists`, made once."""
        return self.keep(("lists", block_m, block_n, by_key), lambda: self.make_lists(block_m, block_n, by_key))

    @property
    def every_row_has_work(self) -> bool:
        """Whether each row has work, by the lists of the largest tiles that fit."""
        tile = largest_tile(self.block_size)
        return self.keep("every row has work", lambda: bool((self.lists(tile, tile, by_key=False).lengths > 0).all()))

    def pairs(self, num_heads: int) -> int | None:
        """Count pairs by the lists of the largest tiles that fit."""
        tile = largest_tile(self.block_size)
        pairs = self.keep("pairs", lambda: int(self.lists(tile, tile, by_key=False).lengths.sum()) * tile * tile)
        return pairs * (num_heads // self.mask_heads)

    def key_lists(self, tiles: TileConfig, num_heads: int, kv_heads: int, device: torch.device) -> KeyLists:
        """The lists by key; tiles with long lists have several items."""
        from dilabench.kernels.block_sparse.key_lists import balanced_lists

        def make() -> KeyLists:
            lists = self.lists(tiles.block_m, tiles.block_n, by_key=True)
            return balanced_lists(lists, num_heads, kv_heads, device)

        return self.keep(("by key", tiles.block_m, tiles.block_n, num_heads, kv_heads, device), make)


@dataclass(frozen=True)
class BlockPlan(ListedPlan):
    """A block mask [heads or 1, n, n] over blocks of ``block_size`` of ``rows`` rows, causal edge and window in rows.

    Successive query heads share a head of the mask: 1 for all, or one for each key/value head. With ``key_rows`` the
    keys are other rows than the queries', as on a rank that received them: the mask is [heads or 1, blocks of queries,
    blocks of keys], without causal edge and window (ValueError). ``hidden``: the query rows that single keys are hidden
    from. Lists and device tables are made once per tile shape and kept.
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
                f"causal={self.causal} and window {self.window} measure distances between rows, which separate key "
                "rows do not have: omit them, or omit key_rows"
            )

    @property
    def mask_heads(self) -> int:
        """Heads in the mask: 1 when all query heads share one."""
        return int(self.mask.shape[0])

    def seen_blocks(self, mask_head: int, block: int) -> npt.NDArray[np.int64]:
        """A row of the mask."""
        return np.flatnonzero(self.mask[mask_head, block])

    def make_lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """The tile lists of the mask's visible blocks."""
        if by_key and ("lists", block_m, block_n, False) in self._kept:
            return transposed(self.lists(block_m, block_n, by_key=False), -(-self.keys // block_n))
        hidden = self.hidden_tiles(block_n)
        return block_lists(self.mask, self.block_size, self.visibility, block_m, block_n, by_key, hidden)


@dataclass(frozen=True, eq=False)
class BoundedPlan(Plan):
    """Bounds of columns on a device, where its lists are made: the host neither copies nor waits.

    It serves documents that change in each batch. ``limits`` int32 [ranges, 2, rows]: key j is hidden from the rows
    limits[r, 0, j] <= i < limits[r, 1, j]; the ranges of one key ascend and do not overlap (`HiddenRows`, whose form
    for the host is ``hidden``). ``block_size`` rows at most in a tile. Memory: about 30 bytes for each pair of tiles
    while lists are made, 6 afterwards.
    """

    limits: Tensor
    block_size: int
    rows: int
    causal: bool
    hidden: HiddenRows
    window: tuple[int, int] = (-1, -1)
    key_rows: None = field(default=None, init=False)
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def mask_heads(self) -> int:
        """All heads are alike."""
        return 1

    def seen_blocks(self, mask_head: int, block: int) -> npt.NDArray[np.int64]:  # noqa: ARG002
        """All: bounds hide inside blocks."""
        return np.arange(-(-self.rows // self.block_size))

    def bounds(self, device: torch.device) -> Tensor:
        """The limits, which must be on this kind of device."""
        assert device.type == self.limits.device.type
        return self.limits

    def hidden_tiles(self, block_n: int) -> HiddenTiles:
        """The bounds of tiles from the limits, on their device."""
        return self.keep(("hidden tiles", block_n), lambda: HiddenTiles.of(self.limits, self.rows, block_n))

    def lists(self, block_m: int, block_n: int, by_key: bool) -> TileLists:
        """The lists of the tiles that may be visible."""

        def find() -> tuple[Tensor, Tensor]:
            queries = torch.arange(-(-self.rows // block_m), device=self.limits.device)
            return visible_tiles(self.visibility, queries, block_m, block_n, self.hidden_tiles(block_n))

        listed, full = self.keep(("visible tiles", block_m, block_n), find)
        return lists_with_room(listed.T, full.T) if by_key else lists_with_room(listed, full)

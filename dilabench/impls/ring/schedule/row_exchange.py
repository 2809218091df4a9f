"""Rows of K and V that some local query sees: each travels once, and its gradients come back once.

What comes is kept holder by holder, K beside V, so that a holder's rows are one message. Where key/value heads are seen
by different queries, a row travels with some of its heads only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dilabench.distributed.world import Pending, World
from dilabench.impls.ring.schedule.sums import Sum


class Places(NamedTuple):
    """Where what comes lies for a kernel: `rows` rows of all heads, and which (row, head) each that comes is.

    [rows that come] int64, row·heads + head. What nothing comes for is never read.
    """

    rows: int
    order: Tensor


@dataclass(frozen=True, slots=True)
class RowExchange:
    """needs: rows that come from each holder. gives: local rows that each reader needs, or None for all.

    heads: 1, or the number of key/value heads where these travel each by itself: a row is then (row, head), by number
    row·heads + head, and `places` says where it lies among those of all heads. None: as they come.
    """

    world: World
    needs: dict[int, int]
    gives: dict[int, Tensor | None]
    heads: int = 1
    places: Places | None = None

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Pending]:
        """Send what others need, receive what this rank needs: [rows, 2, B, K/heads, D], holder by holder."""
        k, v = self._by_row(k), self._by_row(v)
        everything = together(k, v) if None in self.gives.values() else k
        sends = {
            reader: [everything if rows is None else together(k.index_select(1, rows), v.index_select(1, rows))]
            for reader, rows in self.gives.items()
        }
        arriving = k.new_empty(sum(self.needs.values()), 2, k.shape[0], *k.shape[2:])
        return arriving, self.world.swap(sends, self._by_holder(arriving), "keys")

    def placed(self, arrived: Tensor) -> Tensor:
        """What came as a kernel takes it: [rows, 2, B, K, D]."""
        if self.places is None:
            return arrived
        rows, order = self.places
        placed = arrived.new_empty(rows * self.heads, *arrived.shape[1:]).index_copy_(0, order, arrived)
        return placed.unflatten(0, (rows, self.heads)).squeeze(4).permute(0, 2, 3, 1, 4)

    def gradients(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Those [B, rows, K, D] of what was placed, as it came: [rows, 2, B, K/heads, D]."""
        if self.places is not None:
            dk, dv = (self._by_row(x).index_select(1, self.places.order) for x in (dk, dv))
        return together(dk, dv)

    def give_back(self, gradients: Tensor, k: Tensor) -> tuple[dict[int, Tensor], Pending]:
        """Send dK and dV of what came to their holders, receive those that readers have made of own rows."""
        k = self._by_row(k)
        returning = {
            reader: k.new_empty(k.shape[1] if rows is None else len(rows), 2, k.shape[0], *k.shape[2:])
            for reader, rows in self.gives.items()
        }
        receives = {reader: [packed] for reader, packed in returning.items()}
        return returning, self.world.swap(self._by_holder(gradients), receives, "gradients")

    def add_returned(self, dk: Sum, dv: Sum, returning: dict[int, Tensor]) -> None:
        """Add what has come back to the sums of own rows."""
        for reader, packed in returning.items():
            rows = self.gives[reader]
            for sum_of, part in zip((dk, dv), apart(packed), strict=True):
                total = self._by_row(sum_of.total())
                if rows is None:
                    total.add_(part)
                else:
                    total.index_add_(1, rows, part.to(total.dtype))

    def _by_row(self, x: Tensor) -> Tensor:
        """x [B, N, K, D] as rows that travel, [B, N·heads, K/heads, D]: a view where x is contiguous."""
        return x.unflatten(2, (self.heads, -1)).flatten(1, 2)

    def _by_holder(self, packed: Tensor) -> dict[int, list[Tensor]]:
        parts = packed.split(list(self.needs.values())) if self.needs else ()
        return {holder: [part] for holder, part in zip(self.needs, parts, strict=True)}


def together(k: Tensor, v: Tensor) -> Tensor:
    """k and v [B, N, K, D] as one contiguous [N, 2, B, K, D]: rows first, so that holders' parts follow each other."""
    packed = k.new_empty(k.shape[1], 2, k.shape[0], *k.shape[2:])
    for side, x in enumerate((k, v)):
        packed[:, side] = x.transpose(0, 1)
    return packed


def apart(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Views [B, N, K, D] of both."""
    return packed[:, 0].transpose(0, 1), packed[:, 1].transpose(0, 1)

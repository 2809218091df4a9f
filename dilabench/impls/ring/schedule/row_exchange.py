"""Rows of K and V that some local query sees: each travels once, and its gradients come back once.

What comes is kept holder by holder, K beside V, so that a holder's rows are one message.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dilabench.distributed.world import Pending, World
from dilabench.impls.ring.schedule.sums import Sum


@dataclass(frozen=True, slots=True)
class RowExchange:
    """needs: rows that come from each holder. gives: local rows that each reader needs, or None for all."""

    world: World
    needs: dict[int, int]
    gives: dict[int, Tensor | None]

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Pending]:
        """Send what others need, receive what this rank needs: [rows, 2, B, K, D], holder by holder."""
        everything = together(k, v) if None in self.gives.values() else k
        sends = {
            reader: [everything if rows is None else together(k.index_select(1, rows), v.index_select(1, rows))]
            for reader, rows in self.gives.items()
        }
        arriving = k.new_empty(sum(self.needs.values()), 2, k.shape[0], *k.shape[2:])
        return arriving, self.world.swap(sends, self._by_holder(arriving), "keys")

    def give_back(self, gradients: Tensor, k: Tensor) -> tuple[dict[int, Tensor], Pending]:
        """Send dK and dV of what came to their holders, receive those that readers have made of own rows."""
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
                total = sum_of.total()
                if rows is None:
                    total.add_(part)
                else:
                    total.index_add_(1, rows, part.to(total.dtype))

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

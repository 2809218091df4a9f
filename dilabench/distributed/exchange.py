"""Exchanges of the same rows call after call: what depends on shapes alone is made once for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dilabench.distributed.transport.messages import Message, Plan, RowsOf, counts_of
from dilabench.distributed.world import Work, World


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows of contiguous tensors that ranks send each other in one batch, in the same order on both sides.

    Tensors have the axes [B, N, K, D]; one to receive into may have two of these, [2, B, N, K, D], whose rows come in
    two messages. kind: a key of `metadata.TRAFFIC`.
    """

    world: World
    kind: str
    sends: Mapping[int, Sequence[RowsOf]]
    receives: Mapping[int, Sequence[RowsOf]]
    _plans: dict[tuple[object, ...], tuple[Plan, Sequence[int]]] = field(default_factory=dict, compare=False)

    def start(self, *tensors: Tensor) -> Work:
        """Send and receive rows of these tensors, and return the work to wait for."""
        given = [x.contiguous() for x in tensors]
        copies = self.world.copies
        if copies is None:
            return self.world.send_recv(_rows(self.sends, given), _rows(self.receives, given), self.kind)
        if not self.sends and not self.receives:
            return Work(())
        key = (given[0].dtype, *[x.shape for x in given])
        known = self._plans.get(key)
        if known is None:
            known = self._plans[key] = self._planned(given)
        plan, arriving = known
        self.world.count(plan.sent, plan.received, self.kind)
        work = copies.exchange(plan.sends, plan.receives, given)
        return Work([work], [given[number] for number in arriving])

    def _planned(self, tensors: Sequence[Tensor]) -> tuple[Plan, Sequence[int]]:
        """The messages, and the numbers of the tensors that are received into."""
        sends, receives = (
            {peer: Message.of_rows(rows, tensors) for peer, rows in several.items()}
            for several in (self.sends, self.receives)
        )
        sent, received = (counts_of(_rows(rows, tensors)) for rows in (self.sends, self.receives))
        arriving = [*{number for rows in self.receives.values() for number, *_ in rows}]
        return Plan(sends, receives, sent, received), arriving


def _rows(rows: Mapping[int, Sequence[RowsOf]], tensors: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """By peer, the rows as tensors."""
    return {
        peer: [
            x.narrow(1, first, stop - first)
            for number, first, stop in several
            for x in ((tensors[number],) if tensors[number].ndim == 4 else tensors[number])
        ]
        for peer, several in rows.items()
    }

"""One rank of several without the others: it allocates what a real rank would and waits for nobody.

For measuring what a rank needs on a machine that has no room, or no devices, for all of them. What would arrive is
zeros, so results mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dilabench.distributed.world import Pending, World


class SingleRank(World):
    """A `World` of `size` ranks of which only this one runs."""

    @classmethod
    def of(cls, rank: int, size: int, device: torch.device | str = "cpu") -> SingleRank:
        """Rank `rank` of `size`, without a process group."""
        return cls(rank, size, torch.device(device))

    def swap(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, Sequence[Tensor]],
        kind: str,  # noqa: ARG002
    ) -> Pending:
        """Keep what would be sent until it is waited for; fill what would arrive with zeros."""
        for tensors in receives.values():
            for tensor in tensors:
                tensor.zero_()
        return Pending((), [tensor.contiguous() for tensors in sends.values() for tensor in tensors])

    def all_to_all(
        self,
        flat: Tensor,
        give: Sequence[int],  # noqa: ARG002
        take: Sequence[int],
        kind: str,  # noqa: ARG002
    ) -> tuple[Tensor, Pending]:
        """Zeros of the size that would arrive."""
        return flat.new_zeros(sum(take)), Pending((), [flat])

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Leave the tensors: the other ranks are taken to have zeros."""

    def share(self, fact: Any) -> list[Any]:
        """The fact once per rank."""
        return [fact] * self.size

    def barrier(self) -> None:
        """Return at once."""

"""A rank that sends nothing: one of several without the others, or a real one whose messages are omitted.

The first shows the memory of a rank if memory or devices do not suffice for all; the second the time of a call without
its communication. Receive buffers are uninitialised, so results are meaningless.
"""

# ruff: noqa: ARG002 (it takes what `World` takes)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dilabench.distributed.world import Work, World


class SingleRank(World):
    """A `World` without messages. Real ranks still `share`, `agree` and meet at a `barrier`."""

    __slots__ = ()

    @classmethod
    def of(cls, rank: int, size: int, device: torch.device | str = "cpu") -> SingleRank:
        """Rank `rank` of `size`, of which only this one runs: it allocates like a real one and never waits.

        `share` returns its fact once per rank.
        """
        return cls(rank, size, torch.device(device))

    @classmethod
    def silenced(cls, world: World) -> SingleRank:
        """A real rank that neither sends nor copies its messages."""
        return cls(world.rank, world.size, world.device, world.group, world.control, world.traffic, world.timeout_s)

    def send_recv(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], kind: str
    ) -> Work:
        """Send nothing; without other ranks the tensors that a real rank keeps until `wait` are kept, too.

        Copy engines, which carry messages between GPUs (`meta` in a trace), copy sent tensors into separate buffers.
        """
        if self.group:
            return Work(())
        if self.device.type != "cpu":
            return Work((), [tensor for tensors in receives.values() for tensor in tensors])
        return Work((), [tensor.contiguous() for tensors in sends.values() for tensor in tensors])

    def all_to_all(
        self, flat: Tensor, input_split_sizes: Sequence[int], output_split_sizes: Sequence[int], kind: str
    ) -> tuple[Tensor, Work]:
        """A buffer of the size that would arrive."""
        return flat.new_empty(sum(output_split_sizes)), Work((), [flat])

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Leave each rank's tensors as they are."""

    def share(self, fact: Any) -> list[Any]:
        """The fact once per rank, or of every real rank."""
        return super().share(fact) if self.group else [fact] * self.size

    def barrier(self) -> None:
        """Return immediately if there are no other ranks."""
        if self.group:
            super().barrier()

"""Some of the ranks of a world as a world of their own, as the rows and columns of a mesh of ranks are.

Messages go through the world that they are part of, which carries and counts them: no further process group is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dilabench.distributed.world import Pending, World


@dataclass(frozen=True, slots=True)
class SomeRanks(World):
    """Rank `rank` of those `members` of `whole`, rising. All ranks of the whole make their calls together."""

    whole: World | None = None
    members: tuple[int, ...] = ()

    @classmethod
    def of(cls, whole: World, members: Sequence[int]) -> SomeRanks:
        """The part of a world that these ranks are, its own rank among them."""
        place = list(members).index(whole.rank)
        return cls(place, len(members), whole.device, traffic=whole.traffic, whole=whole, members=tuple(members))

    def swap(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], kind: str
    ) -> Pending:
        """As `World.swap`, with peers counted among the members."""
        assert self.whole is not None
        sends, receives = (
            {self.members[peer]: several for peer, several in part.items()} for part in (sends, receives)
        )
        return self.whole.swap(sends, receives, kind)

    def all_to_all(self, flat: Tensor, give: Sequence[int], take: Sequence[int], kind: str) -> tuple[Tensor, Pending]:
        """As `World.all_to_all`, as one batch of messages."""
        received = flat.new_empty(sum(take))
        given, taken = flat.split(list(give)), received.split(list(take))
        taken[self.rank].copy_(given[self.rank])
        sends, receives = (
            {peer: [part] for peer, part in enumerate(parts) if peer != self.rank and part.numel()}
            for parts in (given, taken)
        )
        return received, self.swap(sends, receives, kind)

    def share(self, fact: Any) -> list[Any]:
        """A fact of every member; every rank of the whole tells its own."""
        assert self.whole is not None
        facts = self.whole.share(fact)
        return [facts[member] for member in self.members]

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Not offered: its collective needs a process group of the members."""
        raise NotImplementedError(f"sums over ranks {list(self.members)} alone; sum over all ranks of the world")

    def barrier(self) -> None:
        """Meet all ranks of the whole."""
        assert self.whole is not None
        self.whole.barrier()

"""Memory of `ring-allgather` on one rank: all that other ranks hold for it, in one buffer (`impls.ring.allgather`)."""

from dataclasses import dataclass

from dilabench.predict.memory.ledger import Ledger
from dilabench.predict.memory.over_ranks.rings import RankMemory, finished
from dilabench.predict.memory.over_ranks.sums import SoftmaxMemory


@dataclass(frozen=True, slots=True)
class AllGatherMemory:
    """One collective per pass; what arrived stays for the backward pass."""

    rank: RankMemory

    @property
    def gathered(self) -> float:
        """K and V of other ranks."""
        return sum(parcel.packed for parcel in self.rank.share.needs.values())

    @property
    def given(self) -> float:
        """K and V for other ranks."""
        return sum(parcel.packed for parcel in self.rank.share.gives.values())

    def forward(self) -> float:
        """Bytes beyond the inputs."""
        ledger, share = Ledger(), self.rank.share
        results = SoftmaxMemory(ledger, share, self.rank.defers)
        ledger.hold("packed", sum(parcel.packed for parcel in share.gives.values() if parcel.copied))
        ledger.hold("sent", self.given)
        ledger.hold("gathered", self.gathered)
        self.rank.attend_own(ledger, results)
        ledger.free("sent")
        for holder in sorted(share.needs):
            self._unpack(ledger, holder)
            self.rank.attend(ledger, results, share.reads[holder])
        results.finish()
        return ledger.peak

    def backward(self) -> float:
        """Bytes beyond the inputs, out, lse and what was gathered."""
        ledger, share = Ledger(), self.rank.share
        sums = self.rank.sums(ledger)
        packed = 0.0
        for holder in sorted(share.needs):
            self._unpack(ledger, holder)
            packed += self.rank.remote_backward(ledger, holder, sums[0])
            ledger.hold("packed", packed)
        ledger.hold("sent", packed)
        ledger.hold("returned", share.gradient * self.given)
        self.rank.attend_own_backward(ledger, sums)
        ledger.free("sent")
        for parcel in share.gives.values():
            self.rank.add_parcel(parcel, sums, None)
        finished(ledger, sums)
        return ledger.peak

    def _unpack(self, ledger: Ledger, holder: int) -> None:
        parcel = self.rank.share.needs[holder]
        if not parcel.whole:
            ledger.hold("unpacked", parcel.rows)

"""Memory of the ring implementations on one rank, hop by hop (`impls.ring.hops`, `impls.ring.share`)."""

from dataclasses import dataclass
from itertools import pairwise

from dilabench.predict.memory.kernels import Kernel
from dilabench.predict.memory.ledger import Ledger
from dilabench.predict.memory.over_ranks.placed import PlacedSoftmaxMemory, PlacedSumMemory
from dilabench.predict.memory.over_ranks.shares import Parcel, Piece, Share
from dilabench.predict.memory.over_ranks.sums import SoftmaxMemory, SumMemory
from dilabench.predict.memory.union import Passes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank allocates for its own calls."""

    share: Share
    kernel: Kernel
    on_cpu: bool

    @property
    def defers(self) -> bool:
        """Whether partial results wait for each other, to be summed by a kernel."""
        return not self.on_cpu and self.share.workload.dtype in {"float16", "bfloat16"}

    def attend_own(self, ledger: Ledger, results: SoftmaxMemory) -> None:
        """The part that needs nobody."""
        if self.share.local is not None:
            ledger.moment(Passes.of(self.share.local, self.kernel, gathered=False).forward())
            results.put()
        self.attend(ledger, results, self.share.own)

    def attend(self, ledger: Ledger, results: SoftmaxMemory | PlacedSoftmaxMemory, pieces: tuple[Piece, ...]) -> None:
        """Pieces, one after another: a result stays until the next has been made."""
        for piece in pieces:
            for _ in range(min(2, piece.times)):
                placed = piece.call.sizes.q if results.place(piece) else 0.0
                ledger.moment(piece.call.sizes.result - placed + self.kernel.forward(piece.call))
                ledger.hold("part", piece.call.sizes.result - placed)
                results.add(piece)
        ledger.free("part")

    def attend_own_backward(self, ledger: Ledger, sums: tuple[SumMemory, SumMemory, SumMemory]) -> None:
        """The gradients of `attend_own`."""
        if self.share.local is not None:
            ledger.moment(Passes.of(self.share.local, self.kernel, gathered=False).backward())
            for total in sums:
                total.put(total.size, whole=True, moved="gradients of the union")
        self.attend_backward(ledger, sums, self.share.own)

    def attend_backward(
        self,
        ledger: Ledger,
        sums: tuple[SumMemory | PlacedSumMemory, SumMemory, SumMemory],
        pieces: tuple[Piece, ...],
    ) -> None:
        """The gradients of pieces; those of one stay until the next has been made."""
        for piece in pieces:
            for _ in range(min(2, piece.times)):
                sizes = piece.call.sizes
                placed = sizes.q if sums[0].place(piece) else 0.0
                ledger.moment(self.kernel.backward(piece.call) - placed)
                parts = {"dq": sizes.q - placed, "dk": sizes.kv, "dv": sizes.kv}
                for name, size in parts.items():
                    ledger.hold(f"part of {name}", size)
                wholes = piece.whole_queries, piece.whole_keys, piece.whole_keys
                for total, (name, size), whole in zip(sums, parts.items(), wholes, strict=True):
                    if piece.in_order:
                        total.put(size, whole=whole, moved=f"part of {name}")
                    else:
                        total.add(size, cast=self.on_cpu)
        ledger.free("part of dq", "part of dk", "part of dv")

    def remote_backward(self, ledger: Ledger, holder: int, dq: SumMemory) -> float:
        """Bytes of packed dK and dV of what was read of a holder."""
        share, parcel = self.share, self.share.needs[holder]
        dk, dv = (self._sum(ledger, name, parcel.rows / 2) for name in ("remote dk", "remote dv"))
        self.attend_backward(ledger, (dq, dk, dv), share.reads[holder])
        packed = share.gradient * parcel.packed
        for index, total in enumerate((dk, dv)):
            cast = total.finish(share.gradient)
            ledger.moment(cast + (0.0 if parcel.whole else (index + 1) * packed / 2))
            if parcel.whole and cast:
                ledger.hold(f"cast {total.name}", cast)
        ledger.free("cast remote dk", "cast remote dv")
        for total in (dk, dv):
            total.drop()
        return packed

    def sums(self, ledger: Ledger) -> tuple[SumMemory, SumMemory, SumMemory]:
        """Those of q, k and v."""
        sizes = self.share.sizes
        dq, dk, dv = (
            self._sum(ledger, "dq", sizes.q),
            self._sum(ledger, "dk", sizes.kv),
            self._sum(ledger, "dv", sizes.kv),
        )
        return dq, dk, dv

    def add_parcel(self, parcel: Parcel, sums: tuple[SumMemory, SumMemory, SumMemory], name: str | None) -> None:
        """dK and dV that another rank has made, held as `name`, or in a buffer that stays anyway (None)."""
        half = self.share.gradient * parcel.packed / 2
        narrow = self.share.gradient < self.share.wide
        for total in sums[1:]:
            if parcel.whole:
                total.put(half, whole=parcel.rows / 2 == total.size, moved=name)
            else:
                # Single vectors that travel in the tensor's dtype are first made as wide as the sum.
                total.add(half, cast=narrow)

    def _sum(self, ledger: Ledger, name: str, size: float) -> SumMemory:
        return SumMemory(ledger, name, size, wide=self.share.wide, defers=self.defers, on_cpu=self.on_cpu)


def finished(ledger: Ledger, sums: tuple[SumMemory, SumMemory, SumMemory]) -> None:
    """All three in their own dtypes beside what they were summed in."""
    for total in sums:
        ledger.hold(f"finished {total.name}", total.finish())


@dataclass(frozen=True, slots=True)
class RingMemory:
    """`impls.ring.hops.Ring`: K and V of one rank after another, in one buffer or in two."""

    rank: RankMemory
    overlap: bool

    @property
    def kept(self) -> float:
        """K and V of the last hop, where hops overlap."""
        share = self.rank.share
        holder = (share.rank + 1) % share.size
        return share.needs[holder].packed if self.overlap and holder in share.needs else 0.0

    def forward(self) -> float:
        """Bytes beyond the inputs."""
        ledger, share = Ledger(), self.rank.share
        results = SoftmaxMemory(ledger, share, self.rank.defers)
        for distance, following in pairwise((*range(share.size), 0)):
            self._request(ledger, following if self.overlap else distance)
            ledger.free(f"sent {distance}")
            holder = (share.rank - distance) % share.size
            if distance == 0:
                self.rank.attend_own(ledger, results)
            elif holder in share.needs:
                # Keys of an earlier hop are bound until these take their names.
                ledger.free(*(f"arrived {earlier}" for earlier in range(1, distance)))
                self._unpack(ledger, holder)
                self.rank.attend(ledger, results, share.reads[holder])
        results.finish()
        return ledger.peak

    def backward(self) -> float:
        """Bytes beyond the inputs, out, lse and what was kept."""
        ledger, share = Ledger(), self.rank.share
        sums = self.rank.sums(ledger)
        waiting: list[int] = []
        for distance, following in pairwise((*self._backward_order, 0)):
            self._request(ledger, following if self.overlap else distance)
            ledger.free(f"sent {distance}")
            if distance == 0:
                self.rank.attend_own_backward(ledger, sums)
                continue
            holder = (share.rank - distance) % share.size
            if holder in share.needs:
                self._unpack(ledger, holder)
                ledger.hold(f"gradients {distance}", self.rank.remote_backward(ledger, holder, sums[0]))
                ledger.free("unpacked")
            self._give_back(ledger, distance)
            ledger.free(f"arrived {distance}")
            waiting.append(distance)
            if not self.overlap or len(waiting) > 1:
                self._add(ledger, waiting.pop(0), sums)
        for distance in waiting:
            self._add(ledger, distance, sums)
        finished(ledger, sums)
        return ledger.peak

    @property
    def _backward_order(self) -> tuple[int, ...]:
        """Where hops overlap, what was kept comes first and the own part last."""
        size = self.rank.share.size
        return (size - 1, *range(1, size - 1), 0) if self.overlap and size > 1 else tuple(range(size))

    def _request(self, ledger: Ledger, distance: int) -> None:
        """Room for a hop's keys, and for those that it sends; at distance 0 is the rank itself."""
        share = self.rank.share
        reader, holder = (share.rank + distance) % share.size, (share.rank - distance) % share.size
        if reader in share.gives and share.gives[reader].copied:
            ledger.hold(f"sent {distance}", share.gives[reader].packed)
        if holder in share.needs:
            ledger.hold(f"arrived {distance}", share.needs[holder].packed)

    def _unpack(self, ledger: Ledger, holder: int) -> None:
        parcel = self.rank.share.needs[holder]
        if not parcel.whole:
            ledger.hold("unpacked", parcel.rows)

    def _give_back(self, ledger: Ledger, distance: int) -> None:
        share = self.rank.share
        reader = (share.rank + distance) % share.size
        if reader in share.gives:
            ledger.hold(f"returned {distance}", share.gradient * share.gives[reader].packed)

    def _add(self, ledger: Ledger, distance: int, sums: tuple[SumMemory, SumMemory, SumMemory]) -> None:
        share = self.rank.share
        reader = (share.rank + distance) % share.size
        # What was sent is kept until what comes back has arrived.
        ledger.free(f"gradients {distance}")
        if reader in share.gives:
            self.rank.add_parcel(share.gives[reader], sums, f"returned {distance}")
        ledger.free(f"returned {distance}")

"""Memory of `zigzag-allgather` on one rank: all keys that it sees, then a call per chunk (`impls.ring.gathered`).

By the arithmetic of `distributed.sharding` and `impls.ring.plan`; only for padded dense patterns without a window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from dilabench.predict.memory.kernels import Kernel, aligns_ends, places_results
from dilabench.predict.memory.ledger import Ledger
from dilabench.predict.memory.over_ranks.packed import held
from dilabench.predict.memory.over_ranks.placed import PlacedSoftmaxMemory, PlacedSumMemory
from dilabench.predict.memory.over_ranks.rings import RankMemory
from dilabench.predict.memory.over_ranks.shares import Piece, Share, Span, piece_of
from dilabench.predict.memory.over_ranks.sums import SoftmaxMemory, SumMemory
from dilabench.predict.memory.sizes import Sizes
from dilabench.workload.spec import Workload


class Cut(NamedTuple):
    """One kernel call of so many queries on the keys of a span; masked: not every query sees every key."""

    queries: int
    keys: Span
    masked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredMemory:
    """One exchange per pass; the gathered K and V stay for the backward pass.

    rank: its own part is the calls on its own keys alone. rows: of the rank. late: the calls on gathered keys. keys:
    bytes of gathered K. own: bytes of K of each stretch of its rows among what it gathers; given: among what others do.
    """

    rank: RankMemory
    rows: int
    late: tuple[Piece, ...]
    keys: float
    own: tuple[float, ...]
    given: tuple[float, ...]

    @classmethod
    def of(cls, workload: Workload, rank: int, size: int, kernel: Kernel, on_cpu: bool) -> Self:
        """For one rank of so many."""
        spans, others = _spans(workload, rank, size), [other for other in range(size) if other != rank]
        calls = [_early_and_late(workload, other, size, aligns_ends(kernel)) for other in range(size)]
        gathered = [max((cut.keys.stop for cut in late), default=0) for _, late in calls]
        rows = sum(span.length for span in spans)
        early, late = calls[rank]
        share = Share(
            workload=workload,
            rank=rank,
            size=size,
            sizes=Sizes.of(workload).part(rows / workload.seq_len),
            local=None,
            own=_pieces(workload, early, (rows, rows)),
            reads={},
            needs={},
            gives={},
        )
        return cls(
            rank=RankMemory(share, kernel, on_cpu),
            rows=rows,
            late=_pieces(workload, late, (rows, gathered[rank])),
            keys=_key_bytes(workload, gathered[rank]),
            own=tuple(_key_bytes(workload, length) for length in _stretches(spans, gathered[rank])),
            given=tuple(
                _key_bytes(workload, length) for other in others for length in _stretches(spans, gathered[other])
            ),
        )

    @property
    def kept(self) -> float:
        """The gathered K and V."""
        return 2 * self.keys

    def forward(self) -> float:
        """Bytes beyond the inputs."""
        ledger, rank = Ledger(), self.rank
        results: SoftmaxMemory | PlacedSoftmaxMemory = SoftmaxMemory(ledger, rank.share, rank.defers)
        if self._apart:
            results = PlacedSoftmaxMemory(ledger, rank.share, by_kernel=places_results(rank.kernel))
        ledger.hold("gathered", self.kept)
        self._send(ledger, sum(self.given))
        rank.attend(ledger, results, rank.share.own)
        ledger.free("sent")
        rank.attend(ledger, results, self.late)
        results.finish()
        return ledger.peak

    def backward(self) -> float:
        """Bytes beyond the inputs, out, lse and what was gathered; what is summed or received stays until the end."""
        ledger, rank = Ledger(), self.rank
        summed, dk, dv = rank.sums(ledger)
        dq: SumMemory | PlacedSumMemory = summed
        if self._apart:
            dq = PlacedSumMemory(ledger, "dq", rank.share, by_kernel=places_results(rank.kernel))
        dkeys, dvalues = self._sum(ledger, "gathered dk"), self._sum(ledger, "gathered dv")
        rank.attend_backward(ledger, (dq, dkeys, dvalues), self.late)
        for total in (dkeys, dvalues):
            ledger.hold(f"finished {total.name}", total.finish())
        ledger.hold("returned", 2 * sum(self.given))
        self._send(ledger, self.keys - sum(self.own))
        self._add((dk, dv), self.own)
        rank.attend_backward(ledger, (dq, dk, dv), rank.share.own)
        ledger.hold("finished dq", dq.finish())
        ledger.free("sent")
        self._add((dk, dv), self.given)
        for total in (dk, dv):
            ledger.hold(f"finished {total.name}", total.finish())
        return ledger.peak

    @property
    def _apart(self) -> bool:
        """No two calls have queries in common; every rank has each of its rows in one call then."""
        return sum(piece.call.rows for piece in (*self.rank.share.own, *self.late)) <= self.rows

    def _send(self, ledger: Ledger, keys: float) -> None:
        """K and V travel rows first: where they lie so, for one batch item, they go from there, else as copies."""
        ledger.hold("sent", 2 * keys if self.rank.share.workload.batch_size > 1 else 0.0)

    def _sum(self, ledger: Ledger, name: str) -> SumMemory:
        rank = self.rank
        return SumMemory(ledger, name, self.keys, wide=rank.share.wide, defers=rank.defers, on_cpu=rank.on_cpu)

    def _add(self, totals: tuple[SumMemory, SumMemory], parts: Sequence[float]) -> None:
        """Parts of dK and dV in memory that stays anyway."""
        for part in parts:
            for total in totals:
                total.put(part, whole=part == total.size)


def _key_bytes(workload: Workload, rows: int) -> float:
    return Sizes.of(workload).part(rows / workload.seq_len).kv


def _early_and_late(workload: Workload, rank: int, size: int, aligned: bool) -> tuple[list[Cut], list[Cut]]:
    """A rank's calls on its own keys alone, and those on keys of others, too, each by the place of their keys."""
    spans = _spans(workload, rank, size)
    cuts = sorted(_cuts(workload, spans, aligned), key=lambda cut: cut.keys)
    early = [cut for cut in cuts if any(cut.keys.cut(span) == cut.keys for span in spans)]
    return early, [cut for cut in cuts if cut not in early]


def _spans(workload: Workload, rank: int, size: int) -> list[Span]:
    return [Span(chunk.start, chunk.stop) for chunk in held(workload, rank, size, zigzag=True)]


def _cuts(workload: Workload, spans: Sequence[Span], aligned: bool) -> Iterator[Cut]:
    if not workload.causal:
        if spans:
            yield Cut(sum(span.length for span in spans), Span(0, workload.seq_len), masked=False)
        return
    for span in spans:
        if aligned:
            yield Cut(span.length, Span(0, span.stop), masked=True)
            continue
        if span.start:
            yield Cut(span.length, Span(0, span.start), masked=False)
        yield Cut(span.length, span, masked=True)


def _pieces(workload: Workload, cuts: Sequence[Cut], whole: tuple[int, int]) -> tuple[Piece, ...]:
    return tuple(
        piece_of(workload, 1, whole, cut.queries, cut.keys.length, times=1, segments=1, masked=cut.masked)
        for cut in cuts
    )


def _stretches(spans: Sequence[Span], gathered: int) -> Iterator[int]:
    """Rows of each span that are among the first `gathered` positions."""
    for span in spans:
        if length := span.cut(Span(0, gathered)).length:
            yield length

"""Memory of partial results that become one over ranks (`impls.ring.sums`)."""

from dilabench.predict.memory.ledger import Ledger
from dilabench.predict.memory.over_ranks.shares import Piece, Share

# `impls.ring.sums` lets so many parts wait on CUDA; a test holds the two together.
MOST_PARTS = 4


class SoftmaxMemory:
    """Out and lse of a rank's queries, from results over disjoint keys.

    defers: results wait for each other as they are, as in half precision on CUDA; else all but a first one that is
    complete are merged at once into wider sums.
    """

    def __init__(self, ledger: Ledger, share: Share, defers: bool) -> None:
        self._ledger, self._share, self._defers = ledger, share, defers
        self._parts: list[str] = []
        self._complete = self._merged = False

    def put(self) -> None:
        """A first result for all queries."""
        self._take("out", self._share.sizes.result, complete=True)

    def place(self, _piece: Piece) -> bool:
        """No kernel writes to a place of it."""
        return False

    def add(self, piece: Piece) -> None:
        """The result of a piece, which is held as 'part'."""
        size = piece.call.sizes.result
        if piece.in_order and (self._defers or (not self._parts and piece.whole_queries)):
            if len(self._parts) == MOST_PARTS:
                self._fold()
            self._ledger.free("part")
            self._take(f"result {len(self._parts)}", size, complete=piece.whole_queries)
            return
        self._fold()
        if not self._defers:
            sizes, share = piece.call.sizes, self._share
            part = share.wide * sizes.q if share.wide > 1 else 0.0
            self._ledger.moment(part + 3 * share.wide_lse * sizes.lse)

    def finish(self, keeps: bool = False) -> None:
        """Out and lse in their own dtypes stay. keeps: what they come from as well."""
        if not self._parts:
            self._fold()
        if len(self._parts) == 1 and self._complete and not (self._merged and self._share.wide > 1):
            return
        self._ledger.hold("finished out", self._share.sizes.result)
        if not keeps:
            self._ledger.free(*self._parts)

    def _take(self, name: str, size: float, complete: bool) -> None:
        self._ledger.hold(name, size)
        self._complete = complete and not self._parts
        self._parts.append(name)

    def _fold(self) -> None:
        if not self._merged:
            share = self._share
            self._ledger.hold("totals", share.wide * share.sizes.q + share.wide_lse * share.sizes.lse)
        self._ledger.free(*(part for part in self._parts if part != "totals"))
        self._parts, self._complete, self._merged = ["totals"], True, True


class SumMemory:
    """The gradient of a tensor from parts; `defers` as above."""

    def __init__(self, ledger: Ledger, name: str, size: float, *, wide: float, defers: bool, on_cpu: bool) -> None:
        self._ledger, self.name, self.size, self._wide = ledger, name, size, wide
        self._defers, self._on_cpu = defers, on_cpu
        self._parts: list[str] = []
        self._complete = self._merged = False

    def place(self, _piece: Piece) -> bool:
        """No kernel writes to a place of it."""
        return False

    def put(self, size: float, *, whole: bool, moved: str | None = None) -> None:
        """A part on successive rows. What waits takes the place of what is held as `moved`; None: of nothing held."""
        if not self._defers and (self._parts or not whole):
            self.add(size, cast=self._on_cpu)
            return
        if len(self._parts) == MOST_PARTS:
            self._fold()
        self._complete = whole and not self._parts
        self._parts.append(f"{self.name} {len(self._parts)}")
        if moved is not None:
            self._ledger.free(moved)
            self._ledger.hold(self._parts[-1], size)

    def add(self, size: float, *, cast: bool) -> None:
        """A part on other rows is added at once. cast: a copy of it as wide as the sum comes first, if that is wider.

        On the CPU torch itself makes one.
        """
        self._fold()
        if cast and self._wide > 1:
            self._ledger.moment(self._wide * size)

    def finish(self, dtype: float = 1.0) -> float:
        """Bytes of the result in `dtype` times the tensor's size; 0 where it is a part, or the sum, as it is."""
        if not self._parts:
            self._fold()
        alone = len(self._parts) == 1 and self._complete
        return 0.0 if alone and dtype == (self._wide if self._merged else 1.0) else dtype * self.size

    def drop(self) -> None:
        """It is gone."""
        self._ledger.free(*self._parts)

    def _fold(self) -> None:
        total = f"{self.name} total"
        if not self._merged:
            self._ledger.hold(total, self._wide * self.size)
        self._ledger.free(*(part for part in self._parts if part != total))
        self._parts, self._complete, self._merged = [total], True, True

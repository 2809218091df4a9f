"""Memory of partial results that become one over ranks (`impls.ring.sums`)."""

from dilabench.memory_plan.ledger import Ledger
from dilabench.memory_plan.shares import Piece, Share


class SoftmaxMemory:
    """Out and lse of a rank's queries: one result as it is, or several merged in wider sums."""

    def __init__(self, ledger: Ledger, share: Share, converts: bool) -> None:
        self._ledger, self._share, self._converts = ledger, share, converts
        self._alone = self._merged = False

    def put(self) -> None:
        """A first result for all queries."""
        self._ledger.hold("out", self._share.sizes.result)
        self._alone = True

    def add(self, piece: Piece) -> None:
        """The result of a piece, which is held as 'part'."""
        if not (self._alone or self._merged) and piece.whole_queries:
            self._ledger.free("part")
            self.put()
            return
        self._widen()
        if self._converts:
            sizes, share = piece.call.sizes, self._share
            part = share.wide * sizes.q if share.wide > 1 else 0.0
            self._ledger.moment(part + 3 * share.wide_lse * sizes.lse)

    def finish(self, keeps: bool = False) -> None:
        """Out and lse in their own dtypes stay. keeps: the sums as well."""
        if not self._alone:
            self._widen()
            if self._share.wide > 1:
                self._ledger.hold("out", self._share.sizes.result)
            if not keeps and self._share.wide > 1:
                self._ledger.free("totals")

    def _widen(self) -> None:
        if not self._merged:
            share = self._share
            self._ledger.hold("totals", share.wide * share.sizes.q + share.wide_lse * share.sizes.lse)
            self._ledger.free("out")
        self._alone, self._merged = False, True


class SumMemory:
    """The gradient of a tensor: one part as it is, or a sum that is held wider."""

    def __init__(self, ledger: Ledger, name: str, size: float, wide: float, on_cpu: bool) -> None:
        self._ledger, self.name, self.size, self._wide, self._on_cpu = ledger, name, size, wide, on_cpu
        self._alone = self._total = False

    @property
    def is_new(self) -> bool:
        """Nothing was added yet."""
        return not (self._alone or self._total)

    def put(self) -> None:
        """A part that covers everything: the first stays as it is."""
        if self.is_new:
            self._ledger.hold(self.name, self.size)
            self._alone = True
        else:
            self.add(self.size)

    def add(self, part: float) -> None:
        """Something is added to a part of it. On the CPU, torch first makes a copy of it as wide as the sum."""
        self._widen()
        if self._on_cpu and self._wide > 1:
            self._ledger.moment(self._wide * part)

    def _widen(self) -> None:
        if not self._total:
            self._ledger.hold(f"{self.name} total", self._wide * self.size)
            self._ledger.free(self.name)
        self._alone, self._total = False, True

    def finish(self, dtype: float = 1.0) -> float:
        """Bytes of the copy that a cast makes, to `dtype` times the tensor's size; 0 where none is needed."""
        if self.is_new:
            self._widen()
        held = 1.0 if self._alone else self._wide
        return 0.0 if held == dtype else dtype * self.size

    def drop(self) -> None:
        """It is gone."""
        self._ledger.free(self.name, f"{self.name} total")

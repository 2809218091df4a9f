"""Memory of results that go to their places in the whole (`impls.ring.placed`)."""

from dilabench.predict.memory.ledger import Ledger
from dilabench.predict.memory.over_ranks.shares import Piece, Share


class PlacedSumMemory:
    """A tensor like q: made whole before its first piece, unless a piece has all rows and is the tensor.

    by_kernel: kernels write to the place; else results are copied there.
    """

    def __init__(self, ledger: Ledger, name: str, share: Share, *, by_kernel: bool) -> None:
        self._ledger, self.name, self._size, self._by_kernel = ledger, name, share.sizes.q, by_kernel
        self._made = False

    def place(self, piece: Piece) -> bool:
        """Whether a kernel makes nothing of its own for a piece."""
        if piece.whole_queries:
            return False
        if not self._made:
            self._ledger.hold(self.name, self._size)
            self._made = True
        return self._by_kernel

    def put(self, size: float, *, whole: bool, moved: str) -> None:
        """A piece's result, held as `moved`."""
        if whole:
            self._ledger.free(moved)
            self._ledger.hold(self.name, size)

    def add(self, size: float, *, cast: bool) -> None:
        """A piece of other rows is copied, too."""

    def finish(self) -> float:
        """Bytes beside the whole."""
        return 0.0


class PlacedSoftmaxMemory:
    """Out in the same way, and lse, which is copied into a whole."""

    def __init__(self, ledger: Ledger, share: Share, *, by_kernel: bool) -> None:
        self._out = PlacedSumMemory(ledger, "out", share, by_kernel=by_kernel)
        ledger.hold("lse", share.sizes.lse)

    def place(self, piece: Piece) -> bool:
        """As of a sum."""
        return self._out.place(piece)

    def add(self, piece: Piece) -> None:
        """The result of a piece, which is held as 'part'."""
        self._out.put(piece.call.sizes.q, whole=piece.whole_queries, moved="part")

    def finish(self) -> None:
        """Nothing more."""

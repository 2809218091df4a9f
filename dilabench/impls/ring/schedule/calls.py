"""Kernel calls on pieces, and where their results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dilabench.contracts import LoadedBackend
from dilabench.impls.ring.schedule.pieces import Piece
from dilabench.impls.ring.schedule.sums import PlacedSoftmax, PlacedSum, Softmax, SoftmaxOnto, Sum, SumOnto
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Calls:
    """The attention of a workload through one backend, piece by piece."""

    workload: Workload
    backend: LoadedBackend

    def attend(
        self,
        pieces: Sequence[Piece],
        results: Softmax | PlacedSoftmax | SoftmaxOnto,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first_row: int = 0,
    ) -> None:
        """Pieces on keys whose row 0 is the owner's row `first_row`."""
        scale, places = self.workload.softmax_scale, self.backend.places_results
        for piece in pieces:
            keys, values = piece.take_keys(k, first_row), piece.take_keys(v, first_row)
            place = _place("out", results, piece) if places else {}
            out, lse = self.backend.attend(
                piece.take_queries(q), keys, values, causal=piece.causal, window=piece.window, scale=scale, **place
            )
            results.add(piece, out, lse)

    def attend_backward(
        self,
        pieces: Sequence[Piece],
        sums: tuple[Sum | PlacedSum | SumOnto, Sum, Sum],
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        first_row: int = 0,
    ) -> None:
        """The gradients of pieces, from the out and lse of all keys; dk and dv have the rows of k."""
        attend_backward = self.backend.require_backward()
        scale, places = self.workload.softmax_scale, self.backend.places_results
        for piece in pieces:
            dq, dk, dv = attend_backward(
                piece.take_queries(dout),
                piece.take_queries(q),
                piece.take_keys(k, first_row),
                piece.take_keys(v, first_row),
                piece.take_queries(out),
                piece.take_lse(lse),
                causal=piece.causal,
                window=piece.window,
                scale=scale,
                **(_place("dq", sums[0], piece) if places else {}),
            )
            sums[0].add_queries(piece, dq)
            sums[1].add_keys(piece, dk, first_row)
            sums[2].add_keys(piece, dv, first_row)


def _place(
    name: str, results: Softmax | PlacedSoftmax | SoftmaxOnto | Sum | PlacedSum | SumOnto, piece: Piece
) -> dict[str, Any]:
    """The argument that says where a result of a piece goes, if there is a place."""
    place = results.place(piece)
    return {} if place is None else {name: place}

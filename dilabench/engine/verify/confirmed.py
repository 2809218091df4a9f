"""Every row of a result against a second implementation, if the oracle can afford only a sample of rows.

The second one is a built-in that computes the same by other means. It is used only after the oracle has confirmed its
sampled rows of out, dq, dk and dv in this process. Both round differently, so rows are compared as a whole:

    |actual row - second row| / max(|second row|, median of the head's rows that are not 0, 1/64 of that of all heads)
        <= 4 · (plain + second) + 2 eps

plain and second are the largest such errors, against the oracle on the sampled rows, of the plain same-dtype
computation and of the second implementation. The factor is four: a right result may have twice the error of the plain
computation (tolerance.py). The largest error of all rows exceeds that of the sampled rows (5 standard deviations for
10^6 rows, 3 for 500). In float32 one future token among 10^5 keys is far outside; in half precision a key with a weight
of a few percent of its row's size is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilabench.engine.verify.call import PIECE, Call, Result
from dilabench.engine.verify.compare import compare, locate
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.tolerance import Expected, eps, row_errors, row_scale
from dilabench.errors import DilabenchError
from dilabench.record import Check, CheckName

NAMES = (CheckName.OUT_ALL_ROWS, CheckName.DQ_ALL_ROWS, CheckName.DK_ALL_ROWS, CheckName.DV_ALL_ROWS)


@dataclass(frozen=True, slots=True)
class EveryRow:
    """Results of the second implementation: out [B, M, H, D], then dq, dk, dv for the dout of every row.

    errors: of each on the sampled rows, as `row_errors` measures them.
    """

    tensors: tuple[Tensor, ...]
    errors: tuple[float, ...]


@dataclass(slots=True)
class Confirmed:
    """The second implementation of one workload, called at its first use. `name`: as in the record."""

    name: str
    build: Callable[[], Callable[..., Tensor]]
    _known: dict[int, EveryRow | None] = field(default_factory=dict)

    def results(self, oracle: Oracle) -> EveryRow | None:
        """Its results, None if it cannot be built, does not fit into memory, or the oracle does not confirm it."""
        if id(oracle) not in self._known:
            self._known = {id(oracle): _confirmed(self.build, oracle)}
        return self._known[id(oracle)]

    def checks(self, call: Call, oracle: Oracle, first: Result) -> Iterator[Check]:
        """out_all_rows and, with gradients, dq_, dk_ and dv_all_rows, from one more call under the dout of every row.

        first: what the function gave for the oracle's inputs.
        """
        second = self.results(oracle)
        assert second is not None
        backward = oracle.workload.mode != "forward"
        gradients = call(oracle.inputs, oracle.full_dout).gradients if backward else ()
        expected: list[Expected] = [oracle.expected[0], *(oracle.gradients if backward else ())]
        for name, actual, wanted, error, known in zip(
            NAMES, (first.out, *gradients), second.tensors, second.errors, expected, strict=False
        ):
            limit = 4 * (known.plain_rows + error) + 2 * eps(oracle.dtype)
            # A gradient that is missing has failed before.
            if actual is not None:
                begin = oracle.workload.seq_len - wanted.shape[1]
                yield _compared(name, oracle.batched(actual), wanted, limit, f"against {self.name}", begin)


def _confirmed(build: Callable[[], Callable[..., Tensor]], oracle: Oracle) -> EveryRow | None:
    backward = oracle.workload.mode != "forward"
    try:
        call = Call(build())
        first = call(oracle.inputs, oracle.sampled_dout if backward else None)
        sampled = [oracle.sampled(first.out)]
        expected: list[Expected] = [oracle.expected[0]]
        if backward:
            dq, dk, dv = first.gradients
            if dq is None or dk is None or dv is None:
                return None
            sampled += [oracle.sampled(dq), oracle.sampled_keys(dk), oracle.sampled_keys(dv)]
            expected += oracle.gradients
        axes = (("batch", None), ("position", None), ("head", None), ("dim", None))
        if call.changed or not all(
            compare("", rows, wanted, axes).passed for rows, wanted in zip(sampled, expected, strict=True)
        ):
            return None
        errors = tuple(
            float(row_errors(rows, wanted.value).max()) for rows, wanted in zip(sampled, expected, strict=True)
        )
        del sampled
        tensors = [first.out]
        if backward:
            tensors += [x for x in call(oracle.inputs, oracle.full_dout).gradients if x is not None]
        return EveryRow(tuple(oracle.batched(tensor) for tensor in tensors), errors)
    # It cannot be built, or memory is out (torch's own error is a RuntimeError): the sampled rows are still compared.
    except (DilabenchError, MemoryError, RuntimeError, ValueError):
        return None


def _compared(name: str, actual: Tensor, wanted: Tensor, limit: float, detail: str, begin: int) -> Check:
    """The check of all rows [B, N, ·, D], or from position `begin` on; the largest error in units of the row, and where
    it is.
    """
    wide = torch.promote_types(wanted.dtype, torch.float32)
    norms = torch.cat([torch.linalg.vector_norm(piece.to(wide), dim=-1) for piece in _pieces(wanted)], 1)
    scale = row_scale(norms[..., None])
    found = torch.cat(
        [
            row_errors(actual_piece, wanted_piece.to(wide), part)
            for actual_piece, wanted_piece, part in zip(
                _pieces(actual), _pieces(wanted), scale.split(_rows(wanted), 1), strict=True
            )
        ],
        1,
    )
    # NaN is no error that could be compared.
    found = found.nan_to_num_(torch.inf)
    largest = float(found.max())
    wrong = int((found > limit).sum())
    axes = (("batch", None), ("position", torch.arange(begin, begin + wanted.shape[1])), ("head", None))
    where = locate(int(found.flatten().argmax()), found.shape, axes)
    text = f"{wrong} of {found.numel()} rows differ, {detail}" if wrong else f"every row, {detail}"
    return Check(
        name=name,
        passed=not wrong,
        error=None if largest == float("inf") else largest,
        tolerance=limit,
        where=where if wrong else None,
        detail=text,
    )


def _rows(x: Tensor) -> int:
    return max(1, PIECE // max(1, x[:, :1].numel()))


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(_rows(x), 1)

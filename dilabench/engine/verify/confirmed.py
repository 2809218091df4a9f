"""Every row of a result against a second implementation, if the oracle can afford only a sample of rows.

The second implementation is a built-in that computes the same function by other code. It is used only after the oracle
has confirmed its sampled rows of out, dq, dk and dv in this process. Rounding differs, so whole rows are compared:

    |actual row - second row| / max(|second row|, median of the head's rows that are not 0, 1/64 of that of all heads)
        <= 4 · (plain + second) + 2 eps

plain and second are the largest such errors against the oracle on the sampled rows: of the plain same-dtype computation
and of the second implementation. The factor is four: a right result may have twice the error of the plain computation
(tolerance.py). The largest error of all rows exceeds that of the sampled rows (5 standard deviations for
10^6 rows, 3 for 500). In float32 one future token among 10^5 keys is far outside; in half precision a key with a weight
of a few percent of its row's size is.

A row of many values is about as long as its natural size (rounding.py). A row of few values may be much shorter: with
D = 1, one row in twelve is below a tenth of it, and sizes differ by a factor of 100 between the rows of a head, as
weights are exp(q k). The oracle therefore computes the rows beyond the limit, and they are compared as sampled rows
are: in units of their natural sizes, within the tolerance of the sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilabench.engine.verify.call import PIECE, Call, Result
from dilabench.engine.verify.compare import compare, locate
from dilabench.engine.verify.oracle.blocks import only_heads
from dilabench.engine.verify.oracle.in_place import InPlaceOracle
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.sample import Sample
from dilabench.engine.verify.oracle.tolerance import Expected, clamp_size_, eps, errors, row_errors, row_scale
from dilabench.errors import DilabenchError
from dilabench.record import Check, CheckName
from dilabench.workload.spec import attended_pairs

# (query, key) pairs of a head up to which its rows beyond the limit are computed by the oracle: a float64 pass with
# gradients over 2^23 of them takes about a second on two CPU cores.
JUDGED_PAIRS = 2**28

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
                judge = _Judge(oracle, NAMES.index(name), known.tolerance)
                yield _compared(name, oracle.batched(actual), wanted, limit, judge, f"against {self.name}")


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


def _compared(name: CheckName, actual: Tensor, wanted: Tensor, limit: float, judge: _Judge, detail: str) -> Check:
    """The check of all rows, [B, M, ·, D] of queries or [B, N, ·, D] of keys: the largest error in units of the row,
    and where it is.
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
    wrong, judged = (found > limit), 0
    text = f"{int(wrong.sum())} of {found.numel()} rows differ, {detail}"
    # The head with the largest error first: one that stays beyond the limit decides.
    worst = found.amax(1).where(wrong.any(1), 0.0)
    for place in worst.flatten().argsort(descending=True)[: int(wrong.any(1).sum())].tolist():
        batch, head = divmod(place, found.shape[2])
        positions = wrong[batch, :, head].nonzero()[:, 0]
        shares = judge.shares(actual, batch, positions, head)
        if shares is None or not (shares <= 1).all():
            break
        found[batch, positions, head] = (shares * limit).to(found)
        judged += len(positions)
    passed = not (found > limit).any()
    if passed:
        text = f"every row, {detail}" + (f"; {judged} against the oracle" if judged else "")
    largest = float(found.max())
    length = judge.oracle.workload.seq_len
    axes = (("batch", None), ("position", torch.arange(length - wanted.shape[1], length)), ("head", None))
    where = locate(int(found.flatten().argmax()), found.shape, axes)
    return Check(
        name=name,
        passed=passed,
        error=None if largest == float("inf") else largest,
        tolerance=limit,
        where=None if passed else where,
        detail=text,
    )


@dataclass(frozen=True, slots=True)
class _Judge:
    """Compares single rows with the oracle; index: of out, dq, dk or dv. tolerance: of the sampled rows."""

    oracle: Oracle
    index: int
    tolerance: float

    def shares(self, actual: Tensor, batch: int, positions: Tensor, head: int) -> Tensor | None:
        """The largest error at each of [R] positions of a head of `actual` [B, N, ·, D], in shares of the tolerance.

        None if it takes too long.
        """
        workload = self.oracle.workload
        keys = rows = positions.cpu()
        heads = [head]
        if self.index >= 2:
            heads = list(range(head * workload.group_size, (head + 1) * workload.group_size))
            rows = torch.arange(workload.rows)
        pairs_per_row = attended_pairs(workload) / (workload.tokens * workload.num_heads)
        if len(rows) * len(heads) * pairs_per_row > JUDGED_PAIRS:
            return None
        dout = None if workload.mode == "forward" else self.oracle.full_dout
        sample = Sample(torch.tensor([batch]), rows, keys, complete=False)
        exact = InPlaceOracle(workload, self.oracle.inputs, dout, self.oracle.seed, sample)
        with only_heads(heads):
            if self.index == 0:
                value, size = exact.exact.out, exact.exact.size
            else:
                value, size = (parts[self.index - 1] for parts in exact.exact_gradients())
        size = clamp_size_(size[0, :, head], self.oracle.dtype)
        found = errors(actual[batch, positions, head], value[0, :, head], size) / self.tolerance
        return found.amax(-1).nan_to_num_(torch.inf)


def _rows(x: Tensor) -> int:
    return max(1, PIECE // max(1, x[:, :1].numel()))


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(_rows(x), 1)

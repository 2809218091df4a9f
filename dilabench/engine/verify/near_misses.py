"""The diagnosis of a wrong result: the oracle computes the results of common mistakes, to compare.

A pattern names its own near misses (`Pattern.near_misses`); those here can be made with any pattern. Some rows of a
small part of the batch are enough: a near miss must be much closer to the result than the truth is, in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dilabench.engine.verify.heads import GRADIENTS, Seen
from dilabench.engine.verify.oracle.formula import attend_rows, attend_rows_backward
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.slope import slope
from dilabench.engine.verify.oracle.sums import is_sum
from dilabench.engine.verify.oracle.tolerance import Expected, errors, rows_last
from dilabench.patterns.pattern import KeyGroup, Pattern, Positions, SequenceShape, ZeroKeys
from dilabench.record import Check, CheckName
from dilabench.workload.spec import UNBOUNDED, Workload

ROWS, FEW_ROWS, BATCHES = 24, 2, 2
# Rows of queries or keys that kernels and servers take at a time.
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
# A near miss must explain all but this share of the error, and be this far from the truth itself, in tolerances.
UNEXPLAINED, DISTINCT = 0.25, 4.0
# torch's cuDNN attention keeps a plan by the strides of q, k and v alone, and reads a later dout by the strides of the
# first.
MISREADS_DOUT = (
    "gradients are right only if dout has the memory layout of out: make it contiguous (in torch's "
    "scaled_dot_product_attention the cuDNN kernel fails: exclude it with torch.nn.attention.sdpa_kernel)"
)
OF_OUT = {CheckName.OUT, CheckName.OUT_SLOPE, CheckName.OUT_ALL_ROWS, CheckName.OUT_WITH_LSE}
FORWARD = OF_OUT | {CheckName.SECOND_CALL, CheckName.ONES, CheckName.DEPENDENCY}
OF_GRADIENTS: Mapping[CheckName, set[CheckName]] = {
    CheckName.DQ: {CheckName.DQ, CheckName.DQ_SLOPE, CheckName.DQ_ALL_ROWS},
    CheckName.DK: {CheckName.DK, CheckName.DK_SLOPE, CheckName.DK_ALL_ROWS, CheckName.DK_FROM_EVERY_ROW},
    CheckName.DV: {CheckName.DV, CheckName.DV_SLOPE, CheckName.DV_ALL_ROWS, CheckName.DV_FROM_EVERY_ROW},
}


class CountedOnce(Pattern):
    """A pattern whose keys count once, even if several of its parts give them."""

    kind: Literal["counted_once"] = "counted_once"
    inner: Any

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """The union of the parts as one."""
        for group in self.inner.counts(shape, head, rows):
            yield KeyGroup(group.rows, (group.keys(),))

    def zero_keys(self, shape: SequenceShape, head: int) -> Iterable[ZeroKeys]:
        """The counts of the other pattern, in one part."""
        return (replace(keys, part=0) for keys in self.inner.zero_keys(shape, head))


class StrictlyEarlier(Pattern):
    """A pattern in which no row sees its own position or a later one."""

    kind: Literal["strictly_earlier"] = "strictly_earlier"
    inner: Any

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """A group for each row, of the keys before it."""
        for group in self.inner.counts(shape, head, rows):
            parts = [np.asarray(part, dtype=np.int64) for part in group.parts]
            for row in group.rows:
                yield KeyGroup(group.rows[group.rows == row], tuple(part[part < row] for part in parts))


class WithoutLastKeys(Pattern):
    """A pattern in which no row sees one of the last `missing` keys."""

    kind: Literal["without_last_keys"] = "without_last_keys"
    inner: Any
    missing: int

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """The keys of the other pattern up to the missing ones."""
        stop = shape.length - self.missing
        for group in self.inner.counts(shape, head, rows):
            parts = (np.asarray(part, dtype=np.int64) for part in group.parts)
            yield KeyGroup(group.rows, tuple(part[part < stop] for part in parts))


def diagnose(oracle: Oracle, seen: Seen, checks: Sequence[Check]) -> str | None:
    """The name of the mistake that gives the result of the failing checks, or None if no known one does."""
    failing = {check.name for check in checks if not check.passed}
    first = seen.first
    if not failing or first is None:
        return None
    if seen.misreads_dout:
        return MISREADS_DOUT
    wrong_out = bool(failing & FORWARD)
    if wrong_out and (found := _of_out(oracle, oracle.sampled(first.out))):
        return f"out is that of {found}"
    if wrong_out and not failing & OF_OUT:
        return None
    gradients = dict(zip(GRADIENTS, first.gradients, strict=False))
    for index, name in enumerate(GRADIENTS):
        gradient = gradients.get(name)
        if gradient is None or not failing & OF_GRADIENTS[name] or wrong_out:
            continue
        dq = gradients[CheckName.DQ]
        found = None if dq is None else _of_dq(oracle, oracle.sampled(dq))
        taken = oracle.sampled(gradient) if not index else oracle.sampled_keys(gradient)
        if found:
            return f"{name} is that of {found}"
        if scaled := _scaled(taken, oracle.gradients[index]):
            return f"{name} is {scaled}"
    if wrong_out and (scaled := _scaled(oracle.sampled(first.out), oracle.expected[0])):
        return f"out is {scaled}"
    if failing & {CheckName.LSE, CheckName.LSE_SLOPE} and seen.lse is not None:
        found = _of_lse(oracle, seen.lse)
        return f"lse is {found}" if found else None
    return None


class _Part:
    """A few rows of the sample: their inputs, and the right results. A larger part has the rows of a smaller one."""

    def __init__(self, oracle: Oracle, count: int) -> None:
        self.workload = oracle.workload
        batches = min(BATCHES, len(oracle.sample.batches))
        rows = oracle.sample.rows
        # Not the first and the last, which have no neighbours to be taken for.
        inner = torch.arange(len(rows))[1:-1] if len(rows) > 4 else torch.arange(len(rows))
        self.chosen = _evenly(_evenly(inner, ROWS), count)
        self.rows = rows[self.chosen]
        self.q, self.k, self.v = (x[:batches] for x in oracle._heads)
        self._oracle, self._batches = oracle, batches

    def of(self, tensor: Tensor) -> Tensor:
        """The part's rows of a tensor of the sampled rows, [b, R, ...]."""
        return tensor[: self._batches, self.chosen.to(tensor.device)]

    def fits(self, result: Tensor, expected: Expected, wrong: Tensor) -> bool:
        """Whether the part of a result is `wrong` within its tolerance."""
        left = errors(self.of(result), wrong, self.of(expected.size))
        return bool(torch.isfinite(left).all()) and float(left.max()) <= DISTINCT * expected.tolerance

    def matches(self, result: Tensor, expected: Expected, wrong: Tensor) -> bool:
        """Whether `wrong` explains the part of a result that is not what is expected."""
        actual, value, size = self.of(result), self.of(expected.value), self.of(expected.size)
        distinct = errors(wrong, value, size).nan_to_num_(0.0)
        if float(distinct.max()) <= DISTINCT * expected.tolerance or not self.fits(result, expected, wrong):
            return False
        left, all_of_it = errors(actual, wrong, size), errors(actual, value, size)
        return float(left.square().mean()) <= UNEXPLAINED**2 * float(all_of_it.square().mean())

    def attended(self, workload: Workload, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out and lse of a variant at the part's rows."""
        rows = self.rows if rows is None else rows
        return attend_rows(self.q, self.k, self.v, workload, rows)


# The result of a mistake at the rows of a part.
Wrong = Callable[[_Part], Tensor]


def _evenly(places: Tensor, count: int) -> Tensor:
    return places[torch.linspace(0, len(places) - 1, min(count, len(places))).long()]


def _first(oracle: Oracle, result: Tensor, expected: Expected, mistakes: Iterable[tuple[str, Wrong]]) -> str | None:
    """The name of the first mistake whose result it is; most are ruled out by few rows."""
    few, part = _Part(oracle, FEW_ROWS), _Part(oracle, ROWS)
    for name, wrong in mistakes:
        if few.fits(result, expected, wrong(few)) and part.matches(result, expected, wrong(part)):
            return name
    return None


def _variants(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Workloads that this one may be taken for."""
    if workload.query_len is not None:
        yield from _misplaced(workload, workload.query_len)
    for name, pattern in workload.pattern.near_misses().items():
        yield name, workload.model_copy(update={"pattern": pattern})
    if workload.pattern.parts > 1:
        once = workload.model_copy(update={"pattern": CountedOnce(inner=workload.pattern)})
        yield "keys that several branches give counted once", once
    yield f"causal={str(not workload.causal).lower()}", workload.model_copy(update={"causal": not workload.causal})
    if workload.causal:
        for name, pattern in workload.pattern.near_misses_unmasked().items():
            yield name, workload.model_copy(update={"pattern": pattern, "causal": False})
        strict = workload.model_copy(update={"pattern": StrictlyEarlier(inner=workload.pattern)})
        yield "a strict causal mask (no row sees its own position)", strict
    if workload.causal and workload.window[1] < 1:
        ahead = {"causal": False, "window": (workload.window[0], 1)}
        yield "a causal mask shifted by one (each row sees the next position)", workload.model_copy(update=ahead)
    if workload.window != UNBOUNDED:
        yield "no window", workload.model_copy(update={"window": UNBOUNDED})
        left, right = workload.window
        for window in ((left + 1, right), (left - 1, right), (left, right + 1), (left, right - 1)):
            # A side without a bound has none that could be off by one, and no bound is below 0.
            if min(window) >= 0 or (min(window) == -1 and -1 in workload.window):
                name = f"window {window[0]},{window[1]} (off by one)"
                yield name, workload.model_copy(update={"window": window})
    if workload.softcap is not None:
        yield "no softcap", workload.model_copy(update={"softcap": None})
        scaled = workload.softcap * workload.softmax_scale
        yield (
            "a softcap times the scale (scores before the scale capped)",
            workload.model_copy(update={"softcap": scaled}),
        )
        yield (
            "a softcap over the scale",
            workload.model_copy(update={"softcap": workload.softcap / workload.softmax_scale}),
        )
    default = workload.head_dim**-0.5
    scales = {"1 (no scale)": 1.0, "1/D": 1 / workload.head_dim, "1/sqrt(D), not the one given": default}
    scales["the square root of the right one"] = workload.softmax_scale**0.5
    for name, scale in scales.items():
        if not math.isclose(scale, workload.softmax_scale):
            yield f"scale={name}", workload.model_copy(update={"scale": scale})


def _misplaced(workload: Workload, queries: int) -> Iterator[tuple[str, Workload]]:
    """Workloads whose queries are other rows of the square, or whose last keys are not read."""
    yield "queries that are the first rows of the keys, not the last", workload.model_copy(update={"query_len": None})
    earlier = workload.model_copy(update={"query_len": queries + 1})
    yield "queries one position before the last rows (off by one)", earlier
    for chunk in CHUNKS:
        if queries < (whole := -(-queries // chunk) * chunk) < workload.seq_len:
            name = f"queries that begin {whole} rows before the end, as if {whole} were there (a short last chunk)"
            yield name, workload.model_copy(update={"query_len": whole})
    for missing in dict.fromkeys(workload.seq_len % chunk for chunk in CHUNKS):
        if 0 < missing < workload.seq_len and not is_sum(workload):
            pattern = WithoutLastKeys(inner=workload.pattern, missing=missing)
            name = f"the last {missing} keys not read (a short last block of keys)"
            yield name, workload.model_copy(update={"pattern": pattern})


def _of_out(oracle: Oracle, out: Tensor) -> str | None:
    return _first(oracle, out, oracle.expected[0], _wrong_outs(oracle.workload))


def _wrong_outs(workload: Workload) -> Iterator[tuple[str, Wrong]]:
    for name, variant in _variants(workload):
        yield name, partial(_out_of, variant=variant)
    for step, side in ((1, "earlier"), (-1, "later")):
        yield f"the position one {side} (shifted by one)", partial(_moved, step=step)
        yield f"keys and values shifted by one, to the position one {side}", partial(_rolled, step=step)
    if _has_capped_mistakes(workload):
        yield "a softcap after the mask, which shows hidden keys with the score -softcap", _capped_after_mask
    if 1 < workload.num_kv_heads < workload.num_heads:
        yield "key/value head h % K for head h, not h // g", _interleaved
    yield "attention over heads, not positions", _over_heads
    yield "memory of [B, H, N, D] read as [B, N, H, D] (a view, not a transpose)", _misread


def _capped(part: _Part) -> tuple[Tensor, ...]:
    """For dense attention: tanh of the capped scores [b, H, R, N], which keys rows see, and q, k, v of each head in
    float64.
    """
    workload = part.workload
    q, k, v = (x.double().transpose(1, 2) for x in (part.q[:, part.rows.to(part.q.device)], part.k, part.v))
    k, v = (x.repeat_interleave(workload.group_size, 1) for x in (k, v))
    ahead = torch.arange(workload.seq_len) - (part.rows + workload.first_row)[:, None]
    left, right = workload.shapes[0].reach
    seen = torch.ones_like(ahead, dtype=torch.bool)
    seen = seen if left is None else seen & (ahead >= -left)
    seen = seen if right is None else seen & (ahead <= right)
    assert workload.softcap is not None
    return (q @ k.mT * workload.softmax_scale / workload.softcap).tanh(), seen.to(q.device), q, k, v


def _capped_after_mask(part: _Part) -> Tensor:
    tanh, seen, _, _, v = _capped(part)
    assert part.workload.softcap is not None
    weights = (tanh.masked_fill(~seen, -1.0) * part.workload.softcap).softmax(-1)
    return (weights @ v).transpose(1, 2)


def _dq_uncapped(part: _Part, dout: Tensor) -> Tensor:
    tanh, seen, _, k, v = _capped(part)
    assert part.workload.softcap is not None
    weights = (tanh * part.workload.softcap).masked_fill(~seen, -torch.inf).softmax(-1)
    grad = part.of(dout).double().transpose(1, 2) @ v.mT
    score = weights * (grad - (weights * grad).sum(-1, keepdim=True))
    return (score @ k * part.workload.softmax_scale).transpose(1, 2)


def _has_capped_mistakes(workload: Workload) -> bool:
    return workload.softcap is not None and workload.is_dense and workload.layout == "padded"


def _out_of(part: _Part, variant: Workload) -> Tensor:
    return part.attended(variant)[0]


def _moved(part: _Part, step: int) -> Tensor:
    moved = (part.rows - step).clamp(0, part.workload.rows - 1)
    positions, place = moved.unique(return_inverse=True)
    return part.attended(part.workload, positions)[0][:, place]


def _rolled(part: _Part, step: int) -> Tensor:
    return attend_rows(part.q, part.k.roll(step, 1), part.v.roll(step, 1), part.workload, part.rows)[0]


def _interleaved(part: _Part) -> Tensor:
    workload = part.workload
    heads = torch.arange(workload.num_heads, device=part.q.device) % workload.num_kv_heads
    whole = workload.model_copy(update={"num_kv_heads": workload.num_heads})
    return attend_rows(part.q, part.k[:, :, heads], part.v[:, :, heads], whole, part.rows)[0]


def _misread(part: _Part) -> Tensor:
    """At row n, head h: the vector n·H + h of out [H, M, D]."""
    workload = part.workload
    place = part.rows[:, None] * workload.num_heads + torch.arange(workload.num_heads)
    rows, at = (place % workload.rows).unique(return_inverse=True)
    return part.attended(workload, rows)[0][:, at, place // workload.rows]


def _over_heads(part: _Part) -> Tensor:
    place = part.rows.to(part.q.device)
    group = part.workload.group_size
    q = part.q[:, place].double()
    k, v = (x[:, place + part.workload.first_row].double() for x in (part.k, part.v))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    return (q @ k.mT * part.workload.softmax_scale).softmax(-1) @ v


def _of_dq(oracle: Oracle, dq: Tensor) -> str | None:
    dout = oracle.sampled(oracle.full_dout)
    mistakes: list[tuple[str, Wrong]] = []
    if _has_capped_mistakes(oracle.workload):
        mistakes.append(("a softcap without its derivative", partial(_dq_uncapped, dout=dout)))
    mistakes += ((name, partial(_dq_of, variant=variant, dout=dout)) for name, variant in _variants(oracle.workload))
    return _first(oracle, dq, oracle.gradients[0], mistakes)


def _dq_of(part: _Part, variant: Workload, dout: Tensor) -> Tensor:
    out, lse = part.attended(variant)
    none = torch.zeros(0, dtype=torch.int64)
    given = part.of(dout), part.q, part.k, part.v, out, lse
    return attend_rows_backward(*given, variant, part.rows, none)[0]


def _of_lse(oracle: Oracle, lse: Tensor) -> str | None:
    expected = oracle.expected[1]
    value, size = (x.transpose(1, 2) for x in (expected.value, expected.size))
    found = _first(oracle, lse.transpose(1, 2), Expected(value, size, expected.tolerance), _wrong_lses(oracle, value))
    return found or _scaled(lse, expected)


def _wrong_lses(oracle: Oracle, right: Tensor) -> Iterator[tuple[str, Wrong]]:
    yield "a logarithm to base 2 (natural is wanted)", lambda part: part.of(right) * math.log2(math.e)
    for name, variant in _variants(oracle.workload):
        yield f"that of {name}", partial(_lse_of, variant=variant)


def _lse_of(part: _Part, variant: Workload) -> Tensor:
    return part.attended(variant)[1].transpose(1, 2)


def _scaled(actual: Tensor, expected: Expected) -> str | None:
    """'the right one scaled by 1.01', or 'zero', where that is what the result is, up to rounding."""
    found = slope(*rows_last(actual, expected.value, expected.size))
    factor = 1 + found.deviation
    left = errors(actual, expected.value * factor, expected.size)
    if found.rows == 0 or not bool((left <= expected.tolerance * max(1.0, abs(factor))).all()):
        return None
    # In half precision a factor can be as small as rounding, and yet be certain.
    certain = abs(found.deviation) > 6 * found.error and abs(found.deviation) > expected.slope_floor
    if not certain:
        return None
    if not factor:
        return "zero"
    # At least one digit beyond those that the factor shares with 1.
    digits = max(4, 1 + math.ceil(-math.log10(abs(found.deviation))))
    return f"the right one scaled by {factor:.{digits}g}"

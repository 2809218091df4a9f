"""Queries that are the last rows of their keys (semantics.md §6): over the square, or sequence by sequence.

Query i of M is row N - M + i of the square of N keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilabench.contracts import Attend, AttendBackward, LoadedBackend
from dilabench.impls.call import Computation
from dilabench.impls.one_operator import AttentionComputation
from dilabench.impls.operator_rules import empty_results
from dilabench.kernels.lse import merge_rows_
from dilabench.workload.spec import UNBOUNDED, Window


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class InSquare(AttentionComputation):
    """The last rows by the computation `inside` of more rows, or all, with queries of zeros before them.

    Rows before get no gradient, and so give none to keys and values. Takes the time and memory of all `length` rows.
    """

    inside: Computation
    length: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out [B, M, H, D] and lse [B, H, M] of q [B, M, H, D] and k, v [B, N, K, D]."""
        before = self.length - q.shape[1]
        out, lse = self.inside.forward(_with_rows_before(q, self.length), k, v)[:2]
        return out[:, before:].contiguous(), lse[..., before:].contiguous()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq [B, M, H, D], dk and dv [B, N, K, D]."""
        before = self.length - q.shape[1]
        dout, q, out = (_with_rows_before(x, self.length) for x in (dout, q, out))
        # With scores of 0 and an lse of 0, weights stay finite.
        lse = torch.nn.functional.pad(lse, (before, 0))
        dq, dk, dv = self.inside.backward(dout, q, k, v, out, lse)
        return dq[:, before:].contiguous(), dk, dv


def _with_rows_before(x: Tensor, length: int) -> Tensor:
    """[B, length, H, D], whose last rows are x [B, M, H, D] and whose others are 0."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, length - x.shape[1], 0))


def aligned(backend: LoadedBackend) -> LoadedBackend:
    """The backend, or if it aligns no ends, one that does over its calls without a mask and over squares."""
    if backend.aligns_ends:
        return backend
    attend_backward = None
    if backend.attend_backward is not None:
        attend_backward = partial(_aligned_backward, backend.attend_backward)
    return LoadedBackend(backend.name, partial(_aligned, backend.attend), attend_backward, aligns_ends=True)


def _aligned(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: Window = UNBOUNDED,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`contracts.Attend` over at most as many queries as keys, the last query at the position of the last key."""
    parts = _Parts.of(q.shape[1], k.shape[1], causal, window)
    k, v = k[:, parts.unseen :], v[:, parts.unseen :]
    if parts.before < 0:
        out, lse = attend(_with_rows_before(q, k.shape[1]), k, v, **parts.mask, **options)
        return out[:, -q.shape[1] :], lse[..., -q.shape[1] :]
    if not parts.before:
        return attend(q, k, v, **parts.mask, **options)
    out, lse = (x.contiguous() for x in attend(q, k[:, : parts.before], v[:, : parts.before], causal=False, **options))
    square = attend(q, k[:, parts.before :], v[:, parts.before :], **parts.mask, **options)
    merge_rows_(out, lse, *square)
    return out, lse


def _aligned_backward(
    attend_backward: AttendBackward,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    window: Window = UNBOUNDED,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`contracts.AttendBackward` of `_aligned`."""
    rows, keys = q.shape[1], k.shape[1]
    parts = _Parts.of(rows, keys, causal, window)
    k, v = k[:, parts.unseen :], v[:, parts.unseen :]
    if parts.before < 0:
        dout, q, out = (_with_rows_before(x, k.shape[1]) for x in (dout, q, out))
        lse = torch.nn.functional.pad(lse, (k.shape[1] - rows, 0))
        dq, dk, dv = attend_backward(dout, q, k, v, out, lse, **parts.mask, **options)
        dq = dq[:, -rows:]
    elif not parts.before:
        dq, dk, dv = attend_backward(dout, q, k, v, out, lse, **parts.mask, **options)
    else:
        before, behind = (
            attend_backward(dout, q, k[:, some], v[:, some], out, lse, **mask, **options)
            for some, mask in (
                (slice(parts.before), {"causal": False}),
                (slice(parts.before, None), parts.mask),
            )
        )
        dq = before[0] + behind[0]
        dk, dv = (torch.cat(both, 1) for both in zip(before[1:], behind[1:], strict=True))
    if parts.unseen:
        dk, dv = (_with_rows_before(x, keys) for x in (dk, dv))
    return dq, dk, dv


class _Parts(NamedTuple):
    """Calls without a mask, or over a square, that together are a mask over M queries, the last rows of their keys.

    unseen: number of keys before the first that a query sees. before: number of other keys that all queries see; a
    square is merged with them. It is 0 for one call, -1 for a square with queries of zeros before. mask: the mask of
    the last call.
    """

    unseen: int
    before: int
    mask: dict[str, Any]

    @classmethod
    def of(cls, rows: int, keys: int, causal: bool, window: Window) -> _Parts:
        left, right = window[0], 0 if causal else window[1]
        unseen = max(0, keys - rows - left) if left >= 0 else 0
        seen = keys - unseen
        hides_before, hides_behind = 0 <= left < seen - 1, 0 <= right < rows - 1
        masked = {"causal": causal, "window": window}
        if not (hides_before or hides_behind):
            return cls(unseen, 0, {"causal": False})
        if rows == seen:
            return cls(unseen, 0, masked)
        if hides_before:
            return cls(unseen, -1, masked)
        return cls(unseen, seen - rows, {"causal": causal, "window": (-1, window[1])})


class Span(NamedTuple):
    """Successive sequences of one length: `per_item` of them, one after another, in each of some items of a batch."""

    items: slice
    tokens: slice
    per_item: int = 1

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return (self.tokens.stop - self.tokens.start) // self.per_item

    @property
    def sequences(self) -> int:
        """Their number."""
        return self.per_item * (self.items.stop - self.items.start)

    def of(self, x: Tensor) -> Tensor:
        """[sequences, length, ...], a view of x [B, T, ...]."""
        return x[self.items, self.tokens].unflatten(1, (self.per_item, self.length)).flatten(0, 1)


class Run(NamedTuple):
    """Successive sequences with equally many queries and equally many keys, and their computation."""

    queries: Span
    keys: Span
    computation: Computation


@dataclass(frozen=True, slots=True)
class BySequence:
    """`Computation` of sequences with as many queries and keys as each has, runs of equal ones together.

    Queries of no run see nothing; keys of no run are not read, and their gradients are 0.
    """

    runs: Sequence[Run]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out [B, M, H, D] and lse [B, H, M] of q [B, M, H, D] and k, v [B, N, K, D]; packed, B is 1."""
        out, lse = empty_results(q, v)
        out.zero_()
        lse.fill_(-torch.inf)
        for queries, keys, computation in self.runs:
            run_out, run_lse = computation.forward(queries.of(q), keys.of(k), keys.of(v))[:2]
            queries.of(out).copy_(run_out)
            queries.of(lse.transpose(1, 2)).copy_(run_lse.transpose(1, 2))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv like q, k and v."""
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for queries, keys, computation in self.runs:
            run_lse = queries.of(lse.transpose(1, 2)).transpose(1, 2).contiguous()
            given = (queries.of(dout), queries.of(q), keys.of(k), keys.of(v), queries.of(out))
            gradients = computation.backward(*given, run_lse)
            for total, part, span in zip((dq, dk, dv), gradients, (queries, keys, keys), strict=True):
                span.of(total).copy_(part)
        return dq, dk, dv

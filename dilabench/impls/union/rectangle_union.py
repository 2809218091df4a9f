"""A union by rectangles, for CPUs: each pair that nested branches share once, and little above the diagonal.

torch's threads synchronise at the end of every operation. Many small operations lose much time there, and nearly all
their time if another program uses one of the cores. Heads are therefore distributed over threads; each thread runs the
calls of its heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from math import gcd
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dilabench.contracts import BuildContext
from dilabench.impls.one_operator import is_plain_eager_call
from dilabench.impls.operator_rules import last_dim_contiguous
from dilabench.impls.union.rectangles import Rectangle, rectangles
from dilabench.impls.union.union import PlacedCall, Rows, Union
from dilabench.kernels.lse import add_null_mass_
from dilabench.workload.spec import UNBOUNDED, Workload

ShareT = TypeVar("ShareT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RectangleUnion(Union):
    """A union whose calls see all of their keys, except along the diagonal of a causal mask.

    `shares`: the calls of some heads each; no two shares read the same key/value head.
    """

    shares: Callable[[], Sequence[Sequence[Rectangle]]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """As `Union.forward`; it keeps out and lse of each call."""
        q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
        merging = None if self.detached else self._merging(q, None)
        output = self._empty_output(q, merging.results if merging else None)

        shares = self._shares_of(q)

        def attend(index: int) -> list[Tensor]:
            kept: list[Tensor] = []
            for rows, found in self._placed(shares[index], q, k, v, output[1]):
                if merging and found:
                    found.merge(merging, q, k, v, *output, rows.first)
                    continue
                out, lse = self._attend(rows, q, k, v)
                result = out.to(output[0].dtype), lse
                (rows.write if rows.first else rows.merge)(*output, *result)
                if self.detached:
                    kept += result
                # The next call must not find this result still in memory.
                del out, lse, result
            return kept

        kept = _at_once(attend, range(len(shares)), q, k, v)
        if self.zero_keys is not None:
            add_null_mass_(*output, self.zero_keys.logsumexp(0, keepdim=True))
        out, lse = output
        return out.to(q.dtype), lse, [tensor for of_share in kept for tensor in of_share]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Union.backward`."""
        dout = dout.contiguous()
        q, k, v, out = (last_dim_contiguous(x) for x in (q, k, v, out))
        out = out.contiguous()
        merging = self._merging(q, None)
        dtype = merging.results if merging else None
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
        shares = self._shares_of(q)
        means: OwnMeans | None = None
        if self.detached:
            parts = 1 + max(part for share in shares for rows in share for part in rows.parts)
            means = OwnMeans(dout, lse, parts, self.zero_keys)
        results = zip(kept[::2], kept[1::2], strict=True)
        kept_of = [tuple(islice(results, len(share))) for share in shares]

        def add_gradients(index: int) -> None:
            if means:
                for rows, result in zip_longest(shares[index], kept_of[index]):
                    means.add(rows, *(result or self._attend(rows, q, k, v)))
            for rows, found in self._placed(shares[index], q, k, v, lse):
                own = means.as_out(rows) if means else None
                if merging and found:
                    found.add_gradients(merging, dout, q, k, v, out, lse, own, (dq, dk, dv))
                else:
                    self._add_share(rows, dout, q, k, v, out, lse, own, (dq, dk, dv))

        _at_once(add_gradients, range(len(shares)), dout, q, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _shares_of(self, x: Tensor) -> Sequence[Sequence[Rectangle]]:
        """All shares; only one while memory is traced, because all are alike and keep no tensors."""
        shares = self.shares()
        return shares[:1] if isinstance(x, FakeTensor) and not self.detached else shares

    def _placed(
        self, share: Sequence[Rectangle], q: Tensor, k: Tensor, v: Tensor, lse: Tensor
    ) -> list[tuple[Rectangle, PlacedCall | None]]:
        """The calls of a share with their views."""
        return [(rows, PlacedCall.of(rows, self._mask(rows), q, k, v, lse)) for rows in share]

    def _mask(self, rows: Rows) -> dict[str, Any]:
        assert isinstance(rows, Rectangle)
        return {"causal": rows.diagonal, "window": UNBOUNDED, "scale": self.scale}


def rectangle_union(workload: Workload, context: BuildContext) -> RectangleUnion:
    """The union of any padded workload without a window."""
    count = gcd(torch.get_num_threads(), workload.num_kv_heads)
    heads = workload.num_heads // count

    def shares() -> tuple[tuple[Rectangle, ...], ...]:
        starts = range(0, workload.num_heads, heads)
        key = "rectangles", workload, count
        return context.patterns.get(
            key, lambda: tuple(rectangles(workload, range(start, start + heads)) for start in starts)
        )

    return RectangleUnion.of(
        workload, context, lambda _device: [rows for share in shares() for rows in share], shares=shares
    )


def _at_once(call: Callable[[ShareT], ResultT], shares: Sequence[ShareT], *tensors: Tensor) -> list[ResultT]:
    """The results of all calls, each in a separate thread unless a profiler or mode must see its operators.

    A profiler sees one thread, and memory is measured with one.
    """
    threads = torch.get_num_threads()
    seen = torch._C._autograd._profiler_enabled() or not is_plain_eager_call(*tensors)
    if len(shares) == 1 or threads == 1 or seen:
        return [call(share) for share in shares]
    try:
        with ThreadPoolExecutor(len(shares), initializer=_begin, initargs=(max(1, threads // len(shares)),)) as pool:
            return list(pool.map(call, shares))
    finally:
        # The setting of one thread is the default of all later threads.
        torch.set_num_threads(threads)


def _begin(threads: int) -> None:
    """Let operators called in this thread use this many threads, without autograd."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


class OwnMeans:
    """The centre of a row's score gradients with detached merge weights: dout . own out [B, N, H, 1] of every part of
    the pattern, merged from the calls that give its pairs.

    The share of a part in the gradient of a score is exp(s - lse) (dp - mean), with the merged lse and the mean of this
    part alone (semantics.md §2). If m parts give the same pair, their shares add up to
    m exp(s - lse) (dp - the mean of their means): one call computes it for all of them.

    zero_keys: [parts, H, N] as `null_mass.log_zero_keys` gives them for each part, or None.
    """

    def __init__(self, dout: Tensor, lse: Tensor, parts: int, zero_keys: Tensor | None) -> None:
        self._dout = dout
        self._means = [dout.new_zeros((*dout.shape[:3], 1)) for _ in range(parts)]
        self._lses = [torch.full_like(lse, float("-inf")) for _ in range(parts)]
        # Zero keys come first: they only give a part its lse.
        for part_lse, mass in zip(self._lses, () if zero_keys is None else zero_keys, strict=False):
            part_lse.copy_(mass)
        self._dual = _dual(dout)

    def add(self, rows: Rectangle, out: Tensor, lse: Tensor) -> None:
        """Merge the result of a call into the parts that give its pairs."""
        mean = (rows.queries(self._dout) * out).sum(-1, keepdim=True)
        for part in rows.parts:
            # Within one part its pairs count once, not as often as there are parts.
            replace(rows, count=1).merge(self._means[part], self._lses[part], mean, lse)

    def as_out(self, rows: Rectangle) -> Tensor:
        """Rows [S·G, L, A, D] whose product with dout is the mean that a backward of the call has to centre by."""
        first, *others = (rows.queries(self._means[part]) for part in rows.parts)
        return rows.queries(self._dual) * (sum(others, first) / len(rows.parts))


def _dual(x: Tensor) -> Tensor:
    """[..., D] whose product with x is 1, 0 where x is 0; by the largest element first, so that no square is lost."""
    largest = x.abs().amax(-1, keepdim=True)
    # If all elements are 0, any divisor works.
    safe = largest.where(largest > 0, 1.0)
    unit = x / safe
    return unit.div_(unit.square().sum(-1, keepdim=True).clamp_min_(1.0)).div_(safe)

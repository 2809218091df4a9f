"""A union by rectangles, for CPUs: each pair that nested branches share once, and little above the diagonal.

torch's threads meet at the end of every operation; of many small ones much time is lost there, and
nearly all of it where something else runs on one of the cores. So heads are shared out among threads, each of which
runs the calls of its own heads by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, zip_longest
from math import gcd
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls.null_mass import log_zero_keys
from dilabench.impls.one_operator import nothing_looks_on
from dilabench.impls.union.branches import branches_of, covers_every_row
from dilabench.impls.union.nesting import chains
from dilabench.impls.union.own_means import OwnMeans
from dilabench.impls.union.rectangles import DIAGONAL_ROWS, LEAST_ROWS, Rectangle, rectangles
from dilabench.impls.union.union import Rows, Union, last_dim_contiguous
from dilabench.kernels.lse import add_null_mass_
from dilabench.workload.spec import UNBOUNDED, Workload
from dilabench.workload.work import flops

ShareT = TypeVar("ShareT")
ResultT = TypeVar("ResultT")

# Of a forward pass; threads of our own take milliseconds to start, and calls grow small.
LEAST_FLOPS = 8e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RectangleUnion(Union):
    """A union whose calls see all of their keys, but for those along the diagonal of a causal mask.

    `shares`: the calls of some heads each; of no two do they read the same key/value head.
    """

    shares: Callable[[], Sequence[Sequence[Rectangle]]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """As `Union.forward`; kept of a call are its out and lse."""
        q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
        merging = None if self.detached else self._merging(q, None)
        output = self._empty_output(q, merging.results if merging else None)

        def attend(share: Sequence[Rectangle]) -> list[Tensor]:
            kept: list[Tensor] = []
            for rows in share:
                if merging and self._merge(merging, rows, q, k, v, *output, fresh=rows.first):
                    continue
                out, lse = self._attend(rows, q, k, v)
                result = out.to(output[0].dtype), lse
                (rows.write if rows.first else rows.merge)(*output, *result)
                if self.detached:
                    kept += result
                # The next call must not find this result still in memory.
                del out, lse, result
            return kept

        kept = _at_once(attend, self._shares_of(q), q, k, v)
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
        attend_backward = self.backend.require_backward()
        dout = dout.contiguous()
        q, k, v, out = (last_dim_contiguous(x) for x in (q, k, v, out))
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
            for rows in shares[index]:
                own = means.as_out(rows) if means else None
                if merging and self._add_gradients(merging, rows, dout, q, k, v, out, lse, own, (dq, dk, dv)):
                    continue
                of_queries, *of_keys = self._attend_backward(attend_backward, rows, dout, q, k, v, out, lse, own)
                rows.add_queries(dq, of_queries)
                for total, part in zip((dk, dv), of_keys, strict=True):
                    rows.add_keys(total, part)
                del of_queries, of_keys, part

        _at_once(add_gradients, range(len(shares)), dout, q, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _shares_of(self, x: Tensor) -> Sequence[Sequence[Rectangle]]:
        """All shares; one stands for all, which are alike, where memory is traced and none keeps anything."""
        shares = self.shares()
        return shares[:1] if isinstance(x, FakeTensor) and not self.detached else shares

    def _mask(self, rows: Rows) -> dict[str, Any]:
        assert isinstance(rows, Rectangle)
        return {"causal": rows.diagonal, "window": UNBOUNDED, "scale": self.scale}


def in_rectangles(workload: Workload, context: BuildContext) -> RectangleUnion | None:
    """The union of a padded workload where rectangles take less time than whole branches; None elsewhere.

    On two cores both took as long where they compute the same pairs, and small workloads up to twice as long.
    """
    if context.device.type != "cpu" or not _keeps_sums(workload, context.backend) or not _saves_pairs(workload):
        return None
    if flops(workload.replace(mode="forward")) < LEAST_FLOPS:
        return None
    return rectangle_union(workload, context)


def _keeps_sums(workload: Workload, backend: LoadedBackend | None) -> bool:
    """Whether the many results that are merged are not rounded in between."""
    if workload.dtype in ("float32", "float64"):
        return True
    merging = backend.merging if backend and not workload.detaches_merge else None
    return merging is not None and getattr(torch, workload.dtype) in merging.dtypes


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

    return RectangleUnion(
        backend=context.require_backend(),
        rows=lambda _device: [rows for share in shares() for rows in share],
        shares=shares,
        covered=covers_every_row(branches_of(workload)),
        causal=workload.causal,
        window=workload.window,
        scale=workload.softmax_scale,
        detached=workload.detaches_merge,
        zero_keys=log_zero_keys(workload, context.device, apart=workload.detaches_merge),
    )


def _saves_pairs(workload: Workload) -> bool:
    """Whether branches share rectangles of pairs, or a causal diagonal is long.

    A single branch stays a single call: dense attention is what the backend's kernel makes of it.
    """
    branches = branches_of(workload)
    if len(branches) == 1 or workload.window != UNBOUNDED:
        return False
    rows = max(-(-branch.segment_length // branch.rate) for branch in branches)
    return (workload.causal and rows > 2 * DIAGONAL_ROWS) or any(
        len(chain) > 1 for chain in chains(branches, workload.seq_len, LEAST_ROWS)
    )


def _at_once(call: Callable[[ShareT], ResultT], shares: Sequence[ShareT], *tensors: Tensor) -> list[ResultT]:
    """The results of all calls, each in a thread of its own where nothing has to see its operators.

    A profiler, which sees one thread, is among that: memory is measured by it.
    """
    threads = torch.get_num_threads()
    seen = torch._C._autograd._profiler_enabled() or not nothing_looks_on(*tensors)
    if len(shares) == 1 or threads == 1 or seen:
        return [call(share) for share in shares]
    try:
        with ThreadPoolExecutor(len(shares), initializer=_begin, initargs=(max(1, threads // len(shares)),)) as pool:
            return list(pool.map(call, shares))
    finally:
        # What one thread sets is the default of all threads to come.
        torch.set_num_threads(threads)


def _begin(threads: int) -> None:
    """Let operators called in this thread use so many threads, and leave nothing for autograd."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)

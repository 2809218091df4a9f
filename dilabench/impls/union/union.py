"""Attention over the union of branches: one dense kernel call per set of rows, merged by lse (semantics.md §1).

How rows are taken (views or copies) is a parameter. Backward gives each call the *merged* out and lse of its rows,
which makes a dense flash backward the exact share of that call; shares add up. With `detached` merge weights each call
gets its own out, still with the merged lse: a backward takes from out only the mean by which it centres a row's
gradients of scores, and that mean is then of the call's own softmax.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dilabench.contracts import AttendBackward, BuildContext, LoadedBackend, MergingKernel
from dilabench.impls.null_mass import log_zero_keys
from dilabench.impls.one_operator import AttentionComputation
from dilabench.impls.operator_rules import last_dim_contiguous
from dilabench.impls.union.branches import branches_of, covers_every_row
from dilabench.kernels.lse import add_null_mass_
from dilabench.kernels.streams import record
from dilabench.workload.spec import Window, Workload

Strides = tuple[int, ...]
View = tuple[tuple[int, ...], Strides, int]
"""Sizes and strides of a view, and its distance from the beginning of the tensor."""


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """The strides of a contiguous tensor of four dimensions."""
    _, length, heads, dim = shape
    return length * heads * dim, heads * dim, dim, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(ABC):
    """The rows of one kernel call: G segments (of all batch items) of L rows, A query and A' key/value heads.

    `rate`: positions from one row to the next. `part`: which part of the pattern (`KeyGroup.parts`) they belong to.
    `first`: the output is empty at these rows. `whole`: these are all rows of the output in their own order. `count`:
    how often each pair counts. `tables`: data read in each pass, tensors included.
    """

    rate: int
    part: int
    first: bool
    whole: bool = False
    count: int = 1
    tables: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @abstractmethod
    def queries(self, x: Tensor) -> Tensor:
        """[B, N, H, D] -> [G, L, A, D]."""

    @abstractmethod
    def keys(self, x: Tensor) -> Tensor:
        """[B, N, K, D] -> [G, L, A', D]."""

    @abstractmethod
    def lse(self, lse: Tensor) -> Tensor:
        """[B, H, N] -> [G, A, L], as a softmax over these pairs alone has to see them."""

    @abstractmethod
    def write(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Write results into empty rows."""

    @abstractmethod
    def merge(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Merge results into rows with results of other branches."""

    @abstractmethod
    def add_queries(self, total: Tensor, part: Tensor) -> None:
        """Add [G, L, A, D] to the rows of a [B, N, H, D]."""

    @abstractmethod
    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add [G, L, A', D] to the rows of a [B, N, K, D]."""

    def query_view(self, _strides: Strides, _dim: int) -> View | None:
        """Rows [S·G, L, A, D] of a tensor [B, N, H, D] of these strides; None if they are copies."""
        return None

    def key_view(self, _strides: Strides, _dim: int) -> View | None:
        """Rows [S·G, L', A', D] of a tensor [B, N, K, D]; None if they are copies."""
        return None

    def lse_view(self, _strides: Strides) -> View | None:
        """Rows [S, G, A, L] of lse [B, H, N]; None if they are copies."""
        return None

    def release(self, *rows: Tensor) -> None:  # noqa: B027 (views have nothing to release)
        """Release a tensor of `queries`, `keys` or `lse` that is no longer read."""


Placed = tuple[Sequence[Rows], "list[PlacedCall | None]"] | None
"""Calls, and their views."""


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Union(AttentionComputation):
    """The union of branches of one workload, as plain tensor functions and as an AttentionFn with lse.

    `rows`: every kernel call's rows, requested once per pass. `covered`: first rows reach the whole output.
    `zero_keys`: as `null_mass.log_zero_keys` gives them, apart where merge weights are detached: there each part of the
    pattern merges with its own. Raises ValueError in the backward pass over a backend that has none.
    """

    backend: LoadedBackend
    rows: Callable[[torch.device], Sequence[Rows]]
    covered: bool
    causal: bool
    window: Window
    scale: float
    detached: bool = False
    zero_keys: Tensor | None = field(default=None, repr=False, compare=False)
    _kept: dict[tuple[Strides, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        workload: Workload,
        context: BuildContext,
        rows: Callable[[torch.device], Sequence[Rows]],
        **fields: Any,
    ) -> Self:
        """The union for a workload's mask, scale, merge gradient and zero keys, over the context's backend unless
        `fields`, which are set as they are, name another.
        """
        return cls(
            rows=rows,
            covered=covers_every_row(branches_of(workload)),
            causal=workload.causal,
            window=workload.window,
            scale=workload.softmax_scale,
            detached=workload.detaches_merge,
            zero_keys=_zero_keys(workload, context.device) if workload.pattern.has_zero_keys else None,
            **{"backend": context.require_backend(), **fields},
        )

    @property
    def keeps_more(self) -> bool:  # type: ignore[override]
        """Only where merges are detached: each call's own out."""
        return self.detached

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out, lse, and for a detached backward also every call's own out."""
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = map(last_dim_contiguous, (q, k, v))
        if self.zero_keys is not None:
            record([self.zero_keys])
        output: tuple[Tensor, Tensor] | None = None
        kept: list[Tensor] = []
        # Into sums of another type rows that are no views would have to be merged, too.
        kernel = self.backend.merging
        merging = kernel if kernel and kernel.results == q.dtype in kernel.dtypes and not self.detached else None
        calls = self.rows(q.device)
        output = self._empty_output(q) if merging and calls else None
        placed: Placed = None
        if output:
            placed = self._kept.get((q.stride(), k.stride(), v.stride(), output[1].stride()))
            if placed is None or placed[0] is not calls:
                placed = self._place(calls, q, k, v, output[1])
        for at, rows in enumerate(calls):
            if rows.tables:
                record(rows.tables)
            becomes_output = output is None and rows.whole and not self.detached
            if merging and output and placed and (found := placed[1][at]):
                found.merge(merging, q, k, v, *output, rows.first)
                continue
            result = self._attend(rows, q, k, v)
            if self.detached:
                kept.append(self._with_own_zero_keys(rows, len(q), *result))
            if becomes_output and output is None:
                output = _as_output(q, *result)
            else:
                output = output or self._empty_output(q)
                (rows.write if rows.first else rows.merge)(*output, *result)
            # The next call must not find this result still in memory.
            del result
        output = output or self._empty_output(q)
        if self.zero_keys is not None and not self.detached:
            add_null_mass_(*output, self.zero_keys)
        return *output, kept

    def _merging(self, q: Tensor, into: torch.dtype | None) -> MergingKernel | None:
        """The kernel that merges results of such tensors with results of other keys, if the backend has one. `into`:
        the dtype of the latter; None if the kernel creates them.
        """
        kernel = self.backend.merging
        takes = kernel is not None and q.dtype in kernel.dtypes and into in (None, kernel.results)
        return kernel if takes else None

    def _place(
        self, calls: Sequence[Rows], q: Tensor, k: Tensor, v: Tensor, lse: Tensor
    ) -> tuple[Sequence[Rows], list[PlacedCall | None]]:
        """The views of every call, kept for tensors of these strides; None if rows are copies."""
        placed = calls, [PlacedCall.of(rows, self._mask(rows), q, k, v, lse) for rows in calls]
        self._kept[q.stride(), k.stride(), v.stride(), lse.stride()] = placed
        return placed

    def _attend(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        taken = rows.queries(q), rows.keys(k), rows.keys(v)
        result = self.backend.attend(*taken, **self._mask(rows))
        rows.release(*taken)
        return result

    def _with_own_zero_keys(self, rows: Rows, batches: int, out: Tensor, lse: Tensor) -> Tensor:
        """The out of a call, once the zero keys of its part are added to its out and lse in place."""
        if self.zero_keys is not None:
            seen = rows.lse(self.zero_keys[rows.part].expand(batches, -1, -1))
            add_null_mass_(out, lse, seen)
            rows.release(seen)
        return out

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
        """dq, dk, dv from the results of `forward`.

        A detached backward recomputes each call's own out unless `kept`.
        """
        dout = dout.contiguous()
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1:
            q, k, v, out = map(last_dim_contiguous, (q, k, v, out))
        kernel = self.backend.merging
        merging = kernel if kernel and kernel.results == q.dtype in kernel.dtypes else None
        total: tuple[Tensor, Tensor, Tensor] | None = None
        calls, out = self.rows(q.device), out.contiguous()
        placed: Placed = None
        if merging:
            placed = self._kept.get((q.stride(), k.stride(), v.stride(), lse.stride()))
            if placed is None or placed[0] is not calls:
                placed = self._place(calls, q, k, v, lse)
        for index, rows in enumerate(calls):
            if rows.tables:
                record(rows.tables)
            own = kept[index] if kept else None
            if self.detached and own is None:
                own = self._with_own_zero_keys(rows, len(q), *self._attend(rows, q, k, v))
            found = placed[1][index] if placed else None
            if total is None and rows.whole:
                if found and own is None:
                    backward = self.backend.attend_backward or self.backend.require_backward()
                    share = found.gradients(backward, dout, q, k, v, out, lse)
                else:
                    share = self._attend_backward(rows, dout, q, k, v, out, lse, own)
                dq, dk, dv = share
                total = (
                    dq.reshape(q.shape).contiguous(),
                    dk.reshape(k.shape).contiguous(),
                    dv.reshape(v.shape).contiguous(),
                )
                del share, dq, dk, dv
            elif merging and found:
                total = total or (_zeros(q), _zeros(k), _zeros(v))
                found.add_gradients(merging, dout, q, k, v, out, lse, own, total)
            else:
                total = self._add_share(rows, dout, q, k, v, out, lse, own, total)
        return total or (_zeros(q), _zeros(k), _zeros(v))

    def _add_share(
        self,
        rows: Rows,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        own: Tensor | None,
        total: tuple[Tensor, Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The total (None: zeros) with the gradients of a call; `own`: the call's own out, if merges are detached."""
        share = self._attend_backward(rows, dout, q, k, v, out, lse, own)
        # Made now, so that the first call has the memory to itself.
        total = total or (_zeros(q), _zeros(k), _zeros(v))
        rows.add_queries(total[0], share[0])
        rows.add_keys(total[1], share[1])
        rows.add_keys(total[2], share[2])
        return total

    def _attend_backward(
        self,
        rows: Rows,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        own: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        taken = rows.queries(q), rows.keys(k), rows.keys(v)
        dout_rows, lse_rows = rows.queries(dout), rows.lse(lse)
        out_rows = rows.queries(out) if own is None else own
        share = self.backend.require_backward()(dout_rows, *taken, out_rows, lse_rows, **self._mask(rows))
        rows.release(*taken, dout_rows, lse_rows)
        if own is None:
            rows.release(out_rows)
        return share

    def _mask(self, rows: Rows) -> dict[str, Any]:
        """Causal and scale as they are; a window of positions as one of rows."""
        left, right = self.window
        window = left if left < 0 else left // rows.rate, right if right < 0 else right // rows.rate
        return {"causal": self.causal, "window": window, "scale": self.scale}

    def _empty_output(self, q: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        B, N, H, _ = q.shape
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        lse = q.new_empty((B, H, N), dtype=lse_dtype)
        if not self.covered:
            out.zero_()
            lse.fill_(float("-inf"))
        return out, lse


class PlacedCall(NamedTuple):
    """Views of one call in q, k, v, lse and in contiguous tensors like q and k, and the options of its kernel."""

    q: View
    k: View
    v: View
    lse: View
    like_q: View
    like_k: View
    times: int
    options: dict[str, Any]

    @classmethod
    def of(cls, rows: Rows, mask: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, lse: Tensor) -> PlacedCall | None:
        """The views in tensors of these strides; None if rows are copies."""
        dim = q.shape[-1]
        like_q, like_k = contiguous_strides(q.shape), contiguous_strides(k.shape)
        views = (
            rows.query_view(q.stride(), dim),
            rows.key_view(k.stride(), dim),
            rows.key_view(v.stride(), dim),
            rows.lse_view(lse.stride()),
            rows.query_view(like_q, dim),
            rows.key_view(like_k, dim),
        )
        return None if None in views else cls(*views, rows.count, mask)  # type: ignore[arg-type]

    def merge(
        self, kernel: MergingKernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, fresh: bool
    ) -> None:
        """Merge the call's results into out and lse, which are contiguous."""
        views = []
        for x, (size, stride, first) in (
            *((q, self.q), (k, self.k), (v, self.v)),
            *((out, self.like_q), (lse, self.lse)),
        ):
            views.append(x.as_strided(size, stride, x.storage_offset() + first))
        kernel.merge(*views, **self.options, count=self.times, fresh=fresh)

    def gradients(
        self, backward: AttendBackward, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The call's own gradients; dout and out are contiguous."""
        views = self._of_backward(dout, q, k, v, out, lse, None)
        dout, q, k, v, out, lse = views
        return backward(dout, q, k, v, out, lse.flatten(0, 1), **self.options)

    def add_gradients(
        self,
        kernel: MergingKernel,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        own: Tensor | None,
        total: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add the call's gradients to the total; dout, out and the total are contiguous. own: the call's own out, if
        merges are detached.
        """
        views = self._of_backward(dout, q, k, v, out, lse, own)
        for x, (size, stride, first) in zip(total, (self.like_q, self.like_k, self.like_k), strict=True):
            views.append(x.as_strided(size, stride, x.storage_offset() + first))
        kernel.add_gradients(*views, **self.options, count=self.times)

    def _of_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, own: Tensor | None
    ) -> list[Tensor]:
        views = []
        for x, (size, stride, first) in (
            *((dout, self.like_q), (q, self.q), (k, self.k), (v, self.v)),
            *((out, self.like_q), (lse, self.lse)),
        ):
            views.append(x.as_strided(size, stride, x.storage_offset() + first))
        if own is not None:
            views[4] = own
        return views


def _zero_keys(workload: Workload, device: torch.device) -> Tensor | None:
    """`log_zero_keys` of the rows that are there."""
    rows = torch.arange(workload.first_row, workload.seq_len, device="cpu") if workload.first_row else None
    return log_zero_keys(workload, device, rows=rows, apart=workload.detaches_merge)


def _as_output(q: Tensor, branch_out: Tensor, branch_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The result of a call over all rows, [B·n, w, H, D] and [B·n, H, w], as the output itself."""
    B, N, H, _ = q.shape
    lse = branch_lse.unflatten(0, (B, -1)).transpose(1, 2).reshape(B, H, N)
    return branch_out.reshape(q.shape).contiguous(), lse.contiguous()


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)

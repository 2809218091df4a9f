"""Rows of a kernel call as views of the tensors: nothing is copied, results are merged in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.contracts import PatternCache
from dilabench.impls.union.head_runs import Progression
from dilabench.impls.union.strided_calls import StridedCall, copied_rows, strided_calls
from dilabench.kernels.lse import merge_rows_
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class StridedRows:
    """`union.Rows` by `as_strided`.

    Views are [S, G, L, A, D]: batch items, stack, rows, heads. The kernel gets S and G as one axis, which is a view
    where the tensor's batch items follow each other as its tokens do; torch copies the rows where they do not.
    """

    call: StridedCall
    whole: bool

    @property
    def rate(self) -> int:
        """Positions from one row to the next."""
        return self.call.rate

    @property
    def part(self) -> int:
        """Which part of the pattern the rows belong to."""
        return self.call.part

    @property
    def first(self) -> bool:
        """Whether no earlier call has written these rows of the output."""
        return self.call.first

    def queries(self, x: Tensor) -> Tensor:
        """Rows [S·G, L, A, D] of x [B, N, H, D]."""
        return self._view(x, self.call.start.head, self.call.heads).flatten(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """Rows [S·G, L, A', D] of x [B, N, K, D]."""
        return self._key_view(x).flatten(0, 1)

    def lse(self, lse: Tensor) -> Tensor:
        """Rows [S·G, A, L] of lse [B, H, N]."""
        return self._lse_view(lse).flatten(0, 1)

    def write(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Put results into rows that hold nothing yet."""
        self._view(out, self.call.start.head, self.call.heads).copy_(self._apart(branch_out))
        self._lse_view(lse).copy_(self._apart(branch_lse))

    def merge(self, out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
        """Merge results into rows that hold those of other branches."""
        view = self._view(out, self.call.start.head, self.call.heads)
        merge_rows_(view, self._lse_view(lse), self._apart(branch_out), self._apart(branch_lse))

    def add_queries(self, total: Tensor, part: Tensor) -> None:
        """Add rows to total [B, N, H, D]."""
        self._view(total, self.call.start.head, self.call.heads).add_(self._apart(part))

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add rows to total [B, N, K, D]."""
        self._key_view(total).add_(self._apart(part))

    @property
    def count(self) -> int:
        """How often each pair counts."""
        return 1

    def places(self, x: Tensor, lse: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows [S·G, L, A, D] of x and [S, G, A, L] of lse as views; None where S and G are no one axis of x."""
        rows = self.queries(x)
        return (rows, self._lse_view(lse)) if _share_memory(rows, x) else None

    def key_place(self, x: Tensor) -> Tensor | None:
        """Rows of x [B, N, K, D] as a view; None as for `places`."""
        rows = self.keys(x)
        return rows if _share_memory(rows, x) else None

    def release(self, *rows: Tensor) -> None:
        """Do nothing: views own no memory."""

    def _apart(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (self.call.batches, self.call.stack.count))

    def _key_view(self, x: Tensor) -> Tensor:
        keys = self.call.keys
        step = keys.step._replace(head=keys.step.kv_head)
        return self._view(x, self.call.start.kv_head, Progression(keys.count, step), by_key=True)

    def _view(self, x: Tensor, first_head: int, heads: Progression, by_key: bool = False) -> Tensor:
        call = self.call
        batch, token, head, dim = x.stride()
        stack = call.stack.step
        stack_heads = stack.kv_head if by_key else stack.head
        return x.as_strided(
            (call.batches, call.stack.count, call.rows, heads.count, x.shape[-1]),
            (
                batch,
                stack.position * token + stack_heads * head,
                call.rate * token,
                heads.step.position * token + heads.step.head * head,
                dim,
            ),
            x.storage_offset() + call.first_batch * batch + call.start.position * token + first_head * head,
        )

    def _lse_view(self, lse: Tensor) -> Tensor:
        """Rows [S, G, A, L]."""
        as_tokens = lse.transpose(1, 2).unsqueeze(-1)
        return self._view(as_tokens, self.call.start.head, self.call.heads).squeeze(-1).transpose(-1, -2)


def _share_memory(x: Tensor, other: Tensor) -> bool:
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata


def strided_rows(workload: Workload, copied: int = 0) -> tuple[StridedRows, ...]:
    """The rows of every kernel call of a workload, in the order in which results are merged. copied: as for
    `strided_calls`.
    """
    whole = workload.tokens * workload.num_heads
    calls = strided_calls(workload, copied)
    return tuple(StridedRows(call, whole=call.first and call.query_rows == whole) for call in calls)


def kept_rows(workload: Workload, patterns: PatternCache) -> Callable[[torch.device], tuple[StridedRows, ...]]:
    """What gives the rows of a workload's calls on a device, where small copies may spare some; kept with patterns."""

    def rows(device: torch.device) -> tuple[StridedRows, ...]:
        copied = copied_rows(workload, device)
        return patterns.get(("strided rows", workload, copied), lambda: strided_rows(workload, copied))

    return rows

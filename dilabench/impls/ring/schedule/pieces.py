"""One kernel call between two ranks' local rows, as views of their tensors.

Views are [B, G, L, A, D]: batch items, stack, rows, heads. The kernel gets B and G as one axis, which is a view if
strides allow; otherwise torch copies the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from dilabench.impls.union.branches import Place, Progression, Run
from dilabench.workload.spec import UNBOUNDED, Window


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries of one rank that see keys of another (or of its own) through one aligned mask.

    `query`, `key`: local row of the first query and key for a head on residue 0; a head on residue s starts s rows
    later. `step`: local rows from one row to the next. `stack`: repetitions, by rows (segments) or by heads.
    `whole_heads`, `whole_kv_heads`: how many heads it has if its rows follow each other and its heads are 0, 1, ... in
    order, else 0. Then a view of a range of rows is enough, in a tensor with as many heads.
    """

    query: int
    queries: int
    key: int
    keys: int
    step: int
    run: Run
    stack: Progression
    causal: bool = False
    window: Window = UNBOUNDED
    whole_heads: int = field(init=False, repr=False, compare=False)
    whole_kv_heads: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find out once what every call asks."""
        run, successive = self.run, (self.stack.count, self.step) == (1, 1)
        keys = run.keys.step.position, run.keys.step.kv_head
        for name, count, step in (
            ("whole_heads", run.heads.count, run.heads.step[:2]),
            ("whole_kv_heads", run.keys.count, keys),
        ):
            object.__setattr__(self, name, count if successive and (count == 1 or step == (0, 1)) else 0)

    def take_queries(self, x: Tensor) -> Tensor:
        """Rows [B·G, L, A, D] of x [B, N, H, D]."""
        if x.shape[2] == self.whole_heads:
            # All rows are the tensor itself: a view costs the host microseconds.
            whole = x.shape[1] == self.queries
            return x if whole else x.narrow(1, self.query + self.run.start.position, self.queries)
        return self._queries(x).flatten(0, 1)

    def take_keys(self, x: Tensor, first_row: int = 0) -> Tensor:
        """Rows [B·G, L, A', D] of x [B, N', K, D], whose row 0 is the owner's local row `first_row`."""
        if x.shape[2] == self.whole_kv_heads:
            whole = x.shape[1] == self.keys
            return x if whole else x.narrow(1, self.key - first_row + self.run.start.position, self.keys)
        return self._keys(x, first_row).flatten(0, 1)

    def take_lse(self, lse: Tensor) -> Tensor:
        """Rows [B·G, A, L] of lse [B, H, N]."""
        if lse.shape[1] == self.whole_heads:
            whole = lse.shape[2] == self.queries
            return lse if whole else lse.narrow(2, self.query + self.run.start.position, self.queries)
        return self.view_lse(lse).flatten(0, 1)

    def add_queries(self, total: Tensor, part: Tensor) -> None:
        """Add rows to total [B, N, H, D]."""
        self._queries(total).add_(self.apart(part))

    def add_keys(self, total: Tensor, part: Tensor, first_row: int = 0) -> None:
        """Add rows to total [B, N', K, D]."""
        self._keys(total, first_row).add_(self.apart(part))

    def mark_keys(self, mask: Tensor) -> None:
        """Set a bool [N', K] where the piece reads."""
        self._keys(mask[None, :, :, None], 0).fill_(True)

    def view_queries(self, x: Tensor) -> Tensor:
        """Rows [B, G, L, A, D] of x [B, N, H, D], to write into."""
        return self._queries(x)

    def view_lse(self, lse: Tensor) -> Tensor:
        """Rows [B, G, A, L] of lse [B, H, N]."""
        return self._queries(lse.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(-1, -2)

    def apart(self, rows: Tensor) -> Tensor:
        """[B·G, ...] -> [B, G, ...]."""
        return rows.unflatten(0, (-1, self.stack.count))

    def query_rows(self, num_heads: int) -> int | None:
        """The first row of x [B, N, H, D], where the queries are successive rows of it with all heads in order."""
        return self.query + self.run.start.position if num_heads == self.whole_heads else None

    def key_rows(self, num_kv_heads: int, first_row: int = 0) -> int | None:
        """The same of x [B, N', K, D], which begins at the owner's `first_row`, and the keys."""
        return self.key - first_row + self.run.start.position if num_kv_heads == self.whole_kv_heads else None

    def _queries(self, x: Tensor) -> Tensor:
        return self._view(x, self.query, self.queries, self.run.start.head, self.run.heads, self.stack.step.head)

    def _keys(self, x: Tensor, first_row: int) -> Tensor:
        keys = self.run.keys
        heads = Progression(keys.count, Place(keys.step.position, keys.step.kv_head, 0))
        start = self.key - first_row
        return self._view(x, start, self.keys, self.run.start.kv_head, heads, self.stack.step.kv_head)

    def _view(self, x: Tensor, start: int, rows: int, head: int, heads: Progression, stack_heads: int) -> Tensor:
        batch_step, token, head_step, dim = x.stride()
        return x.as_strided(
            (x.shape[0], self.stack.count, rows, heads.count, x.shape[-1]),
            (
                batch_step,
                self.stack.step.position * token + stack_heads * head_step,
                self.step * token,
                heads.step.position * token + heads.step.head * head_step,
                dim,
            ),
            x.storage_offset() + (start + self.run.start.position) * token + head * head_step,
        )


def disjoint(pieces: Sequence[Piece]) -> bool:
    """Return True if no two of these pieces of a dense pattern have a query in common."""
    ranges = sorted((piece.query, piece.query + piece.queries) for piece in pieces)
    return all(stop <= start for (_, stop), (start, _) in pairwise(ranges))

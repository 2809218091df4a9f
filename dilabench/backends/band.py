"""The keys that a query sees under causal mask and window: a band around the diagonal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.workload.spec import Window


@dataclass(frozen=True, slots=True)
class Band:
    """A query at position i sees key j if i - left <= j <= i + right; -1 is unbounded.

    Bounds that hide nothing at the given sizes are written as -1, so that equal masks are equal bands: a causal mask is
    (-1, 0), a causal window (left, 0), and any mask over one key is (-1, -1).
    """

    left: int
    right: int

    @classmethod
    def of(cls, causal: bool, window: Window, num_queries: int, num_keys: int) -> Band:
        """The band of a causal flag and a window for M queries and L keys; the last query stands at the last key."""
        left, right = window
        if causal:
            right = 0
        return cls(
            left=left if 0 <= left < num_keys - 1 else -1,
            right=right if 0 <= right < num_queries - 1 else -1,
        )

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        return self.left < 0 and self.right < 0

    @property
    def causal(self) -> bool:
        """No query sees a key after itself."""
        return self.right == 0

    @property
    def windowed(self) -> bool:
        """Return True if it is neither full nor causal only."""
        return self.left >= 0 or self.right > 0

    def keys_of(self, start: int, stop: int, num_keys: int) -> tuple[int, int]:
        """(first, end) of the keys that at least one of the queries at positions start..stop-1 sees."""
        first = max(0, start - self.left) if self.left >= 0 else 0
        end = max(0, min(num_keys, stop + self.right)) if self.right >= 0 else num_keys
        return min(first, end), end

    def hides(self, start: int, stop: int, first: int, end: int) -> bool:
        """Return True if some query at positions start..stop-1 does not see some key of first..end-1."""
        sees_last = self.right < 0 or end - 1 <= start + self.right
        sees_first = self.left < 0 or first >= stop - 1 - self.left
        return not (sees_last and sees_first)

    def hidden(self, start: int, stop: int, first: int, end: int, device: torch.device) -> Tensor | None:
        """bool [stop - start, end - first], True if query start+i does not see key first+j; None if none is hidden."""
        if not self.hides(start, stop, first, end):
            return None
        keys, queries = torch.arange(first, end, device=device), torch.arange(start, stop, device=device)
        return self.hidden_ahead(keys - queries.unsqueeze(1))

    def hidden_ahead(self, ahead: Tensor) -> Tensor:
        """bool, True if a key `ahead` positions after a query (negative: before it) is hidden."""
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if self.right >= 0:
            hidden |= ahead > self.right
        if self.left >= 0:
            hidden |= ahead < -self.left
        return hidden

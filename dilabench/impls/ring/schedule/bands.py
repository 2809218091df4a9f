"""Cutting a shifted band of visible keys into calls that a dense kernel can do: aligned squares and full rectangles.

Ranks hold different positions, so a causal mask or a window between them is a band off the diagonal. Every backend
knows masks that start in the corner of a square (`contracts.Attend`), and every band is a few of those; one that aligns
ends takes a causal band off the diagonal in one call.
"""

from __future__ import annotations

from typing import NamedTuple

from dilabench.workload.spec import UNBOUNDED, Window


class Cut(NamedTuple):
    """One kernel call: queries [query, query + queries) against keys [key, key + keys).

    causal: the last query sees the last key.
    """

    query: int
    queries: int
    key: int
    keys: int
    causal: bool = False
    window: Window = UNBOUNDED


def cuts(queries: int, keys: int, low: int | None, high: int | None, *, aligned: bool = False) -> list[Cut]:
    """The calls for query t to see key u exactly when low <= u - t <= high (None: no bound); no pair comes twice.

    aligned: causal calls may have fewer queries than keys.
    """
    return _cuts(0, queries, 0, keys, low, high, aligned)


def _cuts(q: int, m: int, k: int, n: int, low: int | None, high: int | None, aligned: bool = False) -> list[Cut]:
    """The same for queries [q, q + m) and keys [k, k + n), with bounds relative to (q, k)."""
    # Rows and keys at the ends that have no partner go first.
    skip = max(0, -high) if high is not None else 0
    m = min(m, n - low) if low is not None else m
    q, m, low, high = q + skip, m - skip, _plus(low, skip), _plus(high, skip)
    n = min(n, m + high) if high is not None else n
    skip = max(0, low) if low is not None else 0
    k, n, low, high = k + skip, n - skip, _plus(low, -skip), _plus(high, -skip)
    if m <= 0 or n <= 0 or (low is not None and high is not None and low > high):
        return []
    if high is not None and high >= n - 1:
        high = None
    if low is not None and low <= 1 - m:
        low = None
    if low is None and high is None:
        return [Cut(q, m, k, n)]
    if low is None:
        return _below(q, m, k, n, high or 0, aligned)
    if high is None:
        return _above(q, m, k, n, low)
    return _both(q, m, k, n, low, high)


def _below(q: int, m: int, k: int, n: int, high: int, aligned: bool) -> list[Cut]:
    """u <= t + high: keys that all rows see, a causal square, rows that see all keys."""
    if high > 0 and not aligned:
        return [Cut(q, m, k, high), *_cuts(q, m, k + high, n - high, None, 0)]
    rows = n - high
    masked = Cut(q, rows, k, n, causal=True)
    return [masked, Cut(q + rows, m - rows, k, n)] if m > rows else [masked]


def _above(q: int, m: int, k: int, n: int, low: int) -> list[Cut]:
    """u >= t + low: rows that see all keys, a square above its diagonal, keys that all its rows see."""
    if low < 0:
        return [Cut(q, -low, k, n), *_cuts(q - low, m + low, k, n, 0, None)]
    square = Cut(q, m, k, m, window=(0, -1))
    return [square, Cut(q, m, k + m, n - m)] if n > m else [square]


def _both(q: int, m: int, k: int, n: int, low: int, high: int) -> list[Cut]:
    """A square with a window, and the band that continues next to or below it."""
    side = min(m, n)
    square = Cut(q, side, k, side, causal=high == 0, window=(-low, high))
    if m > n:
        return [square, *_cuts(q + side, m - side, k, n, low + side, high + side)]
    return [square, *_cuts(q, side, k + side, n - side, low - side, high - side)]


def _plus(bound: int | None, shift: int) -> int | None:
    return None if bound is None else bound + shift

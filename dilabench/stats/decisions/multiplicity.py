"""Correction for many comparisons at once: without it 132 pairs give six false alarms at 5 %.

Holm controls the chance of any false claim. Slow-downs and speed-ups are two families, so that exchanging the sides
mirrors every verdict.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from dilabench.errors import ConfigError
from dilabench.stats.decisions.verdicts import Cause, Code, Verdict


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Holm's step-down adjusted p-values, in the given order. Raises ConfigError for a p outside [0, 1]."""
    p = np.asarray(p_values, np.float64)
    if not np.all((p >= 0) & (p <= 1)):
        raise ConfigError(f"p-values must lie in [0, 1], got {p[~((p >= 0) & (p <= 1))][0]}; pass raw p-values")
    order, m = np.argsort(p, kind="stable"), len(p)
    adjusted = np.empty(m)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * (m - np.arange(m))))
    return adjusted


def control_family(verdicts: Sequence[Verdict], *, alpha: float = 0.025) -> list[Verdict]:
    """The verdicts with adjusted p-values; a SLOWER or FASTER that does not survive becomes INCONCLUSIVE.

    `alpha` is one-sided and by default fits intervals of 95 %, so that one pair alone is judged as its interval says.
    A pair without p-value counts as p = 1. SAME needs no correction: it makes no claim of a change.
    """
    slower = holm([_or_one(verdict.numbers.p_slower) for verdict in verdicts])
    faster = holm([_or_one(verdict.numbers.p_faster) for verdict in verdicts])
    controlled = []
    for verdict, p_slower, p_faster in zip(verdicts, slower.tolist(), faster.tolist(), strict=True):
        faster_claimed = verdict.code is Code.FASTER
        claimed = verdict.numbers.p_faster if faster_claimed else verdict.numbers.p_slower
        p = p_faster if faster_claimed else p_slower
        numbers = replace(verdict.numbers, p_adjusted=None if claimed is None else p)
        if claimed is None or p <= alpha or verdict.code not in (Code.SLOWER, Code.FASTER):
            controlled.append(replace(verdict, numbers=numbers))
            continue
        needed = _rounds_needed(numbers.rounds, claimed, alpha / len(verdicts))
        controlled.append(
            replace(
                verdict,
                code=Code.INCONCLUSIVE,
                cause=Cause.MULTIPLICITY,
                numbers=replace(numbers, rounds_needed=needed),
                reason=f"{verdict.reason}; among {len(verdicts)} pairs that may be chance (adjusted p = {p:.2g})",
                hint=f"about {needed} more rounds (better in further sessions) or fewer pairs would decide",
            )
        )
    return controlled


def _rounds_needed(rounds: int, p: float, p_needed: float) -> int:
    """More rounds until p falls to `p_needed`, by the normal law: the standard score grows with the root of rounds."""
    return max(1, ceil(rounds * ((ndtri(p_needed) / ndtri(p)) ** 2 - 1)))


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p

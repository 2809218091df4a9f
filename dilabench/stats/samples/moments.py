"""Session medians and variances of the paired log ratios of many pairs at once."""

from dataclasses import dataclass

import numpy as np

from dilabench.stats.samples.slots import Counts, Floats, group_means, group_medians, group_sums

SESSIONS_FOR_SPREAD = 3
"""From this many sessions on, their own spread is the error."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rounds belong to which session and pair; everything lies in order, one after the other."""

    sessions: Counts  # [pairs] sessions of each pair
    rounds: Counts  # [all sessions] rounds of each session
    pair_rounds: Counts  # [pairs] rounds of each pair


@dataclass(frozen=True, slots=True)
class ErrorTerms:
    """Squared error = reducible / units + fixed, with `df` degrees of freedom."""

    df: float
    reducible: float
    fixed: float
    units: float

    @property
    def se(self) -> float:
        return float((self.reducible / self.units + self.fixed) ** 0.5)


@dataclass(frozen=True, slots=True)
class Moments:
    """theta `[pairs]`, D `[all sessions]`, s^2(D) `[pairs]`, pooled s^2(y) `[pairs]`, effective rounds `[pairs]`."""

    theta: Floats
    session_medians: Floats
    between: Floats
    within: Floats
    effective_rounds: Floats

    def error_terms(self, pair: int, sessions: int, sigma_aa: float) -> ErrorTerms:
        """The error of theta of one pair, from its sessions when they are enough, else from its rounds."""
        if sessions >= SESSIONS_FOR_SPREAD:
            return ErrorTerms(sessions - 1.0, float(self.between[pair]), 0.0, float(sessions))
        units = float(self.effective_rounds[pair])
        # rounded, so that the quantiles of t are found in the cache
        return ErrorTerms(max(1.0, round(units - sessions, 2)), float(self.within[pair]), sigma_aa**2, units)


def paired_moments(y: Floats, layout: Layout) -> Moments:
    """Moments of the log ratios `y`, `[all rounds]`."""
    medians = group_medians(y, layout.rounds)
    theta = group_means(medians, layout.sessions)
    between = group_sums((medians - np.repeat(theta, layout.sessions)) ** 2, layout.sessions)
    residual = y - np.repeat(group_means(y, layout.rounds), layout.rounds)
    squares = group_sums(residual**2, layout.pair_rounds)
    return Moments(
        theta=theta,
        session_medians=medians,
        between=between / np.maximum(1, layout.sessions - 1),
        within=squares / np.maximum(1, layout.pair_rounds - layout.sessions),
        effective_rounds=_effective_rounds(residual, squares, layout),
    )


def _effective_rounds(residual: Floats, squares: Floats, layout: Layout) -> Floats:
    """R (1 - r1) / (1 + r1) where the lag-one correlation within sessions is significantly positive, else R."""
    session = np.repeat(np.arange(len(layout.rounds)), layout.rounds)
    products = np.zeros_like(residual)
    products[1:] = np.where(session[1:] == session[:-1], residual[1:] * residual[:-1], 0.0)
    lag_one = group_sums(products, layout.pair_rounds) / np.where(squares > 0, squares, 1.0)
    r1 = np.where(lag_one > 1.645 / np.sqrt(layout.pair_rounds), lag_one, 0.0)
    effective = layout.pair_rounds * (1 - r1) / (1 + r1)
    return np.asarray(np.minimum(np.maximum(2.0, effective), layout.pair_rounds))

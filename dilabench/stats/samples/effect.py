"""Effect size that needs no distribution: how often is the candidate the slower one?"""

import numpy as np
from numpy.typing import ArrayLike

from dilabench.stats.samples.location import checked_samples


def a12(baseline_ns: ArrayLike, candidate_ns: ArrayLike) -> float:
    """Vargha-Delaney A12: P(candidate > baseline) + P(equal) / 2, in [0, 1]; 0.5 is no effect.

    Vargha and Delaney, "A critique and improvement of the CL common language effect size statistics", 2000. The
    original marks are 0.56 small, 0.64 medium, 0.71 large (and their mirrors below one half).
    """
    baseline, candidate = np.sort(checked_samples(baseline_ns)), np.sort(checked_samples(candidate_ns))
    below = np.searchsorted(baseline, candidate, side="left")
    upto = np.searchsorted(baseline, candidate, side="right")
    return float((below.sum() + upto.sum()) / (2 * baseline.size * candidate.size))

"""What records are compared with: the policy of their machine. Records of another one are refused."""

from collections.abc import Sequence

from dilabench.compare.across import compare_across, refusals
from dilabench.compare.comparison import Comparison
from dilabench.errors import ConfigError, DilabenchError
from dilabench.record import RunRecord
from dilabench.stats.decisions.policy import Policy
from dilabench.store.calibrations import Calibration
from dilabench.store.lookup import Store
from dilabench.units import parse_fraction


def compare_runs(
    store: Store, baseline: Sequence[RunRecord], candidate: Sequence[RunRecord], threshold: str | None = None
) -> Comparison:
    """Compare the sessions of two sides. Raises ConfigError for runs of different machines."""
    refuse_other_machine(baseline, candidate, ConfigError)
    records = [*baseline, *candidate]
    return compare_across(baseline, candidate, policy=policy_for(records, threshold, store.calibration_of(records)))


def policy_for(records: Sequence[RunRecord], threshold: str | None, calibration: Calibration | None) -> Policy:
    """How to decide on these records: the user's margin, and what is known of the machine's noise."""
    return Policy.for_device(
        records[-1].device,
        user_margin=None if threshold is None else parse_fraction(threshold),
        sigma_aa=calibration.sigma_aa if calibration else None,
    )


def refuse_other_machine(
    baseline: Sequence[RunRecord], candidate: Sequence[RunRecord], error: type[DilabenchError]
) -> None:
    """Raise `error` naming every hard field in which the sides differ, with both values."""
    differing = refusals(baseline, candidate)
    if differing:
        fields = "; ".join(map(str, differing))
        raise error(
            f"the two sides cannot be compared, they differ in {fields}; measure the baseline again on this machine, "
            "in this state (`dilabench run`, then `dilabench baseline save NAME`); `dilabench compare` with "
            "--across-machines shows the ratios of two machines without a verdict"
        )

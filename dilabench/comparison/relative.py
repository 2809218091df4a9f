"""Times relative to a reference that was interleaved with them: disturbances of the machine or a session cancel.

The user vouches that the code of the reference did not change. Records of different software are refused, because
the reference may have changed with it.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from dilabench.comparison.comparison import is_measured
from dilabench.comparison.fingerprint import soft_mismatches
from dilabench.comparison.pairing import matched
from dilabench.errors import ConfigError, unknown_name
from dilabench.record import Measured, RunRecord, Timing

Turns = Mapping[tuple[str, str], Timing]
"""The timings of the reference by workload group and timer."""


def relative_to(name: str, baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Scale both sides as if the implementation `name` had always taken as long as in the last baseline session.

    The rows of `name` keep their times; a row that was not interleaved with it loses its samples. Raises ConfigError if
    the baseline did not measure `name`, or if the software of two records differs.
    """
    require_reference(name, baseline, candidate)
    usual: dict[tuple[str, str], Timing] = {}
    for record in baseline:
        usual |= _turns(record, name)
    typical_ns = {key: median(timing.samples_ns) for key, timing in usual.items()}
    return [[_relative(record, name, typical_ns) for record in side] for side in (baseline, candidate)]


def require_reference(name: str, baseline: Sequence[RunRecord], candidate: Sequence[RunRecord] = ()) -> None:
    """Raise ConfigError if the baseline did not measure `name`, or if the software of two records differs."""
    records = [*baseline, *candidate]
    differing = [str(mismatch) for record in records for mismatch in soft_mismatches(baseline[0], record)]
    versions = {record.tool_version for record in records}
    if differing or len(versions) > 1:
        changed = differing[0] if differing else f"dilabench: {' against '.join(sorted(versions))}"
        raise ConfigError(
            f"{name} cannot be the reference, because it may have changed, too ({changed}); measure the baseline "
            "again, or omit the reference"
        )
    known = {row.case.implementation for record in baseline for row in record.rows if is_measured(row)}
    if name not in known:
        raise unknown_name("reference", name, known)


def _relative(record: RunRecord, name: str, typical_ns: Mapping[tuple[str, str], float]) -> RunRecord:
    turns = {key: timing for key, timing in _turns(record, name).items() if key in typical_ns}
    rows = []
    for row in record.rows:
        if isinstance(row.outcome, Measured) and row.case.implementation != name:
            keyed = [((row.case.group_id, timing.timer), timing) for timing in row.outcome.timings]
            timings = tuple(_scaled(timing, turns[key], typical_ns[key]) for key, timing in keyed if key in turns)
            row = row.model_copy(update={"outcome": row.outcome.model_copy(update={"timings": timings})})
        rows.append(row)
    return record.model_copy(update={"rows": tuple(rows)})


def _turns(record: RunRecord, name: str) -> Turns:
    rows = [row for row in record.rows if row.case.implementation == name and is_measured(row)]
    return {
        (row.case.group_id, timing.timer): timing
        for row in rows
        if isinstance(row.outcome, Measured)
        for timing in row.outcome.timings
    }


def _scaled(timing: Timing, reference: Timing, typical_ns: float) -> Timing:
    """Scale every slot by the reference's time in the same round."""
    slots = []
    for turn, own in (turns for session in matched(reference, timing) for turns in session.tolist()):
        slot = timing.slots[own]
        factor = typical_ns / median(reference.slots[turn].samples_ns)
        slots.append(slot.model_copy(update={"samples_ns": tuple(round(ns * factor) for ns in slot.samples_ns)}))
    return timing.model_copy(update={"slots": tuple(slots)})

"""May two records be compared? Hard fields must agree; soft ones that differ become warnings (measurement.md §5.3)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dilabench.machine import device_named
from dilabench.record import RunRecord
from dilabench.validation import content_hash


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A field that differs, with both values; None is a value that the record does not know."""

    field: str
    baseline: str | None
    candidate: str | None

    def __str__(self) -> str:
        sides = (value if value is not None else "not recorded" for value in (self.baseline, self.candidate))
        return f"{self.field}: {' against '.join(sides)}"


def hard_mismatches(baseline: RunRecord, candidate: RunRecord) -> tuple[Mismatch, ...]:
    """Fields known on both sides whose difference makes times incomparable: device, driver, power limit, dtype."""
    differing = _differences(hard_fields(baseline), hard_fields(candidate))
    dtypes = [sorted({row.case.workload.dtype for row in record.rows}) for record in (baseline, candidate)]
    if all(dtypes) and not set(dtypes[0]) & set(dtypes[1]):
        differing.append(Mismatch("dtype", ", ".join(dtypes[0]), ", ".join(dtypes[1])))
    return tuple(mismatch for mismatch in differing if None not in (mismatch.baseline, mismatch.candidate))


def soft_mismatches(baseline: RunRecord, candidate: RunRecord) -> tuple[Mismatch, ...]:
    """Fields that may explain a change: versions, and hard fields that only one side recorded."""
    half_known = [
        mismatch
        for mismatch in _differences(hard_fields(baseline), hard_fields(candidate))
        if None in (mismatch.baseline, mismatch.candidate)
    ]
    soft = _differences(baseline.environment.fingerprint_soft, candidate.environment.fingerprint_soft)
    return (*half_known, *soft)


def soft_warnings(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> tuple[str, ...]:
    """One warning per soft field that differs between any record of one side and any of the other."""
    texts = dict.fromkeys(
        f"{mismatch}; this may explain a change"
        for a in baseline
        for b in candidate
        for mismatch in soft_mismatches(a, b)
    )
    return tuple(texts)


def hard_fields(record: RunRecord) -> dict[str, str]:
    """Return the record's hard fields; for an older record without any, they come from its environment."""
    environment = record.environment
    fields = {"device": record.device.partition(":")[0], **environment.fingerprint_hard}
    if not environment.fingerprint_hard:
        fields["cpu"] = environment.cpu.model
    if device_named(record.device).own_memory and environment.gpus:
        gpu = environment.gpus[0]
        fields.setdefault("gpu", gpu.name)
        for name, value in (("driver", gpu.driver), ("power_limit_mw", gpu.power_limit_mw)):
            if value is not None:
                fields.setdefault(name, str(value))
    return fields


def machine_key(record: RunRecord) -> str:
    """Equal for records whose hard fields agree: one machine in one state, as far as times are concerned."""
    return content_hash(hard_fields(record))


def _differences(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> list[Mismatch]:
    names: Iterable[str] = sorted({**baseline, **candidate})
    pairs = ((name, baseline.get(name), candidate.get(name)) for name in names)
    return [Mismatch(name, old, new) for name, old, new in pairs if old != new]

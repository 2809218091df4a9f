"""Exposed communication of a call over ranks (not hidden by computation), from a row's diagnostics."""

from collections.abc import Sequence
from dataclasses import dataclass

from dilabench.distributed.model import Sharding, ideal_efficiency, joined_bytes
from dilabench.metadata import RECEIVED_BYTES
from dilabench.record import Diagnostic, Measured, Row
from dilabench.stats.samples.location import Interval, locate


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Medians of the parts of a call; None for a part that was not timed.

    exposed = the whole call - computation alone, slot by slot; noise may make it negative.
    """

    computation_ns: float | None
    communication_ns: float | None
    exposed_ns: float | None
    interval: Interval | None

    @property
    def overlap(self) -> float | None:
        """Share of the communication alone that is hidden behind computation, in [0, 1]."""
        if self.exposed_ns is None or self.communication_ns is None:
            return None
        return 1 - min(1.0, max(0.0, self.exposed_ns / self.communication_ns))


def exposure(row: Row) -> Exposure:
    """The exposure from the row's diagnostics; all None without them."""
    assert isinstance(row.outcome, Measured)
    parts: dict[str, Diagnostic] = {diagnostic.part: diagnostic for diagnostic in row.outcome.diagnostics}
    medians = {name: locate(part.samples_ns).median_ns for name, part in parts.items()}
    exposed: tuple[float | None, Interval | None] = (None, None)
    if "whole" in parts and "computation" in parts:
        exposed = _difference(parts["whole"].samples_ns, parts["computation"].samples_ns)
    return Exposure(
        computation_ns=medians.get("computation"),
        communication_ns=medians.get("communication"),
        exposed_ns=exposed[0],
        interval=exposed[1],
    )


def expected_bytes(row: Row, sharding: Sharding | None) -> int | None:
    """Bytes received in one call by the rank that receives most, by formula; None if there is none."""
    case = row.case
    received = sharding.received_bytes(case.workload, case.world_size) if sharding else None
    joined = joined_bytes(case.workload, case.world_size) if case.optimizations.sharding_inside else 0
    return None if received is None or joined is None else received + joined


def modelled(row: Row, single_ns: float, sharding: Sharding | None) -> float | None:
    """Modelled efficiency of a parallel row, given one device's time; None if a part of the formula is unknown.

    T_comp = T_single / P is the work at the single device's measured rate F. V is what the formula says the rank with
    most receives (without a formula the counted bytes), B the counted bytes over the time of communication alone.
    """
    case, parts = row.case, exposure(row)
    assert isinstance(row.outcome, Measured)
    if sharding is None:
        return None
    facts = case.workload, case.world_size
    balance, meanwhile = sharding.load_balance(*facts), sharding.overlapping_share(*facts)
    counted = RECEIVED_BYTES.of(row.outcome) or 0
    if balance is None or meanwhile is None or parts.communication_ns is None or not counted:
        return None
    computation_ns = single_ns / case.world_size
    transfer_ns = parts.communication_ns * (expected_bytes(row, sharding) or counted) / counted
    return ideal_efficiency(balance, computation_ns, transfer_ns, meanwhile * computation_ns)


def _difference(whole: Sequence[int], part: Sequence[int]) -> tuple[float, Interval | None]:
    """Median of the differences slot by slot, with its interval."""
    # `locate` needs positive times, so the differences are shifted and shifted back.
    shift = max(part)
    location = locate([whole_ns - part_ns + shift for whole_ns, part_ns in zip(whole, part, strict=True)])
    interval = location.interval
    if interval is not None:
        interval = Interval(interval.low - shift, interval.high - shift, interval.confidence)
    return location.median_ns - shift, interval

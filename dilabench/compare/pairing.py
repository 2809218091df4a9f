"""From slots to rounds: which slots of two cases were measured in the same round."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dilabench.record import Measured, Row, Slot, Timing
from dilabench.stats.decisions.paired import PairedRounds
from dilabench.stats.samples.blocks import locate_sessions
from dilabench.stats.samples.location import Location

# Heat and brakes are faults of the moment; running into the power limit is how large GPUs work under full load.
FAULTS = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
MAX_FAULTY_SHARE = 0.2

SessionSlots = list[tuple[int, ...]]

# By the identity of timings that are alive: comparing thousands of samples would take longer than locating them.
_LOCATIONS: dict[int, tuple[weakref.ref[Timing], Location]] = {}


@dataclass(frozen=True, slots=True)
class Pairing:
    """The rounds of two cases. `rounds` is None when they were never interleaved; `throttled`: too many rounds were."""

    rounds: PairedRounds | None
    left_out: int = 0
    throttled: bool = False


def common_timings(baseline: Row, candidate: Row) -> tuple[Timing, Timing] | None:
    """The timings of the first timer that took samples of both; None when they share none."""
    assert isinstance(baseline.outcome, Measured)
    assert isinstance(candidate.outcome, Measured)
    others = {timing.timer: timing for timing in candidate.outcome.timings if timing.slots}
    for timing in baseline.outcome.timings:
        if timing.slots and timing.timer in others:
            return timing, others[timing.timer]
    return None


def pair(timings: Iterable[tuple[Timing, Timing]]) -> Pairing:
    """Pair the slots of two cases, (baseline, candidate) per record; each record adds its sessions.

    Slots pair when they belong to one round and took different turns in it: equal positions mean that the cases were
    measured one after the other, whatever their numbers say. Rounds slowed down by heat are left out while they are
    few (a fifth at most).
    """
    sessions: list[list[tuple[Slot, Slot]]] = []
    left_out = 0
    for baseline, candidate in timings:
        found = matched(baseline, candidate)
        left_out += max(len(baseline.slots), len(candidate.slots)) - sum(map(len, found))
        sessions += found
    count = sum(map(len, sessions))
    if not count:
        return Pairing(None, left_out)
    sound = [[turn for turn in session if not _is_faulty(turn)] for session in sessions]
    faulty = count - sum(map(len, sound))
    throttled = faulty > MAX_FAULTY_SHARE * count
    if not throttled:
        sessions, left_out = [session for session in sound if session], left_out + faulty
    rounds = PairedRounds(
        rounds=[[(a.samples_ns, b.samples_ns) for a, b in session] for session in sessions],
        clocks_mhz=[[(a.sm_clock_mhz, b.sm_clock_mhz) for a, b in session] for session in sessions],
    )
    return Pairing(rounds, left_out, throttled)


def sessions_of(timings: Iterable[Timing]) -> list[SessionSlots]:
    """The slots of one case by session, each record adding its own."""
    sessions: list[SessionSlots] = []
    for timing in timings:
        by_session: dict[int, SessionSlots] = {}
        for slot in timing.slots:
            by_session.setdefault(slot.session, []).append(slot.samples_ns)
        sessions += by_session.values()
    return sessions


def location_of(timing: Timing) -> Location:
    """Median and interval of a timing's samples; found once, because tables, rankings and plots all ask for it."""
    key = id(timing)
    known = _LOCATIONS.get(key)
    if known is None or known[0]() is not timing:
        known = weakref.ref(timing, lambda _: _LOCATIONS.pop(key, None)), locate_sessions(sessions_of([timing]))
        _LOCATIONS[key] = known
    return known[1]


def is_throttled(timings: Sequence[Timing]) -> bool:
    """More than a fifth of the slots were slowed down by heat or power delivery."""
    slots = [slot for timing in timings for slot in timing.slots]
    return sum(bool(FAULTS.intersection(slot.throttle)) for slot in slots) > MAX_FAULTY_SHARE * len(slots)


def matched(baseline: Timing, candidate: Timing) -> list[list[tuple[Slot, Slot]]]:
    """Pairs of slots by session.

    Where a round has one number throughout, that number alone decides: a case whose worker died continues in a new
    session while the other cases stay in the old one.
    """
    alone = _rounds_are_unique(baseline) and _rounds_are_unique(candidate)
    partners = {slot.round if alone else (slot.session, slot.round): slot for slot in candidate.slots}
    sessions: dict[tuple[int, int], list[tuple[Slot, Slot]]] = {}
    for slot in baseline.slots:
        partner = partners.get(slot.round if alone else (slot.session, slot.round))
        if partner is not None and partner.position != slot.position:
            sessions.setdefault((slot.session, partner.session), []).append((slot, partner))
    return list(sessions.values())


def _rounds_are_unique(timing: Timing) -> bool:
    return len({slot.round for slot in timing.slots}) == len(timing.slots)


def _is_faulty(turn: tuple[Slot, Slot]) -> bool:
    return not (FAULTS.isdisjoint(turn[0].throttle) and FAULTS.isdisjoint(turn[1].throttle))

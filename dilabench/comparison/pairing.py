"""Which slots of two cases pair: the slots of one round that both took part in, so that drift and load cancel."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from dilabench.record import Measured, Row, Timing
from dilabench.stats.decisions.history import Sessions
from dilabench.stats.decisions.paired import PairedRounds
from dilabench.stats.samples.location import Counts, Slots, chosen_slots, joined_slots

# Thermal and hardware slow-downs are temporary faults; large GPUs normally run at their power limit under full load.
FAULTS = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
MAX_FAULTY_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Pairing:
    """The rounds of two cases. `rounds`: None if they were never interleaved. `throttled`: too many rounds were."""

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


def pair_many(comparisons: Iterable[Iterable[tuple[Timing, Timing]]]) -> list[Pairing]:
    """Pair the slots of the two cases of each comparison, (baseline, candidate) per record; each record adds its
    sessions. Many together take less time.

    Slots pair if they belong to one round and have different positions in it: equal positions mean that the cases were
    measured one after the other, even if the round numbers agree. Rounds slowed down by heat are omitted while they
    are few (a fifth at most).
    """
    shared = [_shared_rounds(timings) for timings in comparisons]
    sessions = [session for rounds in shared for session in rounds.sessions]
    if not sessions:
        return [Pairing(None, rounds.left_out, rounds.throttled) for rounds in shared]
    slots = _interleaved(sessions)
    # Where the slots, and the samples, of each comparison end.
    ends = np.cumsum([0, *(2 * rounds.count for rounds in shared)])
    sample_ends = np.concatenate([[0], np.cumsum(slots.sizes)])[ends].tolist()
    return [
        Pairing(
            rounds.paired(Slots(slots.samples_ns[start:stop], slots.sizes[first:last])),
            rounds.left_out,
            rounds.throttled,
        )
        for rounds, first, last, start, stop in zip(
            shared, ends[:-1].tolist(), ends[1:].tolist(), sample_ends[:-1], sample_ends[1:], strict=True
        )
    ]


# The timings of two cases and which of their slots pair in one session, `[rounds, 2]`.
_Session = tuple[Timing, Timing, Counts]


@dataclass(frozen=True, slots=True)
class _SharedRounds:
    """The rounds that two cases share, by session; see `Pairing`."""

    sessions: list[_Session]
    left_out: int
    throttled: bool

    @property
    def count(self) -> int:
        """How many rounds there are."""
        return sum(len(places) for *_, places in self.sessions)

    def paired(self, slots: Slots) -> PairedRounds | None:
        """The rounds, whose slots are the baseline's and the candidate's of each; None if there are none."""
        if not self.sessions:
            return None
        return PairedRounds.of_slots(slots, np.array([len(places) for *_, places in self.sessions], np.intp))


def _shared_rounds(timings: Iterable[tuple[Timing, Timing]]) -> _SharedRounds:
    found: list[_Session] = []
    left_out = 0
    for baseline, candidate in timings:
        sessions = matched(baseline, candidate)
        left_out += max(len(baseline.slots), len(candidate.slots)) - sum(map(len, sessions))
        found += ((baseline, candidate, places) for places in sessions)
    shared = _SharedRounds(found, left_out, throttled=False)
    sound = [(old, new, _sound(old, new, places)) for old, new, places in found]
    kept = _SharedRounds([session for session in sound if len(session[2])], left_out, throttled=False)
    faulty = shared.count - kept.count
    if faulty > MAX_FAULTY_SHARE * shared.count:
        return replace(shared, throttled=True)
    return replace(kept, left_out=left_out + faulty)


def _interleaved(sessions: Sequence[_Session]) -> Slots:
    """The slots of all sessions, the baseline's and the candidate's of each round."""
    timings = {id(timing): timing for *both, _ in sessions for timing in both}
    begins = dict(zip(timings, accumulate((len(timing.slots) for timing in timings.values()), initial=0), strict=False))
    offsets = np.array([(begins[id(old)], begins[id(new)]) for old, new, _ in sessions], np.intp)
    places = np.concatenate([places for *_, places in sessions])
    chosen = places + np.repeat(offsets, [len(places) for *_, places in sessions], axis=0)
    return chosen_slots(joined_slots([slots_of(timing) for timing in timings.values()]), chosen.ravel())


def _sound(baseline: Timing, candidate: Timing, session: Counts) -> Counts:
    """The rounds of a session in which no side was slowed down."""
    for side, timing in enumerate((baseline, candidate)):
        if faulty := _faulty(timing):
            session = session[[slot not in faulty for slot in session[:, side].tolist()]]
    return session


def _faulty(timing: Timing) -> set[int]:
    """The places of the slots that heat or power delivery slowed down."""
    if not timing.columns.is_set("throttle"):
        return set()
    column = timing.columns.column("throttle")
    # Thousands of slots have few different values.
    if all(FAULTS.isdisjoint(reasons) for reasons in set(column)):
        return set()
    return {slot for slot, reasons in enumerate(column) if not FAULTS.isdisjoint(reasons)}


def is_throttled(timings: Sequence[Timing]) -> bool:
    """More than a fifth of the slots were slowed down by heat or power delivery."""
    slots = sum(len(timing.slots) for timing in timings)
    return sum(len(_faulty(timing)) for timing in timings) > MAX_FAULTY_SHARE * slots


def matched(baseline: Timing, candidate: Timing) -> list[Counts]:
    """Which slots pair, by session: of each round the place of either side's slot in its timing, `[rounds, 2]`.

    If round numbers are unique, they alone decide: a case whose worker died continues in a new session, while the other
    cases stay in the old one.
    """
    old, new = baseline.columns.turns, candidate.columns.turns
    alone = all(len(set(rounds)) == len(rounds) for _, rounds, _ in (old, new))
    if alone and old[:2] == new[:2] and len(set(old[0])) == 1:
        # The usual case: one session, in which both took part in each round.
        places = () if old[2] == new[2] else np.flatnonzero(np.asarray(old[2]) != np.asarray(new[2]))
        return [np.array((places, places)).T] if len(places) else []
    names, partners = (rounds if alone else zip(sessions, rounds, strict=True) for sessions, rounds, _ in (old, new))
    place = {name: at for at, name in enumerate(partners)}
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for at, name in enumerate(names):
        partner = place.get(name)
        if partner is not None and new[2][partner] != old[2][at]:
            found.setdefault((old[0][at], new[0][partner]), []).append((at, partner))
    return [np.array(session, np.intp) for session in found.values()]


def sessions_of(timings: Iterable[Timing]) -> Sessions:
    """The slots of one case by session, in the order in which sessions began; each record adds its own."""
    parts, counts = [], []
    for timing in timings:
        slots, numbers = slots_of(timing), timing.columns.turns[0]
        if len(set(numbers)) > 1:
            _, begins, session = np.unique(numbers, return_index=True, return_inverse=True)
            begun = begins[session]
            slots = chosen_slots(slots, np.argsort(begun, kind="stable"))
            counts += np.unique(begun, return_counts=True)[1].tolist()
        else:
            counts.append(len(numbers))
        parts.append(slots)
    return Sessions(joined_slots(parts), np.array(counts, np.intp))


def slots_of(timing: Timing) -> Slots:
    """The samples of a timing, laid out flat."""
    columns = timing.columns
    return Slots(np.asarray(columns.samples_ns, np.float64), np.asarray(columns.sizes, np.intp))

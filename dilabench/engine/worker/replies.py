"""What the ranks of a group answer, as one answer: times and memory are the largest over ranks, verification is the
first that failed, other fields are rank 0's. No torch.
"""

from collections.abc import Sequence
from typing import Any

from dilabench.engine.worker.protocol import IsolatedResult, Prepared, RankState, Reply
from dilabench.record import Diagnostic, Note, Slot


def out_of_step(states: Sequence[RankState | None]) -> str:
    """The disagreement of ranks on draws and calls, or on the messages of a pair; empty if none.

    Ranks that have not met have no state, and so have those that died.
    """
    known = {rank: state for rank, state in enumerate(states) if state is not None}
    if len({state.shared for state in known.values()}) > 1:
        return "ranks have made other calls or drawn other numbers than each other"
    for sender, its in known.items():
        for receiver, theirs in known.items():
            if sender == receiver or not its.sent or not theirs.received:
                continue
            sent, received = its.sent[receiver], theirs.received[sender]
            if sent != received:
                return (
                    f"rank {sender} has sent {sent[0]} messages of {sent[1]} bytes to rank {receiver}, which has "
                    f"received {received[0]} of {received[1]} bytes"
                )
    return ""


def merged(replies: Sequence[Reply]) -> Reply:
    """All ranks' replies as one; a single one stays as it is."""
    first = replies[0]
    if len(replies) == 1:
        return first
    changes: dict[str, Any] = {"notes": _merged_notes([reply.notes for reply in replies])}
    if first.prepared is not None:
        changes["prepared"] = _slowest([reply.prepared for reply in replies if reply.prepared is not None])
    if first.warmed_up is not None:
        warmed = [reply.warmed_up for reply in replies if reply.warmed_up is not None]
        unusable = [rank_warmed for rank_warmed in warmed if rank_warmed.unusable]
        notes = _merged_notes([rank_warmed.notes for rank_warmed in warmed])
        # A timer that one rank cannot use is used by none.
        changes["warmed_up"] = unusable[0] if unusable else first.warmed_up.model_copy(update={"notes": notes})
    if first.slot is not None:
        slots = [reply.slot for reply in replies if reply.slot is not None]
        changes["slot"] = _slowest_samples(slots)
        changes["counters"] = _largest([reply.counters for reply in replies])
    if first.diagnostics:
        parts = zip(*(reply.diagnostics for reply in replies), strict=True)
        changes["diagnostics"] = tuple(_slowest_diagnostic(part) for part in parts)
    if first.memory is not None:
        changes["memory"] = max(
            (reply.memory for reply in replies if reply.memory is not None), key=lambda memory: memory.peak_bytes
        )
    if first.isolated is not None:
        changes["isolated"] = _merged_isolated([reply.isolated for reply in replies if reply.isolated is not None])
    if first.verification is not None:
        wrong = next((reply for reply in replies if reply.verification and not reply.verification.passed), first)
        rank = replies.index(wrong)
        changes["verification"] = wrong.verification
        changes["why"] = f"rank {rank}: {wrong.why}" if wrong is not first else first.why
    return first.model_copy(update=changes)


def _merged_notes(ranks: Sequence[tuple[Note, ...]]) -> tuple[Note, ...]:
    """One note of each code: the one that observed most, with its rank unless all ranks say the same."""
    by_code: dict[str, dict[int, Note]] = {}
    for rank, notes in enumerate(ranks):
        for note in notes:
            by_code.setdefault(note.code, {}).setdefault(rank, note)
    merged = []
    for noted in by_code.values():
        rank, note = max(noted.items(), key=lambda item: (item[1].observed or 0.0, -item[0]))
        same = len(noted) == len(ranks) and len({rank_note.message for rank_note in noted.values()}) == 1
        merged.append(note if same else note.model_copy(update={"message": f"rank {rank}: {note.message}"}))
    return tuple(merged)


def _merged_isolated(results: Sequence[IsolatedResult]) -> IsolatedResult:
    """An isolated case: times, peak bytes and counters the largest over ranks, verification the first that failed."""
    first = results[0]
    changes: dict[str, Any] = {
        "setup_ns": _largest([result.setup_ns for result in results]),
        "counters": _largest([result.counters for result in results]),
    }
    if slots := [result.slot for result in results if result.slot is not None]:
        changes["slot"] = _slowest_samples(slots)
    if measured := [result.memory for result in results if result.memory is not None]:
        changes["memory"] = max(measured, key=lambda memory: memory.peak_bytes)
    failed = [result for result in results if result.verification is not None and not result.verification.passed]
    if failed:
        changes |= {"verification": failed[0].verification, "why": f"rank {results.index(failed[0])}: {failed[0].why}"}
    return first.model_copy(update=changes)


def _slowest(prepared: Sequence[Prepared]) -> Prepared:
    return Prepared(
        setup_ns=_largest([rank_prepared.setup_ns for rank_prepared in prepared]),
        call_ns=max(rank_prepared.call_ns for rank_prepared in prepared),
    )


def _slowest_samples(slots: Sequence[Slot]) -> Slot:
    throttle = tuple(dict.fromkeys(reason for slot in slots for reason in slot.throttle))
    times = _times([slot.samples_ns for slot in slots])
    enqueue = _longest([slot.enqueue_ns for slot in slots])
    return slots[0].model_copy(update={**times, "enqueue_ns": enqueue, "throttle": throttle})


def _slowest_diagnostic(ranks: Sequence[Diagnostic]) -> Diagnostic:
    return ranks[0].model_copy(update=_times([diagnostic.samples_ns for diagnostic in ranks]))


def _times(ranks: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Sample by sample the slowest rank, because ranks start each one together; and the samples of each rank."""
    return {"samples_ns": _longest(ranks), "rank_samples_ns": tuple(ranks)}


def _longest(ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(column) for column in zip(*ranks, strict=True))


def _largest(several: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for counts in several for name in counts)
    return {name: max(counts.get(name, 0) for counts in several) for name in names}

"""What a report says in words around its tables: the verdict, the rows that have no time, the machine, the command."""

import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

from dilabench.errors import counted
from dilabench.metadata import NOTES, note_text
from dilabench.record import Check, Environment, Failed, FailureCode, Note, RunRecord, Skipped
from dilabench.report.columns import row_name
from dilabench.units import format_bytes

UNVERIFIED: frozenset[FailureCode] = frozenset({"wrong_output", "backend_not_proven"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """Rows that have no time for one reason, named with their workloads. `status` is 'skipped' or 'failed'.

    `code`: what kind of reason it is; `count`: how many rows have it.
    """

    status: str
    code: str
    rows: str
    count: int = 0
    stage: str | None
    why: str
    checks: tuple[str, ...] = ()
    traceback: str | None = None


def headline(record: RunRecord) -> str:
    """How many rows ended how, in one sentence."""
    statuses = Counter(row.outcome.status for row in record.rows)
    wrong = sum(isinstance(row.outcome, Failed) and row.outcome.code in UNVERIFIED for row in record.rows)
    parts = [f"{statuses['measured']} of {counted(len(record.rows), 'row')} verified and measured"]
    if statuses["skipped"]:
        parts.append(f"{statuses['skipped']} skipped")
    late = sum(isinstance(row.outcome, Failed) and row.outcome.code == "verification_timeout" for row in record.rows)
    if statuses["failed"]:
        unproven = [f"{wrong} did not pass verification"] * bool(wrong)
        unproven += [f"{late} could not be verified in time"] * bool(late)
        parts.append(f"{statuses['failed']} FAILED" + (f" ({', '.join(unproven)})" if unproven else ""))
    ended = "" if record.status == "complete" else f" The run was {record.status}; these are the results so far."
    return f"Suite {record.suite} on {device_text(record)}: {', '.join(parts)}.{ended}"


def device_text(record: RunRecord) -> str:
    """The device that did the work, by name."""
    environment = record.environment
    if record.device.startswith("cuda") and environment.gpus:
        names = Counter(gpu.name for gpu in environment.gpus)
        return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())
    return f"{environment.cpu.model} ({environment.cpu.threads} threads)"


def unmeasured(record: RunRecord) -> tuple[Unmeasured, ...]:
    """Failed rows first, then skipped ones; rows that share a reason are gathered."""
    found: dict[Unmeasured, dict[str, list[str]]] = {}
    for row in record.rows:
        if isinstance(row.outcome, Skipped | Failed):
            workloads = found.setdefault(_reason(row.outcome), {}).setdefault(row_name(row), [])
            workloads.append(row.case.workload.label())
    entries = [
        replace(
            reason,
            rows=", ".join(f"{name} ({_gathered(labels)})" for name, labels in names.items()),
            count=sum(map(len, names.values())),
        )
        for reason, names in found.items()
    ]
    return tuple(sorted(entries, key=lambda entry: entry.status != "failed"))


def _reason(outcome: Skipped | Failed) -> Unmeasured:
    """Why there is no time, without the rows."""
    if isinstance(outcome, Skipped):
        return Unmeasured(status="skipped", code=outcome.code, rows="", stage=None, why=outcome.why)
    broken = [check for check in outcome.verification.checks if not check.passed] if outcome.verification else []
    return Unmeasured(
        status="failed",
        code=outcome.code,
        rows="",
        stage=outcome.stage,
        why=outcome.why,
        checks=tuple(check_text(check) for check in broken),
        traceback=outcome.traceback,
    )


def _gathered(labels: Iterable[str]) -> str:
    """Workload labels that differ only in batch and length as one: '1x1K, 1x4K H8 D64 fp32 causal'."""
    sizes: dict[str, list[str]] = {}
    for label in dict.fromkeys(labels):
        size, _, rest = label.partition(" ")
        sizes.setdefault(rest, []).append(size)
    return "; ".join(f"{', '.join(found)} {rest}" for rest, found in sizes.items())


def check_text(check: Check) -> str:
    """A failed check: its error against its tolerance, and where the error is largest."""
    words = []
    if check.error is not None and check.tolerance is not None:
        words.append(f"error {check.error:.3g}, allowed {check.tolerance:.3g}")
    if check.where:
        words.append(f"largest at {check.where}")
    if check.detail:
        words.append(check.detail)
    return f"{check.name}: {'; '.join(words) or 'failed'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteGroup:
    """The notes of one kind: what the kind means, the texts of all of its rows, and what to do.

    `brief`: one line for all of them. `severe`: the times of these rows cannot be true.
    """

    kind: str
    meaning: str
    texts: tuple[str, ...]
    hint: str | None
    severe: bool

    @property
    def brief(self) -> str:
        """The note itself where it is alone, else what the kind means and the number of rows."""
        if len(self.texts) == 1:
            return self.texts[0]
        return f"{self.kind} ({len(self.texts)} rows): {self.meaning}" + (f"; {self.hint}" if self.hint else "")


def note_groups(record: RunRecord) -> tuple[NoteGroup, ...]:
    """The warnings on measured rows by kind, the severe ones first, then by number."""
    found: dict[str, list[tuple[Note, str]]] = {}
    for row in record.rows:
        for note in getattr(row.outcome, "notes", ()):
            text = f"{row_name(row)}, {row.case.workload.label()}: {note_text(note)}"
            found.setdefault(note.code, []).append((note, text))
    groups = [
        NoteGroup(
            kind=code.replace("_", "-"),
            meaning=NOTES[code].meaning if code in NOTES else notes[0][0].message,
            texts=tuple(text for _, text in notes),
            hint=hints.pop() if len(hints := {note.hint for note, _ in notes}) == 1 else None,
            severe=code in NOTES and NOTES[code].disqualifies,
        )
        for code, notes in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (not group.severe, -len(group.texts))))


def environment_rows(record: RunRecord) -> tuple[tuple[str, str], ...]:
    """The machine and the versions, as (what, value)."""
    environment = record.environment
    rows = [
        ("device", record.device),
        ("CPU", _cpu_text(environment)),
        *(("GPU", _join(gpu.name, gpu.memory_bytes and format_bytes(gpu.memory_bytes))) for gpu in environment.gpus),
        ("driver", next((gpu.driver for gpu in environment.gpus if gpu.driver), None)),
        ("system", environment.os + (", in a container" if environment.container else "")),
        ("Python", environment.python),
        ("packages", ", ".join(f"{name} {version}" for name, version in environment.packages.items())),
        ("torch settings", ", ".join(f"{name}={value}" for name, value in environment.torch.items())),
        ("plug-ins", ", ".join(" ".join(filter(None, (plugin.name, plugin.version))) for plugin in record.plugins)),
        ("git", environment.git and environment.git.sha + (" with local changes" if environment.git.dirty else "")),
        ("seed", str(record.seed)),
        ("started", record.started_at),
        ("finished", record.finished_at),
    ]
    return tuple((what, value) for what, value in rows if value)


def reproduce_command(record: RunRecord) -> str:
    """The command line that made the record."""
    if not record.argv:
        return shlex.join(["dilabench", "run", record.suite, "--seed", str(record.seed)])
    program, *arguments = record.argv
    if PurePath(program).name in {"dilabench", "__main__.py"}:
        return shlex.join(["dilabench", *arguments])
    return shlex.join(["dilabench", *record.argv])


def _cpu_text(environment: Environment) -> str:
    cpu = environment.cpu
    memory = format_bytes(cpu.memory_bytes) if cpu.memory_bytes else None
    return _join(cpu.model, f"{cpu.cores} cores", f"{cpu.threads} threads", memory)


def _join(*parts: str | int | None) -> str:
    return ", ".join(str(part) for part in parts if part)

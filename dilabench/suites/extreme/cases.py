"""Suite `extreme`: the longest sequence, by real runs: doubled until one does not fit, then bisected; on a GPU
predictions choose the first lengths."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilabench.machine import device_named, memory_bytes
from dilabench.metadata import WAY
from dilabench.patterns.dense import DENSE
from dilabench.plugins.builtin.suites import ExtremeOptions
from dilabench.plugins.descriptors import Implementation
from dilabench.record import Case, Measured, PlannedCase, Role, Row, Skipped
from dilabench.request import RunRequest
from dilabench.suites.extreme.foresight import Foresight, between
from dilabench.suites.planner import Planner
from dilabench.validation import validated
from dilabench.workload.cuts import cut_length, why_uncut
from dilabench.workload.last_length import last_length
from dilabench.workload.spec import WorkloadRequest

MODES = ("forward", "both")
FIRST_LENGTH = 2**13
SHORTEST = 2**8
# A search ends when the shortest length that did not fit is within this part of the longest that did.
RESOLUTION = 32
# The memory of a process on a CPU is predicted less precisely than on a GPU, so a leap leaves a large margin.
SHARE_ON_CPU = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to reach longer sequences, with its label: fields of Optimizations that are switched on for a row."""

    label: str
    changes: dict[str, Any]
    chunked: bool = False


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The first length of every implementation, mode and way; the next ones depend on its outcome."""
    return first_lengths(request, planner, {}, lambda asked: planner.on_one_device(DENSE.kind, asked.pattern))


def first_lengths(
    request: RunRequest,
    planner: Planner,
    shape: Mapping[str, Any],
    default: Callable[[WorkloadRequest], Iterable[str]],
) -> tuple[PlannedCase, ...]:
    """The first length of every implementation, mode and way, on workloads of the shape.

    `default` names the implementations for a workload if the request names none.
    """
    shape = {"batch_size": 1, **shape, "seq_len": min(FIRST_LENGTH, options_of(request).max_seq_length)}
    planned: list[PlannedCase] = []
    for asked in planner.workload_requests([shape]):
        modes = [asked.mode] if "mode" in asked.model_fields_set else MODES
        implementations = planner.implementations(default(asked))
        for implementation in implementations:
            reference = planner.reference_for(implementation, asked, implementations)
            role: Role | None = "yardstick" if reference and request.names_pattern else None
            for mode in modes:
                for way in ways(request):
                    first = _first_length((reference or asked).model_copy(update={"mode": mode}), way, planner)
                    planned += _probe(planner, implementation, first, way, role)
    return tuple(planned)


def _first_length(asked: WorkloadRequest, way: Way, planner: Planner) -> WorkloadRequest:
    """The first length; for chunks, one that can be cut."""
    if not way.chunked:
        return asked
    workload = asked.resolve(planner.machine.auto_dtype)
    cut = cut_length(workload.replace(seq_len=last_length(workload)))
    return asked if cut is None else asked.model_copy(update={"seq_len": max(asked.seq_len, 2 * cut)})


def ways(request: RunRequest) -> tuple[Way, ...]:
    """The unmodified case, and the other ways that the request switches on; each gets separate rows."""
    options, requested = options_of(request), [Way(label="as it is", changes={})]
    if options.gradient_checkpointing:
        requested.append(Way(label="gradient checkpointing", changes={"gradient_checkpointing": True}))
    if options.chunked:
        requested.append(Way(label="chunked queries", changes={}, chunked=True))
    if options.offload:
        requested.append(
            Way(label="chunked queries, inputs on the host", changes={"offload_inputs": True}, chunked=True)
        )
    return tuple(requested)


def follow_up(rows: Sequence[Row], request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The next length of every search that is not over."""
    planned: list[PlannedCase] = []
    for search in searches(rows):
        length = search.next_length(search.last_length(request))
        if length is not None:
            planned += search.at(_foreseen(search, length, planner, request), planner, request)
    return tuple(planned)


@dataclass(frozen=True, slots=True)
class Search:
    """The rows of one implementation, backend, mode and way."""

    rows: tuple[Row, ...]

    @property
    def fitting(self) -> tuple[Row, ...]:
        """Rows that ran and passed verification."""
        return tuple(row for row in self.rows if isinstance(row.outcome, Measured))

    @property
    def longest(self) -> int:
        """The longest length that ran, 0 when none did."""
        return max((row.case.workload.seq_len for row in self.fitting), default=0)

    @property
    def too_long(self) -> int | None:
        """The shortest length for which memory ran out."""
        return min((row.case.workload.seq_len for row in self.rows if did_not_fit(row)), default=None)

    @property
    def interrupted(self) -> Row | None:
        """A row that ended for another reason (wrong, out of time, not supported), which ends the search."""
        return next((row for row in self.rows if row not in self.fitting and not did_not_fit(row)), None)

    def last_length(self, request: RunRequest) -> int:
        """The longest requested length that the pattern supports."""
        return min(options_of(request).max_seq_length, last_length(self.rows[0].case.workload))

    def next_length(self, longest_wanted: int) -> int | None:
        """The next length to try; None if the search is over.

        Lengths are doubled until one does not fit, and halved while none does; then the gap is halved, in steps of a
        power of two that is `RESOLUTION` times smaller than the length.
        """
        low, high = self.longest, self.too_long
        if self.interrupted is not None:
            return None
        if high is None:
            return None if low >= longest_wanted else min(2 * low, longest_wanted)
        if low == 0:
            return high // 2 if high // 2 >= SHORTEST else None
        return between(low, high, self.step(low))

    @staticmethod
    def step(length: int) -> int:
        """The step of the bisection."""
        return max(1, 1 << max(0, length.bit_length() - 1 - (RESOLUTION.bit_length() - 1)))

    def at(self, length: int, planner: Planner, request: RunRequest) -> tuple[PlannedCase, ...]:
        """The same case at another length."""
        row = self.rows[0]
        asked = row.planned.requested_workload
        assert asked is not None
        implementation = planner.catalogue.implementations.get(row.case.implementation)
        way = next(way for way in ways(request) if way.label == WAY.of(row.planned))
        longer = asked.model_copy(update={"seq_len": length})
        planned = _probe(planner, implementation, longer, way, row.planned.role)
        return tuple(plan for plan in planned if plan.case.backend == row.case.backend)


def _foreseen(search: Search, length: int, planner: Planner, request: RunRequest) -> int:
    """The length to try instead, if predictions improve on doubling and halving."""
    machine, longest = planner.machine, search.last_length(request)
    available = options_of(request).memory_limit or memory_bytes(machine)
    if available is None or search.longest == 0:
        return length

    def cases_at(tokens: int) -> list[Case]:
        return [plan.case for plan in search.at(tokens, planner, request) if plan.skip is None]

    share = 1 if machine.facts.own_memory else SHARE_ON_CPU
    foresight = Foresight(cases_at, machine, planner.catalogue, int(available * share), search.step)
    if not machine.facts.own_memory:
        return length if search.too_long else foresight.leap(length, longest)
    too_long = [row.case.workload.seq_len for row in search.rows if did_not_fit(row)]
    if not foresight.agrees([row.case.workload.seq_len for row in search.fitting], too_long):
        return length
    return foresight.better(search.longest, search.too_long, longest, length)


def searches(rows: Sequence[Row]) -> tuple[Search, ...]:
    """The rows by search, the rows of this suite first.

    A row of another suite counts if it is the same case, because a case runs once.
    """
    by_search: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: WAY.of(row.planned) is None):
        key = _search_key(row.case)
        if WAY.of(row.planned) is not None or key in by_search:
            by_search.setdefault(key, []).append(row)
    return tuple(Search(tuple(members)) for members in by_search.values())


def _search_key(case: Case) -> str:
    workload = case.workload.model_dump_json(exclude={"seq_len"})
    chunked = str(case.optimizations.query_chunk > 0)
    return "|".join(
        [case.model_dump_json(exclude={"workload": True, "optimizations": {"query_chunk"}}), workload, chunked]
    )


def _probe(
    planner: Planner, implementation: Implementation, asked: WorkloadRequest, way: Way, role: Role | None
) -> Iterator[PlannedCase]:
    """The case of one length, isolated; with a reason to skip it if the way does not apply."""
    limit_bytes = options_of(planner.request).memory_limit
    workload = asked.resolve(planner.machine.auto_dtype)
    cut = cut_length(workload)
    changes = {**way.changes, **({"query_chunk": cut or 0} if way.chunked else {})}
    for planned in planner.plan(implementation, asked, WAY.entry(way.label), role, **changes):
        skip = planned.skip or _skip(planned, implementation, way, planner.machine.device)
        yield planned.isolated(limit_bytes).model_copy(update={"skip": skip})


def did_not_fit(row: Row) -> bool:
    """Return True if memory ran out in a real run."""
    return isinstance(row.outcome, Skipped) and row.outcome.code == "out_of_memory"


def _skip(planned: PlannedCase, implementation: Implementation, way: Way, device: str) -> Skipped | None:
    workload = planned.case.workload
    if implementation.takes != "heads":
        why = f"extreme searches attention on heads; {implementation.name} takes {implementation.takes}"
        return Skipped(code="unsupported", why=why)
    if way.changes.get("gradient_checkpointing") and workload.mode == "forward":
        return Skipped(code="not_applicable", why="gradient checkpointing has no effect on a forward pass")
    if way.changes.get("offload_inputs") and not device_named(device).own_memory:
        return Skipped(code="not_applicable", why="inputs are in host memory already")
    if way.chunked and cut_length(workload) is None:
        return Skipped(code="unsupported", why=why_uncut(workload))
    return None


def options_of(request: RunRequest) -> ExtremeOptions:
    """The options of the search from the request, with defaults for missing ones."""
    return validated(ExtremeOptions, request.options)

"""Suite `choice`: random shapes: the library's automatic choice against every other implementation of dilabench."""

from collections.abc import Iterator, Mapping, Sequence

from dilabench.errors import ConfigError
from dilabench.metadata import SHAPE
from dilabench.plugins.builtin.suites import ChoiceOptions
from dilabench.plugins.descriptors import Implementation
from dilabench.record import Case, PlannedCase, Row, Skipped
from dilabench.request import RunRequest, Shard
from dilabench.suites.choice.shapes import shape
from dilabench.suites.planner import Planner
from dilabench.units import counted
from dilabench.validation import validated
from dilabench.workload.spec import WorkloadRequest


def shapes_asked(options: Mapping[str, object], shard: Shard | None) -> range:
    """The numbers of the shapes of a request or its shard. Raises ConfigError for options that are no count, and for
    more shards than shapes.
    """
    count = validated(ChoiceOptions, options).shapes
    index, shards = shard or (1, 1)
    if shards > count:
        raise ConfigError(
            f"shard {index}/{shards}: the request has {counted(count, 'shape')}, so there can be at most as many shards"
        )
    return range(index, count + 1, shards)


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The first shape of the request or shard. The others follow one by one, while the time budget lasts.

    Given workload fields are the same in all shapes; the others are drawn.
    """
    if request.presets or request.lengths:
        raise ConfigError(
            f"suite {request.suite!r} draws its workloads, so it takes neither presets nor --lengths; give the fields "
            "that should be the same in all of them, for example --set num_heads=8"
        )
    return _cases_of(shapes_asked(request.options, request.shard)[0], request, planner)


def follow_up(rows: Sequence[Row], request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The next shape, unless the budget cut the latest; and, after a resume, the cases missing from the latest."""
    drawn = [number for row in rows if (number := SHAPE.of(row.planned)) is not None]
    latest = max(drawn, default=0)
    if not latest or any(cut_short(row) for row in rows if SHAPE.of(row.planned) == latest):
        return ()
    asked = shapes_asked(request.options, request.shard)
    following = latest + asked.step
    cases = _cases_of(latest, request, planner)
    return (*cases, *_cases_of(following, request, planner)) if following in asked else cases


def cut_short(row: Row) -> bool:
    """Return True if the budget ended before the row could be measured."""
    return isinstance(row.outcome, Skipped) and row.outcome.code == "budget"


def _cases_of(number: int, request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every implementation that supports the shape here and is worth trying, over every backend that may be chosen, and
    the library's choice.
    """
    planner = planner.asking(nproc=1)
    asked = shape(planner.catalogue, planner.machine, request.seed, number, request.overrides)
    backends = planner.catalogue.preferred_backends(planner.machine)
    over = planner.asking(backends=request.backends or backends)
    named = planner.implementations(planner.on_one_device(asked.pattern))
    labels = SHAPE.entry(number)

    def is_tried(case: Case) -> bool:
        # A named backend is always tried.
        case = case.model_copy(update={"backend": None}) if request.backends else case
        return not planner.catalogue.reasons_untried(case, planner.machine)

    cases = [
        *(
            planned
            for implementation in named
            for planned in over.plan(implementation, asked, labels)
            if planned.skip is None and is_tried(planned.case)
        ),
        # Not the first: the first calls of a process are slow, and slots are sized by the estimated time of a call.
        *(case for implementation in _choosing(planner, asked) for case in planner.plan(implementation, asked, labels)),
    ]
    return tuple({planned_case.case.case_id: planned_case for planned_case in cases}.values())


def _choosing(planner: Planner, asked: WorkloadRequest) -> Iterator[Implementation]:
    """The implementations that choose for this pattern. Raises ConfigError if there is none."""
    choosing = [
        implementation
        for implementation in planner.catalogue.implementations
        if implementation.chooses
        and implementation.supports.max_world_size == 1
        and implementation.supports.computes(asked.pattern)
    ]
    if not choosing:
        raise ConfigError(f"the library has no choice for pattern {asked.pattern!r}; leave it out")
    yield from choosing

"""Suite `choice`: random shapes, one after another: what the library takes by itself beside every other way of ours."""

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
    """The numbers of the shapes that a request wants, or a shard of it. Raises ConfigError for options that are no
    count, and for more shards than shapes.
    """
    count = validated(ChoiceOptions, options).shapes
    index, shards = shard or (1, 1)
    if shards > count:
        raise ConfigError(
            f"shard {index}/{shards}: the request has {counted(count, 'shape')}, so there can be at most as many shards"
        )
    return range(index, count + 1, shards)


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The first shape, of a shard's own. The others follow one by one, so that each gets the time it needs for as long
    as there is any.

    Workload fields that are given are the same in all shapes; the others are drawn.
    """
    if request.presets or request.lengths:
        raise ConfigError(
            f"suite {request.suite!r} draws its workloads, so it takes neither presets nor --lengths; give the fields "
            "that should be the same in all of them, for example --set num_heads=8"
        )
    return _cases_of(shapes_asked(request.options, request.shard)[0], request, planner)


def follow_up(rows: Sequence[Row], request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The next shape, unless the latest had no time; and of the latest what a run that goes on has not measured yet."""
    drawn = [number for row in rows if (number := SHAPE.of(row.planned)) is not None]
    latest = max(drawn, default=0)
    if not latest or any(cut_short(row) for row in rows if SHAPE.of(row.planned) == latest):
        return ()
    asked = shapes_asked(request.options, request.shard)
    following = latest + asked.step
    cases = _cases_of(latest, request, planner)
    return (*cases, *_cases_of(following, request, planner)) if following in asked else cases


def cut_short(row: Row) -> bool:
    """Whether the budget ended before the row could be measured."""
    return isinstance(row.outcome, Skipped) and row.outcome.code == "budget"


def _cases_of(number: int, request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every way that can compute the shape here and is worth a try, over every backend that may be chosen, and the
    library's choice.
    """
    planner = planner.asking(nproc=1)
    asked = shape(planner.catalogue, planner.machine, request.seed, number, request.overrides)
    backends = planner.catalogue.preferred_backends(planner.machine)
    over = planner.asking(backends=request.backends or backends)
    named = planner.implementations(planner.on_one_device(asked.pattern))
    labels = SHAPE.entry(number)

    def is_tried(case: Case) -> bool:
        # A backend that is named is worth a try.
        case = case.model_copy(update={"backend": None}) if request.backends else case
        return not planner.catalogue.reasons_untried(case, planner.machine)

    cases = [
        *(
            planned
            for one in named
            for planned in over.plan(one, asked, labels)
            if planned.skip is None and is_tried(planned.case)
        ),
        # Not the first: the first calls of a process take long, and turns are cut to what a call seems to take.
        *(case for one in _choosing(planner, asked) for case in planner.plan(one, asked, labels)),
    ]
    return tuple({one.case.case_id: one for one in cases}.values())


def _choosing(planner: Planner, asked: WorkloadRequest) -> Iterator[Implementation]:
    """What chooses for such a pattern. Raises ConfigError where nothing does."""
    found = [one for one in planner.catalogue.implementations if one.chooses and one.supports.computes(asked.pattern)]
    if not found:
        raise ConfigError(f"nothing in the library chooses for pattern {asked.pattern!r}; leave it out")
    yield from found

"""Suite `block-sparse`: how time and memory fall with the share of computed pairs, and when skipping pays."""

from typing import Any

from dilabench.metadata import STEPS, STEPS_OF
from dilabench.patterns.registry import known_kinds, pattern_type, request_fields
from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.workload.spec import WorkloadRequest

SHAPE = {
    "small": {"batch_size": 1, "seq_len": 8192, "num_heads": 4, "head_dim": 64},
    "large": {"batch_size": 1, "seq_len": 32768, "num_heads": 16, "head_dim": 128},
}


def expand(_request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Plan every density of one shape, pattern by pattern.

    The unranked reference is full attention through a flash kernel. Without a pattern, or a field of one, in the
    request: all that define densities (`Pattern.densities`), block masks first. A named density, block size or mask
    file is the only one. Shapes with branches get the mask over each branch's rows. With `--nproc` rows over ranks are
    measured in addition to rows of one device.
    """
    implementations = planner.implementations(planner.where(_sparse_or_full))
    cases: list[PlannedCase] = []
    for base in planner.workload_requests([SHAPE[planner.machine.facts.size]]):
        points = [point for kind in _kinds(base) for point in _points(base, kind)]
        for implementation in implementations:
            on_one = implementation.supports.max_world_size == 1
            there = planner.asking(nproc=1) if on_one else planner
            swept = base.model_copy(update={"pattern": points[0].pattern})
            if reference := planner.reference_for(implementation, swept, implementations):
                cases += there.plan(implementation, reference, role="yardstick")
                continue
            fitting = [point for point in points if implementation.supports.computes(point.pattern)]
            if planner.request.implementations:
                # A named implementation that supports none of them gets a skipped row at each.
                fitting = fitting or points
            labels = STEPS.entry(" ".join(implementation.every_call))
            labels |= STEPS_OF.entry(implementation.steps_of or implementation.name)
            for point in fitting:
                cases += there.plan(implementation, point, labels=labels)
    return tuple(cases)


def _swept() -> tuple[str, ...]:
    """Kinds of pattern that define densities."""
    return tuple(kind for kind in known_kinds() if pattern_type(kind).densities(1))


def _sparse_or_full(implementation: Implementation) -> bool:
    """Return True for methods that compute such patterns on any number of ranks, and for full attention on one device.

    Full attention under a mask takes the same time at every density and is included only if named.
    """
    full = implementation.supports.only_dense and implementation.supports.max_world_size == 1
    return implementation.takes == "heads" and (
        full or (implementation.role == "method" and bool(implementation.supports.patterns & {*_swept()}))
    )


def _kinds(base: WorkloadRequest) -> tuple[str, ...]:
    """The named pattern; if only fields of patterns are named, the first one that has them; else all."""
    named, swept = base.model_fields_set, _swept()
    if "pattern" in named and base.pattern in swept:
        return (base.pattern,)
    fields = named & request_fields()
    if "pattern" not in named and not fields:
        return swept
    taking = (kind for kind in swept if fields <= pattern_type(kind).request_model().model_fields.keys())
    return (next(taking, swept[0]),)


def _points(base: WorkloadRequest, kind: str) -> list[WorkloadRequest]:
    """The request with every density of a kind, except the fields that it sets."""
    asked, pattern = base.model_copy(update={"pattern": kind}), pattern_type(kind)
    named = base.model_fields_set
    if named & pattern.given_whole_by:
        return [asked]
    points: dict[tuple[tuple[str, Any], ...], None] = {}
    for point in pattern.densities(base.seq_len):
        points.setdefault(tuple((name, value) for name, value in point.items() if name not in named))
    # If the request sets every field in which densities differ, it is the only point.
    return [asked] if len(points) == 1 else [asked.model_copy(update=dict(point)) for point in points]

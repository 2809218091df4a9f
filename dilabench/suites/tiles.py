"""Suite `tiles`: other tile shapes of an implementation's kernels against its own, on one workload, fastest first."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from dilabench.choice.descriptors import load_target
from dilabench.errors import ConfigError
from dilabench.metadata import VARIANT
from dilabench.plugins.builtin.suites import TilesOptions
from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase, RunRecord
from dilabench.report.findings import Section
from dilabench.request import RunRequest
from dilabench.suites.optimization import NONE, Gain, gains_of
from dilabench.suites.planner import Planner
from dilabench.units import format_ratio
from dilabench.validation import validated
from dilabench.workload.spec import DTYPE_BYTES, Workload

# The workload on which the shapes that `fused` ships were chosen.
SHAPE: dict[str, Any] = {"batch_size": 1, "seq_len": 131072, "num_heads": 16, "head_dim": 64}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Each implementation with its default tiles, and with each tile shape that is worth trying, or named.

    All are verified, and timed in the same rounds. A shape that does not compile or fit gives a failed row.
    """
    named = validated(TilesOptions, request.options).tiles
    cases: list[PlannedCase] = []
    for asked in planner.workload_requests([SHAPE]):
        workload = asked.resolve(planner.machine.auto_dtype)
        for implementation in planner.implementations(planner.where(_is_tried_unasked)):
            if implementation.tiles is None:
                raise ConfigError(f"{implementation.name} has no tile shapes to try; leave -i out for those that have")
            tried = named or _worth_trying(implementation.tiles, workload)
            cases += planner.plan(implementation, asked, VARIANT.entry(NONE))
            for tiles in tried:
                cases += planner.plan(implementation, asked, VARIANT.entry(tiles), tiles=tiles)
    return tuple(cases)


def _is_tried_unasked(implementation: Implementation) -> bool:
    return implementation.tiles is not None and not implementation.compiles


def _worth_trying(target: str, workload: Workload) -> tuple[str, ...]:
    candidates: Callable[[int, int, bool], tuple[str, ...]] = load_target(target)
    return candidates(workload.head_dim, DTYPE_BYTES[workload.dtype], workload.mode != "forward")


COLUMNS = ("implementation", "tiles", "speed-up", "95 % CI", "verdict")


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """A table for each workload; empty if no shape was measured besides the default."""
    return tuple(_sections(gains_of(record)))


def _sections(gains: Sequence[Gain]) -> Iterator[Section]:
    def place(gain: Gain) -> str:
        workload = gain.row.case.workload
        return f"{workload.mode}, {workload.label()}"

    for title, group in groupby(sorted(gains, key=place), key=place):
        ranked = sorted(group, key=lambda gain: -gain.speedup)
        best = ranked[0]
        yield Section(
            title=f"Tile shapes, {title}",
            sentence=f"Of {len(ranked)} tile shapes {best.variant} is fastest: {format_ratio(best.speedup)}.",
            columns=COLUMNS,
            rows=tuple(tuple(_row(gain)) for gain in ranked),
            numeric=frozenset({"speed-up", "95 % CI"}),
        )


def _row(gain: Gain) -> Iterator[str]:
    yield gain.row.case.implementation
    yield gain.variant
    yield format_ratio(gain.speedup)
    yield gain.interval_text
    yield gain.verdict_text

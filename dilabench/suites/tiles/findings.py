"""Suite `tiles`: each tile shape against the one that the implementation has, fastest first."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from dilabench.record import RunRecord
from dilabench.report import figures
from dilabench.report.findings import Section
from dilabench.suites.optimization.findings import Gain, gains_of

COLUMNS = ("implementation", "tiles", "speed-up", "95 % CI", "verdict")


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """A table for each workload; nothing where no shape was measured beside the implementation's own."""
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
            sentence=f"Of {len(ranked)} tile shapes {best.variant} is fastest: {figures.ratio(best.speedup)}.",
            columns=COLUMNS,
            rows=tuple(tuple(_row(gain)) for gain in ranked),
            numeric=frozenset({"speed-up", "95 % CI"}),
        )


def _row(gain: Gain) -> Iterator[str]:
    yield gain.row.case.implementation
    yield gain.variant
    yield figures.ratio(gain.speedup)
    yield gain.interval_text
    yield gain.verdict_text

"""What a suite says about a record beside its tables: sentences, figures and plots, as plain data.

A suite names its `analysis`, a function `analyse(record) -> Sequence[Section]`. It is called whenever a record
is rendered, works on the raw samples, and its result is not stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dilabench.plugins.catalogue import Catalogue, load_target
from dilabench.plugins.descriptors import Reporter
from dilabench.record import RunRecord


@dataclass(frozen=True, slots=True)
class Point:
    """A value over x, with its interval where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one kind, by rising x. `fitted` marks a model beside measured points; it has their label."""

    label: str
    points: tuple[Point, ...]
    fitted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePlot:
    """Curves over sequence length in tokens; both axes are logarithmic. `name` is the stem of its files."""

    name: str
    title: str
    y_label: str
    curves: tuple[Curve, ...]
    x_label: str = "sequence length (tokens)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A value per category, None where there is none; `low` and `high` are ends of intervals, in the same order."""

    label: str
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPlot:
    """Groups of horizontal bars. With `reference`, bars begin there: what lies left of it is a loss.

    `log` puts the values on a logarithmic axis.
    """

    name: str
    title: str
    value_label: str
    categories: tuple[str, ...]
    bars: tuple[Bars, ...]
    reference: float | None = None
    log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPlot:
    """A picture of a block mask of `blocks` blocks a side.

    `cells` are lines of the share that is computed, from the first queries down and the first keys on, None where the
    causal mask hides everything: one cell per block, or fewer.
    """

    name: str
    title: str
    blocks: int
    block_size: int
    cells: tuple[tuple[float | None, ...], ...]


Plot = CurvePlot | BarPlot | MaskPlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One finding: the sentence that a reader needs, the figures behind it, and plots.

    `rows` hold a text per column; columns in `numeric` are set to the right.
    """

    title: str
    sentence: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    numeric: frozenset[str] = frozenset()
    plots: tuple[Plot, ...] = ()


# Analyses of what any suite's record may hold.
FOR_EVERY_SUITE = ("dilabench.suites.findings.masks:analyse",)


def sections_of(record: RunRecord, catalogue: Catalogue) -> tuple[Section, ...]:
    """What the record's suite has to say about it, if it is installed and says anything, and what any record shows."""
    if not record.rows:
        return ()
    found: list[Section] = []
    suite = catalogue.suites.get(record.suite) if record.suite in catalogue.suites else None
    if suite and suite.analysis:
        analyse = load_target(suite.analysis)
        found += analyse(record, catalogue) if suite.reads_catalogue else analyse(record)
    for target in FOR_EVERY_SUITE:
        found += load_target(target)(record)
    return tuple(found)


def render(reporter: Reporter, record: RunRecord, folder: Path | None, sections: Sequence[Section]) -> str | None:
    """Have a reporter render the record, with its sections where the reporter shows such."""
    target = load_target(reporter.target)
    text: str | None = target(record, folder, sections) if reporter.shows_sections else target(record, folder)
    return text

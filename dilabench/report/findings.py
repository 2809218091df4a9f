"""The findings of a suite on a record: sentences, figures and plots, as plain data.

A suite names its `analysis`, a function `analyse(record) -> Sequence[Section]`. It is called whenever a record
is rendered, works on the raw samples, and its result is not stored.
"""

import copy
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dilabench.choice.descriptors import load_target
from dilabench.errors import ConfigError, PluginError
from dilabench.plugins.axis import LENGTH, Axis
from dilabench.plugins.boundary import answered, guarded, shown
from dilabench.plugins.catalogue import BUILTIN, OWN, Catalogue
from dilabench.plugins.descriptors import Reporter
from dilabench.record import Measured, RunRecord, Timing
from dilabench.units import printable

INTERVALS = ", with 95 % intervals"
RANGES = "; with few rounds the whole range"


class _Checked:
    """A dataclass whose instances, too, are validated by a TypeAdapter, field by field."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(revalidate_instances="always")


@dataclass(frozen=True, slots=True)
class Point(_Checked):
    """A value over x, with its interval if known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(_Checked):
    """Points of one kind, by ascending x. `fitted` marks a model of measured points, which has their label."""

    label: str
    points: tuple[Point, ...]
    fitted: bool = False


@dataclass(frozen=True, slots=True)
class Span(_Checked):
    """A range of x, from its first to its last point, in which another quantity has the value `text`."""

    first: float
    last: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePlot(_Checked):
    """Curves over sequence length in tokens; both axes are logarithmic. `name` is the stem of its files.

    `spans`: ranges of x with equal values of `span_label`, ascending; empty if it does not change. `ranges`: some
    whiskers are the whole range, because rounds are too few for an interval.
    """

    name: str
    title: str
    y_label: str
    curves: tuple[Curve, ...]
    x_label: str = "sequence length (tokens)"
    spans: tuple[Span, ...] = ()
    span_label: str = "batch"
    ranges: bool = False

    @property
    def caption(self) -> str:
        """The title, with the meaning of the whiskers, if any."""
        whiskers = any(point.low is not None for curve in self.curves for point in curve.points)
        return self.title + INTERVALS * whiskers + RANGES * (whiskers and self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(_Checked):
    """A value per category, None if there is none; `low` and `high` are ends of intervals, in the same order."""

    label: str
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPlot(_Checked):
    """Groups of horizontal bars. With `reference`, bars begin there: a bar to the left is a loss. `stacked`: bars of a
    group are parts of one, each of which begins where the one before ends.

    Their axis is linear: the lengths of bars on a logarithmic one would mean nothing.
    """

    name: str
    title: str
    value_label: str
    categories: tuple[str, ...]
    bars: tuple[Bars, ...]
    reference: float | None = None
    stacked: bool = False

    @property
    def caption(self) -> str:
        """The title, with the meaning of the whiskers, if any."""
        return self.title + INTERVALS * any(low is not None for bars in self.bars for low in bars.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPlot(_Checked):
    """A picture of a block mask of `blocks` blocks a side.

    `cells` are lines of the share that is computed, from the first queries down and the first keys on, None if the
    causal mask hides everything: one cell per block, or fewer.
    """

    name: str
    title: str
    blocks: int
    block_size: int
    cells: tuple[tuple[float | None, ...], ...]

    @property
    def caption(self) -> str:
        """The title."""
        return self.title


Plot = CurvePlot | BarPlot | MaskPlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(_Checked):
    """One finding: the sentence that a reader needs, the figures behind it, and plots.

    Each line of `sentence` stays a line in every report; the first one should say it all.
    `rows` hold a text per column; columns in `numeric` are aligned to the right. `answers`: it is the answer to the
    suite's question, which begins and ends a report; without one, the fastest along the suite's axis is the answer.
    `headed`: the first column is the heading of the rows below it (`tables`). `spare`: columns that a narrow terminal
    may omit, the first one first.
    """

    title: str
    sentence: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    numeric: frozenset[str] = frozenset()
    plots: tuple[Plot, ...] = ()
    answers: bool = False
    headed: bool = False
    spare: tuple[str, ...] = ()

    def tables(self) -> Iterator[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]]:
        """Heading, columns and rows of each table: one below each heading, or a single one without."""
        if not self.headed:
            yield "", self.columns, self.rows
            return
        by_heading: dict[str, list[tuple[str, ...]]] = {}
        for heading, *cells in self.rows:
            by_heading.setdefault(heading, []).append(tuple(cells))
        for heading, rows in by_heading.items():
            yield heading, self.columns[1:], tuple(rows)


# How JSON writes control characters; a backslash before such a letter looks the same, and only costs time.
_ESCAPED = re.compile(r"\\[bfru]")

# Analyses of what any suite's record may hold.
FOR_EVERY_SUITE = ("dilabench.report.findings:_pictures_of",)
# Above this, a cell of a picture represents several blocks.
MAX_CELLS = 256


def sections_of(record: RunRecord, catalogue: Catalogue, *, plots: bool = True) -> tuple[Section, ...]:
    """The answer, what else the record's suite has to say if it is installed, and what any record shows.

    An analysis that fails is named in a section instead, and among the catalogue's problems. Without `plots`, an
    analysis that finds plots alone is skipped.
    """
    if not record.rows:
        return ()
    analyses: list[tuple[str, str, tuple[Any, ...]]] = []
    suite = catalogue.suites.get(record.suite) if record.suite in catalogue.suites else None
    if suite and suite.analysis and (plots or not suite.only_plots):
        plugin = catalogue.suites.origin(suite.name)
        facts = _facts_for(plugin, record), *((catalogue,) if suite.reads_catalogue else ())
        analyses.append((plugin, suite.analysis, facts))
    analyses += [("builtin", target, (record,)) for target in FOR_EVERY_SUITE]
    found: list[Section] = []
    for plugin, target, facts in analyses:
        try:
            with guarded(plugin, f"analysis {target}"):
                found += _checked(target, load_target(target)(*facts))
        except (PluginError, ConfigError) as error:
            # If an analysis refuses a record, other findings on it remain.
            blamed = error if isinstance(error, PluginError) else PluginError(str(error), plugin)
            catalogue.blame(blamed)
            found.append(Section(title="Analysis failed", sentence=printable(str(blamed))))
    if not any(section.answers for section in found):
        found.append(answer_section(record, suite.axis if suite else LENGTH))
    # Texts of a record or plug-in may hold control characters.
    ordered = sorted(found, key=lambda section: not section.answers)
    return tuple(with_texts(section, printable) for section in ordered)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a section, or a part of one, with each of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: with_texts(getattr(value, field.name), change) for field in fields(value)}
        return replace(value, **changed)
    # The cells of a picture and the points of a curve are numbers, and many.
    if isinstance(value, tuple) and value and isinstance(value[0], str | tuple | Curve | Span | Bars | Plot):
        return tuple(with_texts(item, change) for item in value)
    return value


def _pictures_of(record: RunRecord) -> tuple[Section, ...]:
    """A section of pictures, if the record's patterns have any.

    A picture whose file is missing or has changed is named in the sentence instead.
    """
    uses = dict.fromkeys(
        (row.case.workload.pattern, shape) for row in record.rows for shape in row.case.workload.shapes
    )
    plots: dict[object, MaskPlot] = {}
    lost: list[str] = []
    for pattern, shape in uses:
        try:
            for picture in pattern.pictures(shape, MAX_CELLS):
                name = _unused(picture.name, {plot.name for plot in plots.values()})
                plots.setdefault(picture, MaskPlot(**{**picture._asdict(), "name": name}))
        except ConfigError as error:
            lost.append(f"The pattern over {shape.length} tokens cannot be drawn: {error}.")
    if not plots and not lost:
        return ()
    count = f"{len(plots)} distinct masks" if len(plots) > 1 else "one mask"
    sentence = " ".join([f"The rows use {count}.", *lost])
    return (Section(title="Masks", sentence=sentence, plots=tuple(plots.values())),)


def _unused(stem: str, taken: set[str]) -> str:
    numbered = (stem if number == 1 else f"{stem}_{number}" for number in range(1, len(taken) + 2))
    return next(name for name in numbered if name not in taken)


def answer_section(record: RunRecord, axis: Axis) -> Section:
    """The fastest implementation along an axis, at the end of every report."""
    # Its statistics need numpy, which --help should not wait for.
    from dilabench.report.answer import SPARE, TITLE, answer

    found = answer(record, axis)
    columns, rows, numeric = found.table()
    sentence = found.sentence
    return Section(
        title=TITLE, sentence=sentence, columns=columns, rows=rows, numeric=numeric, answers=True, spare=SPARE
    )


def _checked(target: str, sections: Any) -> tuple[Section, ...]:
    """The sections, with every field validated by its type, which reporters rely on. Raises PluginError."""
    if not isinstance(sections, Iterable) or isinstance(sections, str):
        raise PluginError(f"{target} returned {shown(sections)}; it must return a sequence of Section")
    checked: tuple[Section, ...] = tuple(sections)
    adapter = TypeAdapter(Section)
    for section in checked:
        if not isinstance(section, Section):
            raise PluginError(f"{target} returned {shown(section)}, which is no Section")
        try:
            adapter.validate_python(section)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise PluginError(
                f"{target}: section {shown(section.title)}: {place}: {error.errors()[0]['msg']}"
            ) from None
        if any(len(row) != len(section.columns) for row in section.rows):
            raise PluginError(f"{target}: section {section.title!r} needs a text per column in every row")
    return checked


def render(
    reporter: Reporter,
    record: RunRecord,
    folder: Path | None,
    sections: Sequence[Section],
    catalogue: Catalogue,
    options: Mapping[str, Any] = {},
) -> str | Iterator[str] | None:
    """Have a reporter render the record, with its sections where the reporter shows such, and the options it takes.

    A long text of a reporter of dilabench comes in parts. A plug-in's reporter gets a copy of the record. A reporter of
    dilabench that fails only with the sections of a plug-in's suite renders without them, and the suite's plug-in is
    blamed. Raises PluginError when it fails otherwise or returns what is no text.
    """
    plugin, what = catalogue.reporters.origin(reporter.name), f"reporter {reporter.name!r}"

    def rendered(sections: Sequence[Section]) -> str | Iterator[str] | None:
        with guarded(plugin, what):
            target = load_target(reporter.target)
            facts = (_printable(record), folder, *((sections,) if reporter.shows_sections else ()))
            taken = {name: value for name, value in options.items() if name in reporter.options}
            called = functools.partial(target, **taken)
            kinds = (str, type(None), *((Iterator,) if plugin in OWN else ()))
            text: str | Iterator[str] | None = answered(plugin, what, called, *_facts_for(plugin, facts), kind=kinds)
            return text

    try:
        return rendered(sections)
    except PluginError as error:
        suite = record.suite if record.suite in catalogue.suites else None
        author = catalogue.suites.origin(suite) if suite else BUILTIN
        if not (plugin in OWN and author not in OWN and sections and reporter.shows_sections):
            raise
        text = rendered(())
        catalogue.blame(PluginError(f"suite {suite!r}: {what} cannot show its sections: {error.why}", author))
        return text


FactsT = TypeVar("FactsT")


def _facts_for(plugin: str, facts: FactsT) -> FactsT:
    """The argument of a plug-in's function: a copy, so that the plug-in cannot change the run."""
    return facts if plugin in OWN else copy.deepcopy(facts)


def _printable(record: RunRecord) -> RunRecord:
    """The record without control characters in its texts, which a terminal would obey; mostly the record itself."""
    # Timings are most of a record, and hold no other texts than these.
    texts = {text for timing in _timings_of(record) for text in (timing.timer, timing.proves, *timing.columns.texts)}
    planned = (row.planned.model_dump_json() for row in record.rows)
    outcomes = (row.outcome.model_dump_json(exclude={"timings"}) for row in record.rows)
    header = record.model_dump_json(exclude={"rows"})
    if all(map(_is_printable, chain((header, json.dumps(sorted(texts), ensure_ascii=False)), planned, outcomes))):
        return record
    document = record.model_dump(mode="json")
    safe = _walked(document)
    return record if safe == document else RunRecord.model_validate(safe)


def _is_printable(text: str) -> bool:
    """Return True for JSON in one line whose texts have no control characters."""
    if "\\" in text and _ESCAPED.search(text):
        return False
    # Many times as fast as `isprintable`: of ASCII's control characters JSON leaves this one as it is.
    return (text.isascii() and "\x7f" not in text) or text.isprintable() or printable(text) == text


def _timings_of(record: RunRecord) -> Iterator[Timing]:
    for row in record.rows:
        if isinstance(row.outcome, Measured):
            yield from row.outcome.timings


def _walked(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): _walked(item) for key, item in value.items()}
    return [_walked(item) for item in value] if isinstance(value, list) else value

"""Suite `extreme`: the longest sequence of each implementation, its time and memory, and the traced prediction."""

from collections.abc import Sequence

from dilabench.comparison.view import peak_of, view_of
from dilabench.metadata import WAY
from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.memory import plan_memory
from dilabench.record import Row, RunRecord, Skipped
from dilabench.report.columns import ABSENT, implementation_text
from dilabench.report.findings import Curve, CurvePlot, Point, Section
from dilabench.suites.extreme.cases import Search, searches
from dilabench.units import MIB, format_count, format_rate, significant

COLUMNS = (
    "implementation",
    "mode",
    "way",
    "longest that ran",
    "too long",
    "tok/s there",
    "bytes/token",
    "slope, bytes/token",
    "traced, bytes/token",
    "search ended",
)
NUMERIC = frozenset(COLUMNS[3:9])


def analyse(record: RunRecord, catalogue: Catalogue) -> tuple[Section, ...]:
    """One line per search; the slope is that of a line fitted to the measured peaks over length."""
    all_searches = searches(record.rows)
    if not all_searches:
        return ()
    best = max((search for search in all_searches if search.fitting), key=lambda search: search.longest, default=None)
    sentence = "No length fitted."
    if any(search.interrupted for search in all_searches):
        sentence = f"No length ran: the search ended {_ending(all_searches[0])}."
    if best is not None:
        row = best.rows[0]
        text = f"{implementation_text(row.case)} ({row.case.workload.mode}, {_way(best)})"
        sentence = (
            f"Longest sequence that ran and was right on sampled rows: {format_count(best.longest)} tokens, {text}."
        )
    section = Section(
        title="Longest sequences",
        sentence=sentence,
        columns=COLUMNS,
        rows=tuple(_line(search, record.device, catalogue) for search in all_searches),
        numeric=NUMERIC,
        plots=tuple(_plots(all_searches)),
        answers=True,
    )
    return (section,)


def _line(search: Search, device: str, catalogue: Catalogue) -> tuple[str, ...]:
    row = search.rows[0]
    name = implementation_text(row.case) + (f" over {row.case.backend}" if row.case.backend else "")
    head = (name, row.case.workload.mode, _way(search))
    too_long = ABSENT if search.too_long is None else format_count(search.too_long)
    if not search.fitting:
        return (*head, ABSENT, too_long, *[ABSENT] * 4, _ending(search))
    at = max(search.fitting, key=lambda row: row.case.workload.seq_len)
    tokens, peak, where = at.case.workload.positions, peak_of(at), view_of(at)
    plan = plan_memory(at.case, device, catalogue)
    slope = _slope(search.fitting)
    return (
        *head,
        format_count(search.longest),
        too_long,
        format_rate(where.tokens_per_s) if where else ABSENT,
        ABSENT if peak is None else significant(peak / tokens, 4),
        ABSENT if slope is None else significant(slope, 4),
        ABSENT if plan is None else significant(plan.peak_bytes / tokens, 4),
        _ending(search),
    )


def _ending(search: Search) -> str:
    stopped = search.interrupted
    if stopped is not None:
        outcome = stopped.outcome
        why = outcome.why if isinstance(outcome, Skipped) else f"{stopped.outcome.status}"
        return f"at {format_count(stopped.case.workload.seq_len)}: {why}"
    if search.too_long is None:
        return "at the requested length: it may go further"
    return f"between the two, to {format_count(search.step(max(1, search.longest)))} tokens"


def _way(search: Search) -> str:
    return WAY.of(search.rows[0].planned) or ""


def _slope(rows: Sequence[Row]) -> float | None:
    """The least-squares slope of peak bytes over tokens: the bytes of one more token."""
    points = [(row.case.workload.positions, peak) for row in rows if (peak := peak_of(row)) is not None]
    if len({tokens for tokens, _ in points}) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)


def _plots(found: Sequence[Search]) -> list[CurvePlot]:
    curves = []
    for search in found:
        rows = sorted(search.fitting, key=lambda row: row.case.workload.seq_len)
        points = [Point(row.case.workload.seq_len, peak / MIB) for row in rows if (peak := peak_of(row))]
        if len(points) > 1:
            row = search.rows[0]
            label = f"{implementation_text(row.case)} {row.case.workload.mode}, {_way(search)}"
            curves.append(Curve(label=label, points=tuple(points)))
    if not curves:
        return []
    return [
        CurvePlot(
            name="longest_memory", title="Peak memory over length", y_label="peak memory (MiB)", curves=tuple(curves)
        )
    ]

"""history.html: how cases developed over stored runs, with the steps in them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dilabench.report.columns import Column
from dilabench.report.findings import CurvePlot
from dilabench.report.html.data import plots_as_json
from dilabench.report.html.page import chart_library, page
from dilabench.units import counted, format_latency
from dilabench.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup

FILENAME = "history.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One case on one machine: a line per run, as the columns show it, a curve per level. `steps` are sentences."""

    title: str
    where: str
    columns: Sequence[Column]
    lines: Sequence[Any]
    steps: Sequence[str]
    plot: CurvePlot

    @property
    def is_drawn(self) -> bool:
        """Return True if there are at least two runs to compare."""
        return sum(len(curve.points) for curve in self.plot.curves) > 1

    @property
    def times(self) -> str:
        """'13.76 ms in the newest run; 11.66 ms to 15.42 ms in 3 runs': runs since the last step; empty without any."""
        points = self.plot.curves[-1].points if self.plot.curves else ()
        if not points:
            return ""
        heights = [point.y for point in points]
        newest, *ends = (format_latency(1e6 * y) for y in (points[-1].y, min(heights), max(heights)))
        spread = f"; {' to '.join(ends)} in {len(points)} runs" if len(points) > 1 else ""
        return f"{newest} in the newest run{spread}"

    @property
    def is_long_enough(self) -> bool:
        """Return True if it has as many runs as a step needs."""
        from dilabench.stats.decisions.steps import FEWEST_POINTS

        return len(self.lines) >= FEWEST_POINTS

    @property
    def rows(self) -> "Iterator[Markup]":
        """The row of each line in HTML, several times as fast as a template makes it of cells."""
        from markupsafe import Markup, escape

        cells = ('<td class="number">%s</td>' if column.right else "<td>%s</td>" for column in self.columns)
        form = f"<tr>{''.join(cells)}</tr>"
        for line in self.lines:
            texts = [column.value_text(line) for column in self.columns]
            # Few lines have anything to escape.
            if escape(whole := "".join(texts)) != whole:
                texts = list(map(escape, texts))
            yield Markup(form % tuple(texts))


def to_text(trends: Sequence[Trend], heading: str) -> str:
    """The page, which needs no network."""
    charts = chart_library()
    plots = {trend.plot.name: trend.plot for trend in trends if trend.is_drawn}
    return page(
        "history.html.j2",
        heading=heading,
        trends=trends,
        ambiguous={title for title, count in Counter(trend.title for trend in trends).items() if count > 1},
        stepped=[trend for trend in trends if trend.steps],
        verdict=_verdict(trends),
        decided=any(trend.is_long_enough for trend in trends),
        charts=charts,
        data=plots_as_json(plots),
        version=__version__,
    )


def _verdict(trends: Sequence[Trend]) -> str:
    """The sentence if there is no step: 'No step in 2 cases', '3 runs: too few for steps'."""
    enough = sum(trend.is_long_enough for trend in trends)
    most = max((len(trend.lines) for trend in trends), default=0)
    if not enough:
        return f"{counted(most, 'run')}: too few for steps."
    short = len(trends) - enough
    few = f" {counted(short, 'other case')} {'has' if short == 1 else 'have'} too few runs for steps." if short else ""
    return f"No step in the times of {counted(enough, 'case')}.{few}"

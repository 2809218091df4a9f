"""history.html: how cases developed over stored runs, with the steps in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dilabench.report.columns import Column
from dilabench.report.findings import CurvePlot
from dilabench.report.html.data import plots_as_json
from dilabench.report.html.page import chart_library, page
from dilabench.version import __version__

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
    def cells(self) -> Iterator[list[tuple[str, bool]]]:
        """The cells of each line: the text, and whether it is aligned to the right."""
        return ([(column.value_text(line), column.right) for column in self.columns] for line in self.lines)


def to_text(trends: Sequence[Trend], heading: str) -> str:
    """The page, which needs no network."""
    charts = chart_library()
    plots = {trend.plot.name: trend.plot for trend in trends if trend.is_drawn}
    return page(
        "history.html.j2",
        heading=heading,
        trends=trends,
        stepped=[trend for trend in trends if trend.steps],
        charts=charts,
        data=plots_as_json(plots),
        version=__version__,
    )

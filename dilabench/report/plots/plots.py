"""The plots of a record's sections, each as PNG and SVG."""

import io
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilabench.atomic_file import write_bytes
from dilabench.record import RunRecord
from dilabench.report.content import device_text
from dilabench.report.findings import BarPlot, CurvePlot, MaskPlot, Plot, Section, with_texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = "plots"
FORMS = ("png", "svg")
PNG_DPI = 150
# Pictures of the latest plots: a run writes them to files and into its page.
KEPT = 32
# Longer texts, of a record that a stranger wrote, leave no room for the plot.
MOST_CHARACTERS, MOST_OF_A_LABEL = 200, 60
# Reports are compared and kept under version control: the same record gives the same bytes.
METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": "dilabench"}}
STYLE: dict[Any, Any] = {"svg.hashsalt": "dilabench", "font.size": 9.0, "axes.titlesize": 10.0, "legend.fontsize": 8.0}


def render(record: RunRecord, folder: Path | None, sections: Sequence[Section] = ()) -> None:
    """Write plots/<name>.png and .svg into `folder`; without a folder, do nothing.

    Raises EnvironmentNotReady when a file cannot be written.
    """
    if folder is None:
        return
    series = series_of(sections)
    for plot in plots_of(sections):
        _write(plot, record, folder / FOLDER, series)


def plots_of(sections: Sequence[Section]) -> Iterator[Plot]:
    """Every plot of the sections, in their order."""
    return (plot for section in sections for plot in section.plots)


def series_of(sections: Sequence[Section]) -> tuple[str, ...]:
    """The names of all series, in order: each has one colour and mark in every plot of a record."""
    from dilabench.report.plots.drawing import names

    drawn = (plot for plot in plots_of(sections) if not isinstance(plot, MaskPlot))
    return tuple(dict.fromkeys(name for plot in drawn for name in names(plot)))


def svg(plot: Plot, record: RunRecord, series: tuple[str, ...] = ()) -> str:
    """The plot as an SVG element, without the declarations of a separate file."""
    text = _picture(plot, subject(record), _origin(record), "svg", series).decode()
    return text[text.index("<svg") :]


def subject(record: RunRecord) -> str:
    """The common caption of a record's plots: the machine, and the fields that all workloads share."""
    shared: list[str] | None = None
    for row in record.rows:
        words = [*row.case.workload.label().split(" "), row.case.workload.mode]
        shared = words if shared is None else [word for word in shared if word in words]
    return " · ".join(filter(None, (device_text(record), " ".join(shared or []))))


def _write(plot: Plot, record: RunRecord, folder: Path, series: tuple[str, ...]) -> None:
    for form in FORMS:
        write_bytes(folder / f"{plot.name}.{form}", _picture(plot, subject(record), _origin(record), form, series))


def _origin(record: RunRecord) -> str:
    return f"dilabench {record.suite} · run {record.run_id}"


@lru_cache(maxsize=KEPT)
def _picture(plot: Plot, about: str, origin: str, form: str, series: tuple[str, ...]) -> bytes:
    """The plot in a form, with what it is of and where that comes from; a page shows what a file holds, too."""
    # Only plots need matplotlib, which takes a while to load.
    from dilabench.report.plots.drawing import rc_context

    picture = io.BytesIO()
    labels = frozenset(series)
    plot = with_texts(plot, lambda text: _short(text, MOST_OF_A_LABEL if text in labels else MOST_CHARACTERS))
    series = tuple(_short(label, MOST_OF_A_LABEL) for label in series)
    about, origin = _short(about, MOST_CHARACTERS), _short(origin, MOST_CHARACTERS)
    with rc_context(STYLE):
        # Drawn for each form: a layout that was there before would move the next by a hair.
        figure = _drawn(plot, series)
        figure.suptitle(f"{plot.caption}\n{about}", x=0.01, ha="left", fontsize=9)
        figure.text(0.995, 0.005, origin, ha="right", fontsize=6, color="0.5")
        figure.savefig(picture, format=form, dpi=PNG_DPI, metadata=METADATA[form])
    return picture.getvalue()


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _drawn(plot: Plot, series: tuple[str, ...]) -> "Figure":
    from dilabench.report.plots.drawing import draw_bars, draw_curves, draw_mask

    if isinstance(plot, CurvePlot):
        return draw_curves(plot, series)
    return draw_bars(plot, series) if isinstance(plot, BarPlot) else draw_mask(plot)

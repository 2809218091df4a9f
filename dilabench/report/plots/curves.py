"""Curves over sequence length, on logarithmic axes, with intervals as bars (matplotlib)."""

from collections.abc import Sequence
from itertools import pairwise
from math import nan, sqrt

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, Locator, LogLocator, MaxNLocator, NullLocator

from dilabench.report import figures
from dilabench.report.findings import Curve, CurvePlot
from dilabench.report.plots.style import Look, draw_grid, look
from dilabench.units import format_count

SIZE_INCHES = (7.6, 4.4)
MAX_TICKS = 9
MAX_SPANS = 18
# Series of one length stand side by side, so that their intervals do not cover each other.
SIDE_STEP = 1.02


def draw_curves(plot: CurvePlot) -> Figure:
    """The plot as a figure; measured points with markers, fitted ones as dashed lines of the same colour."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    labels = list(dict.fromkeys(curve.label for curve in plot.curves))
    axes.set_xscale("log")
    axes.set_yscale("log")
    for curve in plot.curves:
        index = labels.index(curve.label)
        aside = SIDE_STEP ** (index - (len(labels) - 1) / 2)
        xs = [point.x * aside for point in curve.points]
        if curve.fitted:
            axes.plot(xs, [point.y for point in curve.points], "--", color=look(index).colour, linewidth=1)
        else:
            _measured(axes, curve, xs, look(index), joined=not any(other.fitted for other in plot.curves))
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    _mark_spans(axes, plot)
    _ticks_at_points(axes, sorted({point.x for curve in plot.curves for point in curve.points}))
    axes.yaxis.set_major_locator(_value_ticks(*axes.get_ylim()))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: _value_text(value))
    draw_grid(axes, "both")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _measured(axes: Axes, curve: Curve, xs: Sequence[float], style: Look, joined: bool) -> None:
    ys = [point.y for point in curve.points]
    # A point without an interval gets no whisker, which one of no length would look like.
    below = [nan if point.low is None else max(0.0, point.y - point.low) for point in curve.points]
    above = [nan if point.high is None else max(0.0, point.high - point.y) for point in curve.points]
    axes.errorbar(
        xs,
        ys,
        yerr=(below, above) if any(point.low is not None for point in curve.points) else None,
        label=curve.label,
        color=style.colour,
        marker=style.marker,
        markersize=4.5,
        linewidth=1.3,
        linestyle="-" if joined else "none",
        capsize=2.5,
    )


def _value_ticks(low: float, high: float) -> Locator:
    """Round values: powers of ten over many decades, with 2 and 5 between them over few, evenly laid inside one."""
    if high < 10 * low:
        return MaxNLocator(nbins=6)
    return LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,), numticks=12)


def _value_text(value: float) -> str:
    """A round value: 0.5, 1000, 20k, 1M."""
    if value < 1e4:
        return f"{value:g}"
    text = figures.decimal(value)
    return f"{float(text[:-1]):g}{text[-1]}"


def _ticks_at_points(axes: Axes, places: Sequence[float]) -> None:
    """Ticks where was measured, from the largest on, as far as their names have room on the logarithmic axis."""
    axes.xaxis.set_major_locator(FixedLocator(_with_room(places, MAX_TICKS)))
    axes.xaxis.set_minor_locator(NullLocator())
    whole = all(place == round(place) for place in places)
    axes.xaxis.set_major_formatter(lambda value, _: format_count(round(value)) if whole else f"{value:.3g}")


def _with_room(places: Sequence[float], most: int) -> list[float]:
    """Those of the rising places that lie apart by a share of 1 / `most` of them all, the largest among them."""
    room = (places[-1] / places[0]) ** (1 / most) if places else 1.0
    shown: list[float] = []
    for place in reversed(places):
        if not shown or shown[-1] / place >= room:
            shown.append(place)
    return shown[::-1]


def _mark_spans(axes: Axes, plot: CurvePlot) -> None:
    """A line between neighbouring spans, and their texts along the top."""
    if not plot.spans:
        return
    for span, following in pairwise(plot.spans):
        axes.axvline(sqrt(span.last * following.first), color="0.6", linewidth=0.8, linestyle=":", zorder=0)
    middles = {sqrt(span.first * span.last): span.text for span in plot.spans}
    shown = _with_room(list(middles), MAX_SPANS)
    top = axes.secondary_xaxis("top")
    top.set_xticks(shown, [middles[place] for place in shown], fontsize=7, color="0.35")
    top.set_xticks([], minor=True)
    top.tick_params(length=0)
    top.spines["top"].set_visible(False)
    top.set_xlabel(plot.span_label, fontsize=7, color="0.35", loc="left")

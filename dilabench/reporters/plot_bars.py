"""Groups of horizontal bars with intervals (matplotlib)."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilabench.reporters.plot_style import GRID, Look, look
from dilabench.sections import BarPlot, Bars

WIDTH_INCHES = 7.6
BAR_INCHES = 0.2
MARGIN_INCHES = 1.1
GROUP_GAP = 0.8


def draw_bars(plot: BarPlot) -> Figure:
    """The plot as a figure; the first category and the first bar of a group stand on top."""
    count = max(1, len(plot.bars))
    height = MARGIN_INCHES + BAR_INCHES * len(plot.categories) * (count + GROUP_GAP)
    figure = Figure(figsize=(WIDTH_INCHES, max(2.2, height)), layout="constrained")
    axes = figure.subplots()
    for index, bars in enumerate(plot.bars):
        _draw(axes, plot, bars, [group * (count + GROUP_GAP) + index for group in range(len(plot.categories))], look(index))
    centres = [group * (count + GROUP_GAP) + (count - 1) / 2 for group in range(len(plot.categories))]
    axes.set_yticks(centres, plot.categories)
    axes.invert_yaxis()
    if plot.log:
        axes.set_xscale("log")
    if plot.reference is not None:
        axes.axvline(plot.reference, color="black", linewidth=1)
    axes.set_xlabel(plot.value_label)
    axes.set_title(plot.title, loc="left")
    axes.grid(visible=True, axis="x", **GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if count > 1 or plot.bars[0].label:
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def _draw(axes: Axes, plot: BarPlot, bars: Bars, places: list[float], style: Look) -> None:
    start = plot.reference or 0.0
    shown = [(place, index) for place, index in zip(places, range(len(places)), strict=True) if bars.values[index] is not None]
    values = [bars.values[index] or 0.0 for _, index in shown]
    axes.barh(
        [place for place, _ in shown],
        [value if plot.log else value - start for value in values],
        left=None if plot.log else start,
        height=0.85,
        label=bars.label,
        color=style.colour,
        edgecolor="white",
        linewidth=0.4,
        hatch=style.hatch,
    )
    for (place, index), value in zip(shown, values, strict=True):
        low = bars.low[index] if bars.low else None
        high = bars.high[index] if bars.high else None
        if low is not None and high is not None:
            reach = ([max(0.0, value - low)], [max(0.0, high - value)])
            axes.errorbar([value], [place], xerr=reach, color="black", linewidth=1, capsize=2)

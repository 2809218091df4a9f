"""Groups of horizontal bars with intervals (matplotlib)."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilabench.report.findings import BarPlot, Bars
from dilabench.report.plots.style import Look, draw_grid, look

WIDTH_INCHES = 7.6
BAR_INCHES = 0.2
MARGIN_INCHES = 1.4
GROUP_GAP = 0.8
MAX_LEGEND_COLUMNS = 4


def draw_bars(plot: BarPlot) -> Figure:
    """The plot as a figure; the first category and the first bar of a group stand on top."""
    count = max(1, len(plot.bars))
    height = MARGIN_INCHES + BAR_INCHES * len(plot.categories) * (count + GROUP_GAP)
    figure = Figure(figsize=(WIDTH_INCHES, max(2.2, height)), layout="constrained")
    axes = figure.subplots()
    tops = [group * (count + GROUP_GAP) for group in range(len(plot.categories))]
    for index, bars in enumerate(plot.bars):
        _draw(axes, plot, bars, [top + index for top in tops], look(index))
    axes.set_yticks([top + (count - 1) / 2 for top in tops], plot.categories)
    axes.invert_yaxis()
    if plot.reference is not None:
        axes.axvline(plot.reference, color="black", linewidth=1)
    axes.set_xlabel(plot.value_label)
    draw_grid(axes, "x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if len(plot.bars) > 1:
        # Below: names of categories already take the room beside.
        figure.legend(loc="outside lower center", frameon=False, ncols=min(len(plot.bars), MAX_LEGEND_COLUMNS))
    return figure


def _draw(axes: Axes, plot: BarPlot, bars: Bars, places: list[float], style: Look) -> None:
    start = plot.reference or 0.0
    found = [(index, value) for index, value in enumerate(bars.values) if value is not None]
    axes.barh(
        [places[index] for index, _ in found],
        [value - start for _, value in found],
        left=start,
        height=0.85,
        label=bars.label,
        color=style.colour,
        edgecolor="white",
        linewidth=0.4,
        hatch=style.hatch,
    )
    for index, value in found:
        low = bars.low[index] if bars.low else None
        high = bars.high[index] if bars.high else None
        if low is not None and high is not None:
            reach = ([max(0.0, value - low)], [max(0.0, high - value)])
            axes.errorbar([value], [places[index]], xerr=reach, color="black", linewidth=1, capsize=2)

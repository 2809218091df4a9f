"""Groups of horizontal bars with intervals (matplotlib)."""

from math import ceil

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilabench.report.findings import BarPlot, Bars
from dilabench.report.plots.style import Look, draw_grid, look

WIDTH_INCHES = 7.6
BAR_INCHES = 0.2
MARGIN_INCHES = 1.1
LEGEND_INCHES = 0.17
GROUP_GAP = 0.8
# A line of a name, in bars.
LINE = 0.75
MAX_LEGEND_COLUMNS = 4
# So many characters are as wide as the figure, and as the mark beside a name.
LEGEND_CHARACTERS = 115
HANDLE_CHARACTERS = 9


def draw_bars(plot: BarPlot) -> Figure:
    """The plot as a figure; the first category and the first bar of a group stand on top."""
    count = max(1, len(plot.bars))
    # A group is as high as the bars that it has, or as its name.
    present = [[bars.values[group] is not None for bars in plot.bars] for group in range(len(plot.categories))]
    lines = [category.count("\n") + 1 for category in plot.categories]
    heights = [max(1, sum(has), LINE * count) for has, count in zip(present, lines, strict=True)]
    tops = [sum(heights[:group]) + group * GROUP_GAP for group in range(len(heights))]
    end = sum(heights) + max(0, len(heights) - 1) * GROUP_GAP
    names = max((len(bars.label) for bars in plot.bars), default=0)
    columns = max(1, min(count, MAX_LEGEND_COLUMNS, LEGEND_CHARACTERS // (names + HANDLE_CHARACTERS)))
    height = MARGIN_INCHES + BAR_INCHES * end + LEGEND_INCHES * (ceil(count / columns) if count > 1 else 0)
    figure = Figure(figsize=(WIDTH_INCHES, max(1.6, height)), layout="constrained")
    axes = figure.subplots()
    for index, bars in enumerate(plot.bars):
        places = [
            top + (high - sum(has)) / 2 + sum(has[:index])
            for top, high, has in zip(tops, heights, present, strict=True)
        ]
        _draw(axes, plot, bars, places, look(index))
    axes.set_yticks([top + (high - 1) / 2 for top, high in zip(tops, heights, strict=True)], plot.categories)
    axes.set_ylim(end - 0.5 + GROUP_GAP / 2, -0.5 - GROUP_GAP / 2)
    if plot.reference is not None:
        axes.axvline(plot.reference, color="black", linewidth=1)
    axes.set_xlabel(plot.value_label)
    draw_grid(axes, "x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if len(plot.bars) > 1:
        # Below: names of categories already take the room beside.
        figure.legend(loc="outside lower center", frameon=False, ncols=columns)
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

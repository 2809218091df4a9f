"""Drawings of plots (matplotlib): curves over length, groups of bars, block masks.

Series have colours that the colour-blind can distinguish, and markers and hatches for prints in grey.
"""

import os
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, nan, sqrt
from pathlib import Path
from typing import Literal

import numpy as np

from dilabench.report.findings import BarPlot, Bars, Curve, CurvePlot, MaskPlot
from dilabench.units import format_count, format_rate

# matplotlib reads the file of settings of the working folder first, which may be a stranger's, or a pipe.
with chdir(Path(__file__).parent) if os.path.lexists("matplotlibrc") else nullcontext():
    from matplotlib import rc_context as rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedLocator, Locator, LogLocator, MaxNLocator, NullLocator

# Okabe and Ito, "Color Universal Design" (2008); black last, without yellow, which is invisible on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
HATCHES = ("", "///", "...", "\\\\\\", "xx", "++", "oo")


@dataclass(frozen=True, slots=True)
class Look:
    """Colour, marker and hatch of one series; no two of the first seventy share all three."""

    colour: str
    marker: str
    hatch: str


def draw_grid(axes: Axes, axis: Literal["both", "x", "y"]) -> None:
    """Thin grey lines at the named axis's ticks."""
    axes.grid(visible=True, which="major", axis=axis, color="0.88", linewidth=0.6)


def names(plot: CurvePlot | BarPlot) -> list[str]:
    """The names of its series, in order."""
    parts: Sequence[Curve | Bars] = plot.curves if isinstance(plot, CurvePlot) else plot.bars
    return list(dict.fromkeys(part.label for part in parts))


def look(index: int) -> Look:
    """The look of series number `index`."""
    return Look(COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], HATCHES[index % len(HATCHES)])


CURVES_INCHES = (7.6, 4.4)
MAX_TICKS = 9
MAX_SPANS = 18
# Series of one length are drawn side by side, so that their intervals do not overlap.
SIDE_STEP = 1.02


def draw_curves(plot: CurvePlot, series: Sequence[str] = ()) -> Figure:
    """The plot as a figure; measured points with markers, fitted ones as dashed lines of the same colour.

    `series`: names whose style is fixed first, so that all plots of a record agree.
    """
    figure = Figure(figsize=CURVES_INCHES, layout="constrained")
    axes = figure.subplots()
    labels, known = names(plot), list(dict.fromkeys((*series, *names(plot))))
    axes.set_xscale("log")
    axes.set_yscale("log")
    for curve in plot.curves:
        style = look(known.index(curve.label))
        aside = SIDE_STEP ** (labels.index(curve.label) - (len(labels) - 1) / 2)
        xs = [point.x * aside for point in curve.points]
        if curve.fitted:
            axes.plot(xs, [point.y for point in curve.points], "--", color=style.colour, linewidth=1)
        else:
            _measured(axes, curve, xs, style, joined=not any(other.fitted for other in plot.curves))
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
    text = format_rate(value)
    return f"{float(text[:-1]):g}{text[-1]}"


def _ticks_at_points(axes: Axes, places: Sequence[float]) -> None:
    """Ticks at the measured values, from the largest on, as long as their labels fit on the logarithmic axis."""
    axes.xaxis.set_major_locator(FixedLocator(_with_room(places, MAX_TICKS)))
    axes.xaxis.set_minor_locator(NullLocator())
    whole = all(place == round(place) for place in places)
    axes.xaxis.set_major_formatter(lambda value, _: format_count(round(value)) if whole else f"{value:.3g}")


def _with_room(places: Sequence[float], most: int) -> list[float]:
    """The ascending places that are separated by a share of 1 / `most` of the whole, the largest included."""
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


WIDTH_INCHES = 7.6
BAR_INCHES = 0.2
MARGIN_INCHES = 1.1
LEGEND_INCHES = 0.17
GROUP_GAP = 0.8
# A line of a name, in bars.
LINE = 0.75
MAX_LEGEND_COLUMNS = 4
# Characters that fit into the width of the figure, and of the mark next to a name.
LEGEND_CHARACTERS = 115
HANDLE_CHARACTERS = 9


def draw_bars(plot: BarPlot, series: Sequence[str] = ()) -> Figure:
    """The plot as a figure; the first category and the first bar of a group are on top. `series`: as of curves."""
    known = list(dict.fromkeys((*series, *names(plot))))
    count = max(1, len(plot.bars))
    # A group is as high as the bars that it has, or as its name.
    present = [[bars.values[group] is not None for bars in plot.bars] for group in range(len(plot.categories))]
    if plot.stacked:
        # One bar for each group.
        present = [[*([False] * (len(has) - 1)), any(has)] for has in present]
    lines = [category.count("\n") + 1 for category in plot.categories]
    heights = [max(1, sum(has), LINE * count) for has, count in zip(present, lines, strict=True)]
    tops = [sum(heights[:group]) + group * GROUP_GAP for group in range(len(heights))]
    end = sum(heights) + max(0, len(heights) - 1) * GROUP_GAP
    longest = max((len(bars.label) for bars in plot.bars), default=0)
    columns = max(1, min(count, MAX_LEGEND_COLUMNS, LEGEND_CHARACTERS // (longest + HANDLE_CHARACTERS)))
    height = MARGIN_INCHES + BAR_INCHES * end + LEGEND_INCHES * (ceil(count / columns) if count > 1 else 0)
    figure = Figure(figsize=(WIDTH_INCHES, max(1.6, height)), layout="constrained")
    axes = figure.subplots()
    starts = [plot.reference or 0.0] * len(plot.categories)
    for index, bars in enumerate(plot.bars):
        places = [
            top + (high - sum(has)) / 2 + sum(has[:index])
            for top, high, has in zip(tops, heights, present, strict=True)
        ]
        if plot.stacked:
            ends = [start + (value or 0.0) for start, value in zip(starts, bars.values, strict=True)]
            bars = replace(bars, values=tuple(ends))
        _draw_series(axes, bars, places, starts, look(known.index(bars.label)))
        starts = ends if plot.stacked else starts
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
        # Below: the names of categories take the space at the side.
        figure.legend(loc="outside lower center", frameon=False, ncols=columns)
    return figure


def _draw_series(axes: Axes, bars: Bars, places: list[float], starts: list[float], style: Look) -> None:
    found = [(index, value) for index, value in enumerate(bars.values) if value is not None]
    axes.barh(
        [places[index] for index, _ in found],
        [value - starts[index] for index, value in found],
        left=[starts[index] for index, _ in found],
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


MASK_INCHES = (5.6, 4.8)
COMPUTED, SKIPPED, HIDDEN = COLOURS[0], "#FFFFFF", "0.88"
SHADES = LinearSegmentedColormap.from_list("computed", [SKIPPED, COMPUTED]).with_extremes(bad=HIDDEN)


def draw_mask(plot: MaskPlot) -> Figure:
    """The plot as a figure: queries down, keys to the right, in blocks."""
    figure = Figure(figsize=MASK_INCHES, layout="constrained")
    axes = figure.subplots()
    shares = np.array([[np.nan if cell is None else cell for cell in line] for line in plot.cells])
    size = plot.blocks
    image = axes.imshow(shares, cmap=SHADES, vmin=0, vmax=1, interpolation="nearest", extent=(0, size, size, 0))
    axes.set_xlabel(f"keys ({_unit(plot)})")
    axes.set_ylabel(f"queries ({_unit(plot)})")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    if len(plot.cells) < size:
        figure.colorbar(image, ax=axes, label="share of the blocks that is computed", shrink=0.85)
    _name_colours(figure, axes, hidden=bool(np.isnan(shares).any()))
    return figure


def _name_colours(figure: Figure, axes: Axes, hidden: bool) -> None:
    named = [Patch(facecolor=COMPUTED, label="computed"), Patch(facecolor=SKIPPED, edgecolor="0.6", label="skipped")]
    if hidden:
        named.append(Patch(facecolor=HIDDEN, label="hidden by the causal mask"))
    figure.legend(handles=named, loc="outside lower center", ncols=len(named), frameon=False)
    axes.spines[:].set_color("0.6")


def _unit(plot: MaskPlot) -> str:
    return "tokens" if plot.block_size == 1 else f"blocks of {plot.block_size} tokens"

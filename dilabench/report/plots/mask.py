"""A block mask as a picture (matplotlib): dark where blocks are computed, grey where the causal mask hides them."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dilabench.report.findings import MaskPlot
from dilabench.report.plots.style import COLOURS

SIZE_INCHES = (5.6, 4.8)
COMPUTED, SKIPPED, HIDDEN = COLOURS[0], "#FFFFFF", "0.88"
SHADES = LinearSegmentedColormap.from_list("computed", [SKIPPED, COMPUTED]).with_extremes(bad=HIDDEN)


def draw_mask(plot: MaskPlot) -> Figure:
    """The plot as a figure: queries down, keys to the right, in blocks."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
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

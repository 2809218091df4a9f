"""How series look: colours that the colour-blind can tell apart, and markers and hatches for prints in grey."""

from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes

# Okabe and Ito, "Color Universal Design" (2008); black last, yellow left out: it vanishes on white.
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


def look(index: int) -> Look:
    """The look of series number `index`."""
    return Look(COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], HATCHES[index % len(HATCHES)])

"""The quantity that a suite varies, with one line of its answer per value: length, density, ranks, or a plug-in's."""

from collections.abc import Callable
from dataclasses import dataclass

from dilabench.metadata import DENSITY_REACHED, SPARSITY_REACHED
from dilabench.record import PlannedCase
from dilabench.units import format_count


@dataclass(frozen=True, slots=True, repr=False)
class Axis:
    """`value` orders cases, `text` formats a value. Cases of equal value belong to one line of an answer.

    `at`: how a sentence names values of the axis, with `{}` for their texts ('at {}'); 'at NAME {}' by default.
    """

    name: str
    value: Callable[[PlannedCase], float]
    text: Callable[[float], str] = "{:g}".format
    at: str | None = None

    def where(self, values: str) -> str:
        """'at 1K and 4K': values of the axis inside a sentence."""
        return (self.at or f"at {self.name} {{}}").format(values)

    def __repr__(self) -> str:
        # Without addresses of functions, which would change generated pages from process to process.
        return f"Axis({self.name!r}, ...)"


LENGTH = Axis("length", lambda planned: planned.case.workload.seq_len, lambda value: format_count(int(value)), "at {}")
RANKS = Axis("ranks", lambda planned: planned.case.world_size, at="at world size {}")


def _density(planned: PlannedCase) -> float:
    """The pattern's density, from the row's label if it has one: masks take time to create, and files may be gone."""
    reached, left_out = DENSITY_REACHED.of(planned), SPARSITY_REACHED.of(planned)
    if reached is not None:
        return reached
    workload = planned.case.workload
    return workload.density if left_out is None else 1 - left_out


DENSITY = Axis("density", _density, "{:.1%}".format, "at {} density")

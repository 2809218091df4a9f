"""What a suite varies, and so what its answer is given by: length, density, ranks, or what a plug-in's suite varies."""

from collections.abc import Callable
from dataclasses import dataclass

from dilabench.metadata import DENSITY_REACHED, SPARSITY_REACHED
from dilabench.record import PlannedCase
from dilabench.units import format_count


@dataclass(frozen=True, slots=True, repr=False)
class Axis:
    """`value` puts cases in order, `text` shows a value. Cases of equal value belong to one line of an answer."""

    name: str
    value: Callable[[PlannedCase], float]
    text: Callable[[float], str] = "{:g}".format

    def __repr__(self) -> str:
        # Addresses of functions would make pages that show a descriptor differ from one process to the next.
        return f"Axis({self.name!r}, ...)"


LENGTH = Axis("length", lambda planned: planned.case.workload.seq_len, lambda value: format_count(int(value)))
RANKS = Axis("ranks", lambda planned: planned.case.world_size)


def _density(planned: PlannedCase) -> float:
    """The pattern's density, as its row was labelled where it was: masks take time to make, and files may be gone."""
    reached, left_out = DENSITY_REACHED.of(planned), SPARSITY_REACHED.of(planned)
    if reached is not None:
        return reached
    workload = planned.case.workload
    return workload.pattern.density_of(workload.shapes) if left_out is None else 1 - left_out


DENSITY = Axis("density", _density, "{:.1%}".format)

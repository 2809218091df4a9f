"""What a suite varies, and so what its answer is given by: length, density, ranks, or what a plug-in's suite varies."""

from collections.abc import Callable
from dataclasses import dataclass

from dilabench.metadata import DENSITY_REACHED, SPARSITY_REACHED
from dilabench.record import PlannedCase
from dilabench.units import format_count
from dilabench.workload.work import share_of_pairs


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
    """The share of visible blocks that a block mask computes; of other patterns, that of pairs."""
    reached, left_out = DENSITY_REACHED.of(planned), SPARSITY_REACHED.of(planned)
    if reached is not None:
        return reached
    return share_of_pairs(planned.case.workload) if left_out is None else 1 - left_out


DENSITY = Axis("density", _density, "{:.1%}".format)

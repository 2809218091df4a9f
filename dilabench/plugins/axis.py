"""What a suite varies, and so what its answer is given by: length, density, ranks, or what a plug-in's suite varies."""

from collections.abc import Callable
from dataclasses import dataclass

from dilabench.metadata import SPARSITY_REACHED
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
# What has no mask computes every block.
DENSITY = Axis("density", lambda planned: 1 - (SPARSITY_REACHED.of(planned) or 0.0), "{:.1%}".format)

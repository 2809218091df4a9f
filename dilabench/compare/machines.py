"""Two machines, a CPU and a GPU for example: how much faster one computes what both computed. A ratio, no verdict.

Times of different machines were not taken in turns, and their backends and drivers differ, so nothing is proven: the
ratio of the medians is what there is to say.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dilabench.compare.ranking import is_quotable
from dilabench.compare.view import RowView, measured_view
from dilabench.record import Case, Row, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRatio:
    """One implementation and workload on both machines, each over its fastest backend."""

    base: Case
    new: Case
    base_time: RowView
    new_time: RowView

    @property
    def ratio(self) -> float:
        """How many times as fast the new machine is."""
        return self.base_time.median_ns / self.new_time.median_ns


def machine_ratios(base: RunRecord, new: RunRecord) -> Iterator[MachineRatio]:
    """What both measured: the same workload, dtype included, by the same implementation with the same optimizations."""
    old = _fastest(base.rows)
    for key, (row, time) in _fastest(new.rows).items():
        if key in old:
            other, other_time = old[key]
            yield MachineRatio(base=other.case, new=row.case, base_time=other_time, new_time=time)


def _fastest(rows: Iterable[Row]) -> dict[str, tuple[Row, RowView]]:
    found: dict[str, tuple[Row, RowView]] = {}
    for row in rows:
        if not is_quotable(row):
            continue
        time = measured_view(row)
        key = row.case.model_copy(update={"backend": None}).case_id
        if key not in found or time.median_ns < found[key][1].median_ns:
            found[key] = row, time
    return found

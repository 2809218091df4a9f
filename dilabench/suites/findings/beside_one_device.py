"""Parallel rows and the single-device rows of the same workload."""

from collections.abc import Sequence
from dataclasses import dataclass

from dilabench.compare.view import measured_view, view_of
from dilabench.record import Row, RunRecord
from dilabench.units import speedup

MODES = ("forward", "backward", "both")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A parallel implementation on one workload, and the single device: rows by mode, with at least one common mode."""

    parallel: dict[str, Row]
    single: dict[str, Row]

    @property
    def row(self) -> Row:
        """The row that gives the efficiency: forward and backward together if measured."""
        return self.parallel[self._mode]

    @property
    def single_row(self) -> Row:
        """The single device's row in the same mode."""
        return self.single[self._mode]

    @property
    def efficiency(self) -> float:
        """T_single / (P · T_parallel)."""
        return self.gain / self.row.case.world_size

    @property
    def gain(self) -> float:
        """T_single / T_parallel."""
        return speedup(measured_view(self.single_row).median_ns, measured_view(self.row).median_ns)

    def gain_in(self, mode: str) -> float | None:
        """The same in one mode; None unless both were measured in it."""
        if mode not in self.parallel or mode not in self.single:
            return None
        return speedup(measured_view(self.single[mode]).median_ns, measured_view(self.parallel[mode]).median_ns)

    @property
    def _mode(self) -> str:
        return next(mode for mode in reversed(MODES) if mode in self.parallel and mode in self.single)


def comparisons(record: RunRecord) -> tuple[Comparison, ...]:
    """Every parallel implementation per workload (whatever the mode) and number of ranks, in the record's order.

    If several single-device rows were measured, the one with the same backend is used.
    """
    singles: dict[tuple[str, str], list[Row]] = {}
    parallels: dict[str, list[Row]] = {}
    for row in record.rows:
        if view_of(row) is None:
            continue
        if row.case.world_size == 1:
            singles.setdefault(_function(row), []).append(row)
        else:
            others = row.case.model_dump_json(exclude={"workload"})
            parallels.setdefault("|".join((*_function(row), others)), []).append(row)
    compared = (
        Comparison(
            {row.case.workload.mode: row for row in rows},
            _same_backend(singles.get(_function(rows[0]), ()), rows[0].case.backend),
        )
        for rows in parallels.values()
    )
    return tuple(comparison for comparison in compared if comparison.parallel.keys() & comparison.single.keys())


def _function(row: Row) -> tuple[str, str]:
    """A key that is equal for rows that compute the same function, in any mode."""
    return row.case.workload.replace(mode="both").model_dump_json(), row.planned.takes


def _same_backend(rows: Sequence[Row], backend: str | None) -> dict[str, Row]:
    alike = [row for row in rows if row.case.backend == backend] or rows
    return {row.case.workload.mode: row for row in alike}

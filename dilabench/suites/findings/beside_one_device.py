"""Parallel rows and the single-device rows of the same workload, of which the fastest is the base."""

from collections.abc import Sequence
from dataclasses import dataclass

from dilabench.comparison.view import is_quotable, measured_view, view_of
from dilabench.record import Row, RunRecord
from dilabench.units import speedup

MODES = ("forward", "backward", "both")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A parallel implementation on one workload: rows by mode, at least one of which a single device has.

    singles: each single-device implementation's rows by mode. single: in each mode the fastest of them.
    """

    parallel: dict[str, Row]
    singles: tuple[dict[str, Row], ...]
    single: dict[str, Row]

    @property
    def row(self) -> Row:
        """The row that gives the efficiency: forward and backward together if measured."""
        return self.parallel[self._mode]

    @property
    def single_row(self) -> Row:
        """The fastest single-device row in the same mode, which efficiency and gain refer to."""
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
    """Every parallel implementation per workload (in any mode) and number of ranks, in the record's order.

    A single-device row whose time cannot be true is never the base.
    """
    singles: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    parallels: dict[str, list[Row]] = {}
    for row in record.rows:
        if view_of(row) is None:
            continue
        if row.case.world_size == 1:
            alike = singles.setdefault(_function(row), {}).setdefault(_way(row), {})
            alike[row.case.workload.mode] = row
        else:
            parallels.setdefault("|".join((*_function(row), _way(row))), []).append(row)
    compared = []
    for rows in parallels.values():
        alone = tuple(singles.get(_function(rows[0]), {}).values())
        compared.append(Comparison({row.case.workload.mode: row for row in rows}, alone, _fastest(alone)))
    return tuple(comparison for comparison in compared if comparison.parallel.keys() & comparison.single.keys())


def _function(row: Row) -> tuple[str, str]:
    """A key that is equal for rows that compute the same function, in any mode."""
    return row.case.workload.replace(mode="both").model_dump_json(), row.planned.takes


def _way(row: Row) -> str:
    """A key that is equal for rows of one implementation over one backend, with the same optimizations and ranks."""
    return row.case.model_dump_json(exclude={"workload"})


def _fastest(singles: Sequence[dict[str, Row]]) -> dict[str, Row]:
    """In each mode the row with the smallest median."""
    fastest: dict[str, Row] = {}
    for mode in MODES:
        rows = [by_mode[mode] for by_mode in singles if mode in by_mode and is_quotable(by_mode[mode])]
        if rows:
            fastest[mode] = min(rows, key=lambda row: measured_view(row).median_ns)
    return fastest

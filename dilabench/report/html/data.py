"""The data for the scripts of the page: rows, workloads, notes and samples, as compact JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dilabench.comparison.view import first_timing, view_of
from dilabench.metadata import COPY_KEY, COUNTERS, note_text, peak_flops
from dilabench.record import Failed, Measured, Row, RunRecord, Skipped, Slot
from dilabench.report.columns import Column, DisplayRow, implementation_text
from dilabench.report.content import WorkloadTable
from dilabench.report.findings import BarPlot, CurvePlot, Plot
from dilabench.report.html.commands import quoted, row_command
from dilabench.report.html.winners import family
from dilabench.units import format_bytes, format_seconds
from dilabench.workload.lower_bounds import least_bytes, least_flops

# Limits on the raw samples in the page: above the first, only the medians of slots are shown; above the second, none.
MOST_SAMPLES = 120_000
PARTS = {
    "inputs": "inputs_bytes",
    "parameters": "parameters_bytes",
    "saved for backward": "saved_for_backward_bytes",
    "workspace": "workspace_bytes",
}


class PageData:
    """Collects rows; texts that many rows share are held once and referred to by their number."""

    def __init__(self, record: RunRecord, tables: Sequence[WorkloadTable], columns: Sequence[Column]) -> None:
        self._record = record
        self._columns = columns
        self._texts: dict[str, int] = {}
        self._workloads: list[dict[str, Any]] = []
        self._form = _sample_form(record)
        self._rows = [self._row(line, table) for table in tables for line in table.rows]

    def as_json(self, plots: Mapping[str, Plot]) -> str:
        """The data as JSON that is safe inside a script element."""
        document = {
            "columns": [column.name for column in self._columns],
            "rows": self._rows,
            "workloads": self._workloads,
            "texts": list(self._texts),
            "parts": list(PARTS),
            "ceilings": _ceilings(self._record),
            "samples": self._form,
            "command": "dilabench",
            "plots": {key: _plot(plot) for key, plot in plots.items()},
        }
        return _in_script(document)

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _row(self, line: DisplayRow, table: WorkloadTable) -> dict[str, Any]:
        row = line.row
        entry: dict[str, Any] = {
            "w": self._workload(row, table),
            "c": [column.text(line) for column in self._columns],
            "i": self._text(implementation_text(row.case)),
            "s": line.status,
            **({"best": 1} if line.fastest else {}),
            **({"role": row.planned.role} if row.planned.role == "yardstick" else {}),
            **self._figures(row),
            "d": self._details(row),
        }
        if command := row_command(row, self._record):
            entry["cmd"], entry["args"] = self._text(quoted(command[0])), self._text(quoted(command[1]))
        if samples := self._samples(row):
            entry["t"] = samples
        return entry

    def _workload(self, row: Row, table: WorkloadTable) -> int:
        workload = row.case.workload
        entry = {
            "title": table.title,
            "family": family(table),
            "n": workload.seq_len,
            "batch": workload.batch_size,
            "dtype": workload.dtype,
        }
        # Rows of a workload are adjacent.
        if not self._workloads or self._workloads[-1] != entry:
            self._workloads.append(entry)
        return len(self._workloads) - 1

    def _figures(self, row: Row) -> dict[str, Any]:
        view = view_of(row)
        if view is None:
            return {}
        entry: dict[str, Any] = {
            "m": view.median_ns,
            "tps": _short(view.tokens_per_s),
            "tf": _short(view.tflops_per_s),
        }
        if view.interval:
            entry |= {"lo": _short(view.interval.low), "hi": _short(view.interval.high)}
        if view.memory:
            entry |= {"p": view.peak_bytes, "parts": [getattr(view.memory, name) for name in PARTS.values()]}
        if self._record.ceilings and row.case.world_size == 1:
            # Work that no implementation can avoid per byte that none can avoid, and the rate at which it was done.
            work = least_flops(row.case.workload)
            entry["ai"] = _short(work / least_bytes(row.case.workload))
            entry["fs"] = _short(work / view.median_ns * 1e9)
        return entry

    def _details(self, row: Row) -> dict[str, Any]:
        outcome = row.outcome
        details: dict[str, Any] = {}
        if isinstance(outcome, Skipped | Failed):
            details["why"] = self._text(outcome.why)
            details["code"] = outcome.code
        if isinstance(outcome, Failed):
            details["stage"] = outcome.stage
            broken = (
                [check for check in outcome.verification.checks if not check.passed] if outcome.verification else []
            )
            details["checks"] = [check.text for check in broken]
            if outcome.traceback:
                details["traceback"] = self._text(outcome.traceback)
        if isinstance(outcome, Measured):
            details["notes"] = [self._text(note_text(note)) for note in outcome.notes]
            details["facts"] = [(self._text(name), self._text(text)) for name, text in _facts(outcome)]
        details["labels"] = [(self._text(name), self._text(text)) for name, text in row.planned.labels.items()]
        return {name: value for name, value in details.items() if value not in ([], None)}

    def _samples(self, row: Row) -> list[list[Any]]:
        """[session, samples, clock, power] of each slot of the timing that is shown."""
        timing = first_timing(row)
        if timing is None or self._form == "none":
            return []
        return [_turn(slot, self._form) for slot in timing.slots if slot.samples_ns]


def _sample_form(record: RunRecord) -> str:
    timings = [timing for row in record.rows if (timing := first_timing(row))]
    if sum(len(slot.samples_ns) for timing in timings for slot in timing.slots) <= MOST_SAMPLES:
        return "all"
    return "medians" if sum(len(timing.slots) for timing in timings) <= MOST_SAMPLES else "none"


def _turn(slot: Slot, form: str) -> list[Any]:
    samples = list(slot.samples_ns)
    turn = [slot.session, samples if form == "all" else [sorted(samples)[len(samples) // 2]]]
    if slot.sm_clock_mhz is None and slot.power_mw is None:
        return turn
    return [*turn, slot.sm_clock_mhz, None if slot.power_mw is None else round(slot.power_mw / 1e3)]


def _facts(outcome: Measured) -> list[tuple[str, str]]:
    verification = outcome.verification
    checks = f"{sum(check.passed for check in verification.checks)} of {len(verification.checks)} checks passed"
    rows = "all rows" if verification.sampled_rows is None else f"{verification.sampled_rows} sampled rows"
    against = f", every row against {verification.against}" if verification.against else ""
    facts = [("verified", f"{checks}, {rows}{against}")]
    facts += [(f"set-up: {name}", format_seconds(time * 1e-9)) for name, time in outcome.setup_ns.items()]
    if outcome.memory:
        for name, field in PARTS.items():
            if (size := getattr(outcome.memory, field)) is not None:
                facts.append((f"memory: {name}", format_bytes(size)))
    for key, count in outcome.counters.items():
        facts.append((key, COUNTERS[key].shown(count) if key in COUNTERS else str(count)))
    facts += [
        ("kernel", f"{use.name} ({use.count} x, {format_seconds(use.duration_ns * 1e-9)})") for use in outcome.kernels
    ]
    return facts


def _ceilings(record: RunRecord) -> dict[str, Any]:
    """FLOP/s by dtype and bytes/s of a copy, as this device reached them in this run."""
    dtypes = {row.case.workload.dtype for row in record.rows}
    return {
        "flops": {dtype: peak for dtype in sorted(dtypes) if (peak := peak_flops(record.ceilings, dtype)) is not None},
        "bytes": record.ceilings.get(COPY_KEY),
    }


def plots_as_json(plots: Mapping[str, Plot]) -> str:
    """Plots alone, for a page without rows. Their x counts runs, so its axis is linear."""
    return _in_script({"plots": {key: {**_plot(plot), "linear_x": True} for key, plot in plots.items()}})


def _in_script(document: dict[str, Any]) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _plot(plot: Plot) -> dict[str, Any]:
    kind = "curves" if isinstance(plot, CurvePlot) else "bars" if isinstance(plot, BarPlot) else "mask"
    return {"kind": kind, **_plain(plot)}


def _plain(value: Any) -> Any:
    """A plot as JSON: fields without a value are omitted, numbers are rounded to the precision of a drawing."""
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    # `fields` takes most of the time for a point of a curve.
    names = getattr(value, "__dataclass_fields__", None)
    if names is None:
        return value
    return {name: _plain(entry) for name in names if (entry := getattr(value, name)) is not None}


def _short(value: float) -> float:
    """Enough digits to draw with."""
    return float(f"{value:.6g}")

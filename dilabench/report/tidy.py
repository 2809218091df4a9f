"""A record as tidy tables: one line per case, or one per sample, with plain values under fixed names and in raw units.

Times are in nanoseconds and sizes in bytes; None marks a missing value. The record's labels have `label_*` columns.
CSV, Parquet (extra `data`) and data frames are written here.
"""

import csv
import functools
import io
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilabench.atomic_file import write_bytes, write_text
from dilabench.comparison.view import locate_rows, memory_of, view_of
from dilabench.errors import EnvironmentNotReady
from dilabench.record import Failed, Measured, Memory, Row, RunRecord, Timing
from dilabench.report.columns import exported, implementation_text
from dilabench.report.content import device_text

if TYPE_CHECKING:
    import pandas

Line = dict[str, Any]
# The peak is a column of tables, too.
TURN = ("session", "round", "position", "sm_clock_mhz", "power_mw", "temperature_c", "throttle")
# A formula begins with one.
_SIGNS = frozenset("=+-@")
MEMORY = tuple(name for name in Memory.model_fields if name.endswith("_bytes") and name != "peak_bytes")


def cases(record: RunRecord) -> list[Line]:
    """One line per case, in the record's order; all lines have the same columns."""
    locate_rows(record.rows)
    labels = sorted({label for row in record.rows for label in row.planned.labels})
    about = {
        "run_id": record.run_id,
        "suite": record.suite,
        "device": record.device,
        "machine": device_text(record),
        "started_at": record.started_at,
    }
    return [
        about | _case(row) | {f"label_{label}": row.planned.labels.get(label) for label in labels}
        for row in record.rows
    ]


def samples(record: RunRecord) -> list[Line]:
    """One line per sample of every timer, in the order taken, with the device's state at the end of its slot."""
    return [
        {**about, **dict(zip(TURN, turn, strict=True)), "sample": index, "time_ns": time_ns}
        for about, timing in _timings(record)
        for turn, times in _turns(timing)
        for index, time_ns in enumerate(times)
    ]


def frame(record: RunRecord, samples_too: bool) -> "pandas.DataFrame":
    """The cases, or with `samples_too` the samples, as a pandas frame. Raises EnvironmentNotReady without pandas."""
    try:
        import pandas
    except ImportError:
        why = "data frames need pandas, which is not installed; pip install 'dilabench[data]', or export with -f csv"
        raise EnvironmentNotReady(why) from None

    return pandas.DataFrame(samples(record) if samples_too else cases(record))


def render_csv(record: RunRecord, folder: Path | None) -> str | None:
    """Write cases.csv into `folder` and print nothing; without a folder, return the text to print."""
    return _csv(cases(record), folder, "cases.csv")


def render_csv_samples(record: RunRecord, folder: Path | None) -> Iterator[str] | None:
    """As `render_csv`, one line per sample, in samples.csv; it is written, or its text is yielded, slot by slot."""
    if folder is None:
        return _samples_text(record)
    write_bytes(folder / "samples.csv", (text.encode() for text in _samples_text(record)))
    return None


def render_parquet(record: RunRecord, folder: Path | None) -> None:
    """Write cases.parquet into `folder`; without one, do nothing. Raises EnvironmentNotReady."""
    _parquet(lambda: cases(record), folder, "cases.parquet")


def render_parquet_samples(record: RunRecord, folder: Path | None) -> None:
    """As `render_parquet`, one line per sample, in samples.parquet."""
    _parquet(lambda: samples(record), folder, "samples.parquet")


def _case(row: Row) -> Line:
    case, planned, outcome = row.case, row.planned, row.outcome
    workload = case.workload
    measured = outcome if isinstance(outcome, Measured) else None
    view, memory = view_of(row), memory_of(row)
    return {
        "case_id": case.case_id,
        "group_id": case.group_id,
        "implementation": case.implementation,
        "optimizations": implementation_text(case).removeprefix(case.implementation).strip(" +") or None,
        "backend": case.backend,
        "requested_backend": planned.requested_backend,
        "role": planned.role,
        "takes": planned.takes,
        "pattern": workload.pattern.label(),
        "batch_size": workload.batch_size,
        "seq_len": workload.seq_len,
        "query_len": workload.rows,
        "num_heads": workload.num_heads,
        "num_kv_heads": workload.num_kv_heads,
        "head_dim": workload.head_dim,
        "value_dim": workload.value_width,
        "softcap": workload.softcap,
        "dtype": workload.dtype,
        "causal": workload.causal,
        "window_left": workload.window[0],
        "window_right": workload.window[1],
        "layout": workload.layout,
        "mode": workload.mode,
        "world_size": case.world_size,
        "tokens": workload.tokens,
        "status": outcome.status,
        "code": None if isinstance(outcome, Measured) else outcome.code,
        "stage": outcome.stage if isinstance(outcome, Failed) else None,
        "why": None if isinstance(outcome, Measured) else outcome.why,
        "verified_rows": measured.verification.sampled_rows if measured else None,
        "notes": ";".join(dict.fromkeys(note.code for note in measured.notes)) or None if measured else None,
        **exported(view),
        **{name: getattr(memory, name) if memory else None for name in MEMORY},
    }


def _timings(record: RunRecord) -> Iterator[tuple[Line, Timing]]:
    """Every timing with what the lines of all its samples share."""
    for row in record.rows:
        if isinstance(row.outcome, Measured):
            about = {
                "run_id": record.run_id,
                "case_id": row.case.case_id,
                "implementation": row.case.implementation,
                "backend": row.case.backend,
                "seq_len": row.case.workload.seq_len,
                "mode": row.case.workload.mode,
            }
            yield from ((about | {"timer": timing.timer}, timing) for timing in row.outcome.timings)


def _turns(timing: Timing) -> Iterator[tuple[tuple[Any, ...], Sequence[int]]]:
    """For each turn the values of `TURN`, and the times in ns."""
    columns = timing.columns
    *numbers, reasons = map(columns.column, TURN)
    texts = (";".join(reason) or None for reason in reasons)
    return zip(zip(*numbers, texts, strict=True), columns.column("samples_ns"), strict=True)


def _samples_text(record: RunRecord) -> Iterator[str]:
    """The CSV of all samples in parts: what the lines of a timing or a turn share is written once and repeated."""
    for number, (about, timing) in enumerate(_timings(record)):
        if number == 0:
            yield f"{','.join((*about, *TURN))},sample,time_ns\n"
        shared = _csv_line(tuple(about.values()))
        for (*numbers, reasons), times in _turns(timing):
            state = ",".join(["" if value is None else str(value) for value in numbers])
            start = f"{shared},{state},{_csv_line((reasons,))}"
            yield "".join([f"{start},{index},{time_ns}\n" for index, time_ns in enumerate(times)])


@functools.lru_cache(maxsize=64)
def _csv_line(values: tuple[Any, ...]) -> str:
    text = io.StringIO()
    # A line of one empty value would be written as a pair of quotes.
    csv.writer(text, lineterminator="").writerow([*map(_cell, values), "."])
    return text.getvalue().removesuffix(",.")


def _csv(lines: Sequence[Line], folder: Path | None, filename: str) -> str | None:
    text = io.StringIO()
    if lines:
        writer = csv.DictWriter(text, lines[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)
    if folder is None:
        return text.getvalue()
    write_text(folder / filename, text.getvalue())
    return None


def _cell(value: Any) -> Any:
    """A value that no spreadsheet takes for a formula: text that begins like one gets an apostrophe before it.

    Spreadsheets skip space before the sign, and some take the forms of other scripts (＝) for the sign itself.
    """
    if not isinstance(value, str):
        return value
    sign = unicodedata.normalize("NFKC", value.lstrip()[:1])
    return f"'{value}" if sign in _SIGNS or value.startswith(("\t", "\r", "\n")) else value


def _parquet(lines: Callable[[], Sequence[Line]], folder: Path | None, filename: str) -> None:
    if folder is None:
        return
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise EnvironmentNotReady(
            "Parquet files need pyarrow, which is not installed; pip install 'dilabench[data]', or take -f csv"
        ) from None
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(lines()), sink)
    write_bytes(folder / filename, sink.getvalue())

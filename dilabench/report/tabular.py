"""The tidy tables as files that other programs load: CSV, and Parquet (extra `data`)."""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from dilabench.atomic_file import write_bytes, write_text
from dilabench.errors import EnvironmentNotReady
from dilabench.record import RunRecord
from dilabench.report import tidy


def render_csv(record: RunRecord, folder: Path | None) -> str | None:
    """Write cases.csv into `folder` and print nothing; without a folder, return the text to print."""
    return _csv(tidy.cases(record), folder, "cases.csv")


def render_csv_samples(record: RunRecord, folder: Path | None) -> str | None:
    """As `render_csv`, one line per sample, in samples.csv."""
    return _csv(tidy.samples(record), folder, "samples.csv")


def render_parquet(record: RunRecord, folder: Path | None) -> None:
    """Write cases.parquet into `folder`; without one there is nothing to do. Raises EnvironmentNotReady."""
    _parquet(lambda: tidy.cases(record), folder, "cases.parquet")


def render_parquet_samples(record: RunRecord, folder: Path | None) -> None:
    """As `render_parquet`, one line per sample, in samples.parquet."""
    _parquet(lambda: tidy.samples(record), folder, "samples.parquet")


def _csv(lines: Sequence[tidy.Line], folder: Path | None, filename: str) -> str | None:
    text = io.StringIO()
    if lines:
        writer = csv.DictWriter(text, lines[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    if folder is None:
        return text.getvalue()
    write_text(folder / filename, text.getvalue())
    return None


def _parquet(lines: Callable[[], Sequence[tidy.Line]], folder: Path | None, filename: str) -> None:
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

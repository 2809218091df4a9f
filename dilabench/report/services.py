"""A record in the formats that continuous-benchmarking services read: Bencher, and github-action-benchmark."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dilabench.atomic_file import write_text
from dilabench.comparison.view import RowView, is_quotable, view_of
from dilabench.record import RunRecord
from dilabench.report.columns import row_name, workload_title
from dilabench.units import format_latency


def render_bencher(record: RunRecord, folder: Path | None) -> str | None:
    """Bencher Metric Format: per row its latency (ns), throughput (tokens/s) and peak memory (bytes).

    `lower_value` and `upper_value` are the ends of the interval. Written as bencher.json into `folder`, else returned.
    """
    document = {name: _metrics(view) for name, view in _quotable(record)}
    return _written(document, folder, "bencher.json")


def render_github_action(record: RunRecord, folder: Path | None) -> str | None:
    """The format `customSmallerIsBetter` of github-action-benchmark: the time of each row, with half its interval."""
    document = [
        {
            "name": name,
            "unit": "ns",
            "value": view.median_ns,
            **({"range": f"± {view.interval.half_width:.0f}"} if view.interval else {}),
            "extra": f"{format_latency(view.median_ns)}, {view.samples} samples, case {view.row.case.case_id}",
        }
        for name, view in _quotable(record)
    ]
    return _written(document, folder, "github-action-benchmark.json")


def _quotable(record: RunRecord) -> Iterator[tuple[str, RowView]]:
    """The rows whose time may be quoted, under names that are unique and stable between runs."""
    views = [view for row in record.rows if is_quotable(row) and (view := view_of(row))]
    names = [f"{row_name(view.row)} / {workload_title(view.row.case)}" for view in views]
    shared = Counter(names)
    for name, view in zip(names, views, strict=True):
        yield (name if shared[name] == 1 else f"{name} / {view.row.case.case_id}"), view


def _metrics(view: RowView) -> dict[str, Any]:
    latency: dict[str, float] = {"value": view.median_ns}
    throughput: dict[str, float] = {"value": view.tokens_per_s}
    if view.interval and view.tokens_per_s_interval:
        latency |= {"lower_value": view.interval.low, "upper_value": view.interval.high}
        throughput |= dict(zip(("lower_value", "upper_value"), view.tokens_per_s_interval, strict=True))
    return {
        "latency": latency,
        "throughput": throughput,
        **({} if view.peak_bytes is None else {"peak-memory": {"value": view.peak_bytes}}),
    }


def _written(document: object, folder: Path | None, filename: str) -> str | None:
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if folder is None:
        return text
    write_text(folder / filename, text)
    return None

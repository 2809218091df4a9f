"""A record in the formats that continuous-benchmarking services read: Bencher, and github-action-benchmark."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dilabench.atomic_file import write_text
from dilabench.compare.ranking import is_quotable
from dilabench.record import Measured, Row, RunRecord
from dilabench.report.rows import location, row_name, workload_title
from dilabench.stats.samples.derive import tokens_per_second
from dilabench.stats.samples.location import Location
from dilabench.units import format_seconds


def render_bencher(record: RunRecord, folder: Path | None) -> str | None:
    """Bencher Metric Format: per row its latency (ns), throughput (tokens/s) and peak memory (bytes).

    `lower_value` and `upper_value` are the ends of the interval. Written as bencher.json into `folder`, else returned.
    """
    document = {name: _metrics(row, found) for name, row, found in _quotable(record)}
    return _written(document, folder, "bencher.json")


def render_github_action(record: RunRecord, folder: Path | None) -> str | None:
    """What github-action-benchmark takes as `customSmallerIsBetter`: the time of each row, with half its interval."""
    document = [
        {
            "name": name,
            "unit": "ns",
            "value": found.median_ns,
            **({"range": f"± {found.interval.half_width:.0f}"} if found.interval else {}),
            "extra": f"{format_seconds(found.median_ns * 1e-9)}, {found.n} samples, case {row.case.case_id}",
        }
        for name, row, found in _quotable(record)
    ]
    return _written(document, folder, "github-action-benchmark.json")


def _quotable(record: RunRecord) -> Iterator[tuple[str, Row, Location]]:
    """The rows whose time may be quoted, under names that differ and stay the same from run to run."""
    rows = [(row, found) for row in record.rows if is_quotable(row) and (found := location(row))]
    names = [f"{row_name(row)} / {workload_title(row.case)}" for row, _ in rows]
    shared = Counter(names)
    for name, (row, found) in zip(names, rows, strict=True):
        yield (name if shared[name] == 1 else f"{name} / {row.case.case_id}"), row, found


def _metrics(row: Row, found: Location) -> dict[str, Any]:
    tokens = row.case.workload.tokens
    latency: dict[str, float] = {"value": found.median_ns}
    throughput: dict[str, float] = {"value": tokens_per_second(tokens, found.median_ns)}
    if found.interval:
        latency |= {"lower_value": found.interval.low, "upper_value": found.interval.high}
        # The longest time is the lowest rate.
        throughput["lower_value"] = tokens_per_second(tokens, found.interval.high)
        throughput["upper_value"] = tokens_per_second(tokens, found.interval.low)
    assert isinstance(row.outcome, Measured)
    memory = row.outcome.memory
    return {
        "latency": latency,
        "throughput": throughput,
        **({"peak-memory": {"value": memory.peak_bytes}} if memory else {}),
    }


def _written(document: object, folder: Path | None, filename: str) -> str | None:
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if folder is None:
        return text
    write_text(folder / filename, text)
    return None

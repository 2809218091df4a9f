"""What the pytest fixture timed, as pytest-benchmark's JSON."""

import json
import platform
import statistics
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Protocol

import dilabench


class TimedFunction(Protocol):
    """A function's name and its samples, in ns per call."""

    @property
    def name(self) -> str:
        """The function."""
        ...

    @property
    def samples_ns(self) -> tuple[int, ...]:
        """Each sample."""
        ...


def as_json(timed: Iterable[tuple[str, TimedFunction]]) -> str:
    """The document for pairs of a test's node id and what it timed; times are in seconds there."""
    document = {
        "machine_info": {
            "node": platform.node(),
            "processor": platform.processor(),
            "machine": platform.machine(),
            "python_version": platform.python_version(),
            "system": platform.system(),
        },
        "commit_info": {},
        "benchmarks": [_entry(node, one) for node, one in timed],
        "datetime": datetime.now(UTC).isoformat(),
        "version": f"dilabench {dilabench.__version__}",
    }
    return json.dumps(document, indent=1) + "\n"


def _entry(node: str, one: TimedFunction) -> dict[str, Any]:
    test = node.rpartition("::")[2]
    return {
        "group": None,
        "name": f"{test}: {one.name}",
        "fullname": f"{node}: {one.name}",
        "params": None,
        "param": None,
        "extra_info": {},
        "options": {},
        "stats": _stats([sample * 1e-9 for sample in one.samples_ns]),
    }


def _stats(seconds: list[float]) -> dict[str, Any]:
    several = len(seconds) > 1
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if several else seconds * 3
    mean = statistics.fmean(seconds)
    return {
        "min": min(seconds),
        "max": max(seconds),
        "mean": mean,
        "stddev": statistics.stdev(seconds) if several else 0.0,
        "rounds": len(seconds),
        "median": median,
        "iqr": high - low,
        "q1": low,
        "q3": high,
        "ops": 1 / mean,
        "total": sum(seconds),
        "iterations": 1,
        "data": seconds,
    }

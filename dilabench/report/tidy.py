"""A record as tidy tables: one line per case, or one per sample, with plain values under fixed names and in raw units.

Times are in nanoseconds and sizes in bytes; None stands where there is nothing. `label_*` columns are there for the
labels that the record has. CSV, Parquet, data frames and the HTML report all read this.
"""

from collections.abc import Iterator
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from dilabench.errors import EnvironmentNotReady
from dilabench.record import Failed, Measured, Memory, Row, RunRecord
from dilabench.report.rows import first_timing, implementation_text, location
from dilabench.report.summary import device_text
from dilabench.stats.samples.derive import tflops_per_second, tokens_per_second
from dilabench.stats.samples.location import quantile
from dilabench.workload.work import flops

if TYPE_CHECKING:
    import pandas

Line = dict[str, Any]
MEMORY = tuple(name for name in Memory.model_fields if name.endswith("_bytes"))
TIMES = (
    "timer",
    "samples",
    "sessions",
    "median_ns",
    "ci_low_ns",
    "ci_high_ns",
    "ci_confidence",
    "p25_ns",
    "p75_ns",
    "mean_ns",
    "std_ns",
    "min_ns",
    "tokens_per_s",
    "tflops_per_s",
)


def cases(record: RunRecord) -> list[Line]:
    """One line per case, in the record's order; all lines have the same columns."""
    labels = sorted({label for row in record.rows for label in row.planned.labels})
    about = {
        "run_id": record.run_id,
        "suite": record.suite,
        "device": record.device,
        "machine": device_text(record),
        "started_at": record.started_at,
    }
    return [about | _case(row) | {f"label_{one}": row.planned.labels.get(one) for one in labels} for row in record.rows]


def samples(record: RunRecord) -> list[Line]:
    """One line per sample of every timer, in the order taken, with the device's state at the end of its turn."""
    return [line for row in record.rows for line in _samples(record, row)]


def frame(record: RunRecord, samples_too: bool = False) -> "pandas.DataFrame":
    """The cases, or with `samples_too` the samples, as a pandas frame. Raises EnvironmentNotReady without pandas."""
    try:
        import pandas
    except ImportError:
        why = "data frames need pandas, which is not installed; pip install 'dilabench[data]', or export with -f csv"
        raise EnvironmentNotReady(why) from None

    return pandas.DataFrame(samples(record) if samples_too else cases(record))


def _case(row: Row) -> Line:
    case, planned, outcome = row.case, row.planned, row.outcome
    workload = case.workload
    measured = outcome if isinstance(outcome, Measured) else None
    memory = measured.memory if measured else None
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
        "num_heads": workload.num_heads,
        "num_kv_heads": workload.num_kv_heads,
        "head_dim": workload.head_dim,
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
        **dict.fromkeys(TIMES),
        **_times(row),
        **{name: getattr(memory, name) if memory else None for name in MEMORY},
    }


def _times(row: Row) -> Line:
    timing, found = first_timing(row), location(row)
    if timing is None or found is None:
        return {}
    taken = timing.samples_ns
    tokens = row.case.workload.tokens
    return {
        "timer": timing.timer,
        "samples": len(taken),
        "sessions": len({slot.session for slot in timing.slots}),
        "median_ns": found.median_ns,
        "ci_low_ns": found.interval.low if found.interval else None,
        "ci_high_ns": found.interval.high if found.interval else None,
        "ci_confidence": found.interval.confidence if found.interval else None,
        "p25_ns": found.p25_ns,
        "p75_ns": quantile(np.sort(np.asarray(taken, np.float64)), 0.75),
        "mean_ns": fmean(taken),
        "std_ns": stdev(taken) if len(taken) > 1 else None,
        "min_ns": min(taken),
        "tokens_per_s": tokens_per_second(tokens, found.median_ns),
        "tflops_per_s": tflops_per_second(flops(row.case.workload), found.median_ns),
    }


def _samples(record: RunRecord, row: Row) -> Iterator[Line]:
    if not isinstance(row.outcome, Measured):
        return
    about = {
        "run_id": record.run_id,
        "case_id": row.case.case_id,
        "implementation": row.case.implementation,
        "backend": row.case.backend,
        "seq_len": row.case.workload.seq_len,
        "mode": row.case.workload.mode,
    }
    for timing in row.outcome.timings:
        for slot in timing.slots:
            turn = {
                "timer": timing.timer,
                "session": slot.session,
                "round": slot.round,
                "position": slot.position,
                "sm_clock_mhz": slot.sm_clock_mhz,
                "power_mw": slot.power_mw,
                "temperature_c": slot.temperature_c,
                "throttle": ";".join(slot.throttle) or None,
            }
            for index, sample in enumerate(slot.samples_ns):
                yield {**about, **turn, "sample": index, "time_ns": sample}

"""The command that measures one row of a record again, alone."""

import shlex
from collections.abc import Iterator

from dilabench.patterns.registry import pattern_type
from dilabench.record import Optimizations, Row, RunRecord
from dilabench.request import SWITCHES, assignment, measuring_options
from dilabench.retired import is_retired
from dilabench.workload.spec import WorkloadRequest

# The suite that measures only the requested cases.
SUITE = "implementations"


def row_command(row: Row, record: RunRecord) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The arguments after `dilabench` that name the row, and those that name its workload.

    None if only a suite's own search or an older record knows how the row came to be, or if the implementation was
    removed.
    """
    asked = row.planned.requested_workload
    switches = _switches(row.case.optimizations)
    if asked is None or switches is None or row.planned.procedure != "interleaved":
        return None
    if is_retired("implementation", row.case.implementation):
        return None
    return ("run", SUITE, "-i", row.case.implementation, *_where(row, record), *switches), tuple(_workload(asked, row))


def _where(row: Row, record: RunRecord) -> Iterator[str]:
    if row.case.backend:
        yield from ("-b", row.case.backend)
    if row.case.world_size > 1:
        yield from ("--nproc", str(row.case.world_size))
    yield from ("--device", record.device.partition(":")[0])
    # Alone, the row has the time that all had together: the suite's own budget may be less.
    yield from measuring_options({**record.config, "seed": record.seed})


def _switches(chosen: Optimizations) -> tuple[str, ...] | None:
    changed = chosen.model_dump(exclude_defaults=True)
    found = [SWITCHES[name].get(value) if name in SWITCHES else None for name, value in changed.items()]
    return None if None in found else tuple(filter(None, found))


def _workload(asked: WorkloadRequest, row: Row) -> Iterator[str]:
    """The requested settings that differ from the default; batch, dtype and length as resolved."""
    effective = row.case.workload
    exact = {"batch_size": effective.batch_size, "seq_len": effective.seq_len, "dtype": effective.dtype}
    # A request has no fields that are None.
    added = {name: getattr(effective, name) for name in ("query_len", "value_dim", "softcap")}
    exact |= {name: value for name, value in added.items() if value is not None}
    # A request may carry fields of other patterns, too, for the suites that want them.
    own = pattern_type(asked.pattern).request_model()
    usual = {**WorkloadRequest().model_dump(mode="json"), **own().model_dump(mode="json")}
    for name, value in {**asked.model_dump(mode="json"), **exact}.items():
        if name in exact or (name in usual and value != usual[name]):
            yield from ("--set", assignment(name, value))


def quoted(arguments: tuple[str, ...]) -> str:
    """The arguments as a shell reads them."""
    return shlex.join(arguments)

"""Labels of cases that are measured alone: a process of their own, one set of inputs, sampled rows verified."""

from dilabench.record import PlannedCase, Row, Skipped

PROCEDURE = "procedure"
ALONE = "alone"
MEMORY_LIMIT = "memory_limit_bytes"
DOES_NOT_FIT = "does not fit into memory"


def alone_labels(memory_limit_bytes: int | None, **labels: str) -> dict[str, str]:
    """The labels of such a case; the limit is what its process may allocate beyond what it starts with."""
    limit = {} if memory_limit_bytes is None else {MEMORY_LIMIT: str(memory_limit_bytes)}
    return {PROCEDURE: ALONE, **limit, **labels}


def is_measured_alone(planned: PlannedCase) -> bool:
    """Whether the runner takes the case by itself."""
    return planned.labels.get(PROCEDURE) == ALONE


def memory_limit_bytes(planned: PlannedCase) -> int | None:
    """The limit that was asked for."""
    text = planned.labels.get(MEMORY_LIMIT)
    return None if text is None else int(text)


def did_not_fit(row: Row) -> bool:
    """Whether memory ran out, in a real run."""
    return isinstance(row.outcome, Skipped) and row.outcome.why.startswith(DOES_NOT_FIT)

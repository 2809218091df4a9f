"""Which cases a text names."""

from collections.abc import Callable, Collection, Sequence

from dilabench.record import Case

Selection = Callable[[Case], bool]


def everything(case: Case) -> bool:  # noqa: ARG001
    """The selection of every case."""
    return True


def selection(texts: Sequence[str], implementations: Collection[str] = (), backends: Collection[str] = ()) -> Selection:
    """Cases that contain any of the texts in their name; all words of one text must be there, in any order.

    The name holds implementation, backend, shape label, pattern, mode and case id, so that "strided 8K fp32" works.
    Implementations and backends that are named narrow that to theirs.
    """
    if not texts and not implementations and not backends:
        return everything
    wanted = [text.lower().split() for text in texts] or [[]]
    return lambda case: (
        (not implementations or case.implementation in implementations)
        and (not backends or case.backend in backends)
        and any(all(word in searchable(case) for word in words) for words in wanted)
    )


def searchable(case: Case) -> str:
    """The text in which a selection looks."""
    workload = case.workload
    parts = (case.implementation, case.backend or "", workload.label(), workload.pattern.kind, workload.mode)
    return " ".join((*parts, case.case_id)).lower()

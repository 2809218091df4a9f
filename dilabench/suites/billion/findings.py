"""Suite `billion`: how many tokens were really computed, in which form, and what that would make of 2^30."""

from collections.abc import Sequence
from typing import Any

from dilabench.compare.view import tokens_per_second
from dilabench.metadata import FORM, STREAM_PIECES
from dilabench.record import Measured, Row, RunRecord
from dilabench.report import figures
from dilabench.report.columns import implementation_text
from dilabench.report.findings import Section
from dilabench.suites.billion.cases import BILLION
from dilabench.units import format_bytes, format_count, format_seconds

COLUMNS = (
    "implementation",
    "form",
    "tokens computed",
    "part of 2^30",
    "time in calls",
    "tok/s",
    "peak mem.",
    "verified rows",
)
NUMERIC = frozenset(COLUMNS[2:])


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """One line per measured row, in the words of its form."""
    rows = [row for row in record.rows if FORM.of(row.planned) and isinstance(row.outcome, Measured)]
    if not rows:
        return ()
    row = max(rows, key=computed_tokens)
    tokens = computed_tokens(row)
    sentence = _how(row).format(format_count(tokens)) + f": {tokens / BILLION:.3g} of a billion (2^30)."
    lines = tuple(_line(row) for row in rows)
    return (
        Section(title="Tokens computed", sentence=sentence, columns=COLUMNS, rows=lines, numeric=NUMERIC, answers=True),
    )


def project(record: RunRecord) -> tuple[dict[str, Any], ...]:
    """What 2^30 tokens would take at the rate of a stream that processed fewer: pieces are independent, so linear."""
    found = []
    for row in record.rows:
        tokens = computed_tokens(row)
        if _pieces(row) and tokens < BILLION:
            found.append(
                {
                    "kind": "projection",
                    "case_id": row.case.case_id,
                    "tokens": BILLION,
                    "seconds": _calls_ns(row) * 1e-9 * BILLION / tokens,
                    "from_tokens": tokens,
                    "method": "time in calls per token of the stream, times 2^30; nothing of this was measured",
                }
            )
    return tuple(found)


def computed_tokens(row: Row) -> int:
    """Tokens that really went through calls that were timed: those of the stream, or of the one sequence."""
    return (_pieces(row) or 1) * row.case.workload.tokens if isinstance(row.outcome, Measured) else 0


def _how(row: Row) -> str:
    ranks = row.case.world_size
    if _pieces(row):
        return "Streamed, {} tokens processed"
    if ranks > 1:
        return f"Resident over {ranks} ranks, {{}} tokens as one sequence in their memories"
    return "Resident, {} tokens as one sequence in memory"


def _form(row: Row) -> str:
    if _pieces(row):
        return "streamed"
    return "resident" if row.case.world_size == 1 else f"resident over {row.case.world_size} ranks"


def _pieces(row: Row) -> int:
    return STREAM_PIECES.of(row.outcome) or 0


def _samples_ns(row: Row) -> Sequence[int]:
    return row.outcome.timings[0].samples_ns if isinstance(row.outcome, Measured) and row.outcome.timings else ()


def _calls_ns(row: Row) -> float:
    """Time in calls: all pieces of a stream; of a resident sequence the mean of its calls."""
    samples = _samples_ns(row)
    return sum(samples) if _pieces(row) else sum(samples) / max(1, len(samples))


def _line(row: Row) -> tuple[str, ...]:
    assert isinstance(row.outcome, Measured)
    tokens, spent_ns, memory = computed_tokens(row), _calls_ns(row), row.outcome.memory
    rows = row.outcome.verification.sampled_rows
    return (
        implementation_text(row.case),
        _form(row),
        format_count(tokens),
        f"{tokens / BILLION:.3g}",
        format_seconds(spent_ns * 1e-9),
        figures.decimal(tokens_per_second(tokens, spent_ns)),
        format_bytes(memory.peak_bytes) if memory else figures.ABSENT,
        "all" if rows is None else str(rows),
    )

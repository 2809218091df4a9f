"""From a comparison to an exit code, and the second look that flagged cells get before they fail anything."""

from collections.abc import Collection
from dataclasses import replace

from dilabench.compare.comparison import ComparedCell, Comparison
from dilabench.errors import ExitCode
from dilabench.stats.decisions.verdicts import Code, confirm


def exit_code(comparison: Comparison, fail_on: Collection[str] = ("slower", "larger")) -> ExitCode:
    """The gravest thing that a comparison found. `fail_on` may hold "slower", "larger" and "inconclusive".

    Wrong output counts always, and so does a case that the baseline had measured and that now fails. Slower cells
    (never advisory ones) and larger peaks count as regressions; `inconclusive` also counts cells without a verdict that
    the baseline has. Without a single pair nothing was compared.
    """
    rest, cells = comparison.uncompared, comparison.cells
    if any(one.lack == "wrong output" for one in rest):
        return ExitCode.WRONG_OUTPUT
    if any(one.lack == "failed" and one.regressed for one in rest):
        return ExitCode.CASE_FAILED
    if not cells:
        return ExitCode.NOTHING_MEASURED
    if "slower" in fail_on and any(cell.verdict.fails_gate for cell in cells):
        return ExitCode.REGRESSION
    if "larger" in fail_on and any(cell.memory is not None and cell.memory.fails_gate for cell in cells):
        return ExitCode.REGRESSION
    undecided = any(cell.verdict.code is Code.INCONCLUSIVE for cell in cells) or any(one.regressed for one in rest)
    return ExitCode.INCONCLUSIVE if "inconclusive" in fail_on and undecided else ExitCode.OK


def confirmed(first: Comparison, second: Comparison | None) -> Comparison:
    """The comparison that counts: cells flagged at first have the verdict of the second data alone.

    A flagged cell that the second comparison lacks is inconclusive, and what went wrong with it there is told.
    """
    again = {cell.candidate.case_id: cell for cell in second.cells} if second else {}
    flagged = {case.case_id for case in first.flagged}
    cells = [_decided(cell, again.get(cell.candidate.case_id)) for cell in first.cells]
    extra = [one for one in second.uncompared if one.case.case_id in flagged] if second else []
    warnings = dict.fromkeys([*first.warnings, *(second.warnings if second else ())])
    return Comparison(cells=tuple(cells), uncompared=(*first.uncompared, *extra), warnings=tuple(warnings))


def _decided(first: ComparedCell, second: ComparedCell | None) -> ComparedCell:
    if not first.verdict.flagged:
        return first
    verdict = confirm(first.verdict, second.verdict if second else None)
    note = f"first look: {first.verdict.reason}"
    return replace(first, verdict=verdict, notes=(note, *first.notes))

"""Records of older schema versions, brought up to date one version at a time. No torch.

Only this module reads the texts of old rows: it turns them into codes, types and numbers.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from dilabench.errors import ConfigError
from dilabench.metadata import COUNTERS, LABELS, NOTES, TIMER_UNUSABLE, VARIANT
from dilabench.record import SCHEMA_VERSION, FailureCode, MemorySource, Role, SkipCode
from dilabench.version import __version__

Document = dict[str, Any]
Step = Callable[[Document], Document]

# How the reasons of schema 1.0 began, in the order of the checks; any other reason means "not supported".
_SKIPPED: tuple[tuple[re.Pattern[str], SkipCode], ...] = (
    (re.compile(r"budget of "), "budget"),
    (re.compile(r"does not fit into memory"), "out_of_memory"),
    (re.compile(r"needs (about|at least) .* of memory, this device has "), "does_not_fit"),
    (re.compile(r"torch\.compile|a CUDA graph cannot|cuda_graph needs|compile needs"), "unusable_optimization"),
    (re.compile(r"gradient checkpointing saves nothing|inputs are in host memory already"), "not_applicable"),
)
# '(rank 3: )' precedes the message of one of several ranks.
_FAILED: tuple[tuple[re.Pattern[str], FailureCode], ...] = (
    (re.compile(r"claims \S+ but no such kernel ran"), "backend_not_proven"),
    (re.compile(r"(rank \d+: )?(\w+: )?out of memory"), "out_of_memory"),
    (re.compile(r"(rank \d+: )?no answer to |.* did not reach rank 0 within "), "timeout"),
    (re.compile(r".*(the worker process\b.* died|killed by SIG|\bis gone \()"), "crash"),
    (re.compile(r"timer '.*' was not used"), "no_samples"),
)
# How the method of a peak began if it was not the resident set of the process.
_SOURCES: Mapping[str, MemorySource] = {"torch.cuda": "allocator", "ru_maxrss": "process_peak"}
# The roles that implementations of schema 1.0 had; any other one was a method, or a plug-in's.
_ROLES: Mapping[str, Role] = {"reference": "oracle", "gather": "plain", "gather-multihead": "plain"}


def _with_role(row: Document) -> Document:
    """Turn role and inputs, which were labels, into fields; a plain method was known by its name."""
    planned = row["planned"]
    if "role" in planned:
        return row
    labels = dict(planned.get("labels", {}))
    known_role = _ROLES.get(planned["case"]["implementation"], "method")
    role = "yardstick" if labels.pop("role", None) == "yardstick" else known_role
    return {**row, "planned": {**planned, "role": role, "takes": labels.pop("takes", "heads"), "labels": labels}}


def _codes_and_fields(row: Document) -> Document:
    """Reasons get codes; procedure, limits and ways of counting were texts; keys of plug-ins get a namespace."""
    planned, outcome = dict(row["planned"]), dict(row["outcome"])
    labels = dict(planned.get("labels", {}))
    if labels.pop("procedure", None) is not None:
        planned["procedure"] = "isolated"
    if (limit := labels.pop("memory_limit_bytes", None)) is not None:
        planned["memory_limit_bytes"] = int(limit)
    if "switched on" in labels:
        labels |= VARIANT.entry(labels.pop("switched on"))
    planned["labels"] = _listed(labels, LABELS)
    if isinstance(planned.get("skip"), str):
        planned["skip"] = {"status": "skipped", "code": skip_code(planned["skip"]), "why": planned["skip"]}
    if outcome["status"] == "skipped":
        outcome.setdefault("code", skip_code(outcome["why"]))
    elif outcome["status"] == "failed":
        outcome.setdefault("code", failure_code(outcome["why"], outcome.get("verification")))
    else:
        outcome["counters"] = _listed(outcome.get("counters", {}), COUNTERS)
        codes = [note["code"] for note in outcome.get("notes", ())]
        codes = [TIMER_UNUSABLE.key if code.endswith("_unusable") else _plugins(code, NOTES) for code in codes]
        outcome["notes"] = [{**note, "code": code} for note, code in zip(outcome.get("notes", ()), codes, strict=True)]
        if memory := outcome.get("memory"):
            begins = memory.get("method", "")
            known = (source for start, source in _SOURCES.items() if begins.startswith(start))
            outcome["memory"] = {"source": next(known, "resident_set"), **memory}
    return {**row, "planned": planned, "outcome": outcome}


def skip_code(why: str) -> SkipCode:
    """The code of a case that schema 1.0 skipped for a reason given as text."""
    return next((code for pattern, code in _SKIPPED if pattern.match(why)), "unsupported")


def failure_code(why: str, verification: Document | None) -> FailureCode:
    """The code of a case that failed under schema 1.0, from the text of its reason and its checks."""
    if verification is not None and not (
        verification["checks"] and all(check["passed"] for check in verification["checks"])
    ):
        return "wrong_output"
    return next((code for pattern, code in _FAILED if pattern.match(why)), "exception")


def _listed(entries: Mapping[str, Any], known: Mapping[str, object]) -> Document:
    return {_plugins(key, known): value for key, value in entries.items()}


def _plugins(key: str, known: Mapping[str, object]) -> str:
    """Prefix a key that schema 1.0 stored without its plug-in's name."""
    return key if key in known or ":" in key else f"plugin:{key}"


def _unchanged(row: Document) -> Document:
    """The row itself: the next version only has more keys, or more words for a value."""
    return row


# From each version to the next one, row by row. Rows that the next version wrote stay as they are: a resumed run has
# rows of both below one header.
STEPS: Mapping[str, tuple[Step, str]] = MappingProxyType(
    {
        "1.0": (lambda row: _codes_and_fields(_with_role(row)), "1.1"),
        "1.1": (_unchanged, "1.2"),
        "1.2": (_unchanged, "1.3"),
    }
)


def has_current_rows(version: object) -> bool:
    """Return True if rows of a version are read as they are."""
    while version != SCHEMA_VERSION:
        step, version = STEPS.get(str(version), (None, None))
        if step is not _unchanged:
            return False
    return True


def migrated(
    document: Document, path: Path, steps: Mapping[str, tuple[Step, str]] = STEPS, current: str = SCHEMA_VERSION
) -> Document:
    """A record, or the header of one, as the current version writes it.

    Raises ConfigError for a version that is too new or was never released, and for rows that are none.
    """
    version = str(document.get("schema_version", current))
    try:
        _way(version, path, steps, current)
    except ConfigError as error:
        raise ConfigError(f"{error}{newer_tool(document)}") from None
    changes: Document = {"schema_version": current}
    if isinstance(rows := document.get("rows"), list):
        changes["rows"] = [migrated_row(row, version, path, steps, current) for row in rows]
    return {**document, **changes}


def migrated_row(
    row: Document,
    version: str,
    path: Path,
    steps: Mapping[str, tuple[Step, str]] = STEPS,
    current: str = SCHEMA_VERSION,
) -> Document:
    """A row below a header of the given version. Raises as `migrated` does."""
    for step in _way(version, path, steps, current):
        try:
            row = step(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{str(path)!r} is not what dilabench {version} wrote: {error!r} in a row") from None
    return row


def _way(version: str, path: Path, steps: Mapping[str, tuple[Step, str]], current: str) -> list[Step]:
    way: list[Step] = []
    while version != current:
        if version not in steps:
            newer = _is_newer(version, current)
            way_out = "update dilabench" if newer else "it is not a version that was ever released"
            raise ConfigError(
                f"{str(path)!r} has schema version {version!r:.40}, this dilabench reads up to {current}; {way_out}"
            )
        step, version = steps[version]
        way.append(step)
    return way


def newer_tool(document: object) -> str:
    """A clause on the newer dilabench that wrote a record, as its header says; empty for an older one or none."""
    tool = document.get("tool_version") if isinstance(document, dict) else None
    if not isinstance(tool, str) or not _is_newer(tool, __version__):
        return ""
    return f" (written by dilabench {tool!s:.40}, this is {__version__}: upgrade with `pip install -U dilabench`)"


def _is_newer(version: str, current: str) -> bool:
    try:
        return Version(version) > Version(current)
    except ValueError:
        # Not a version, or one of thousands of digits.
        return False

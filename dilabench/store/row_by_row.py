"""Large records read one row at a time, so that only one row is ever held as JSON's dicts and lists. No torch."""

import gc
import json
import re
from collections.abc import Iterator
from itertools import pairwise

from dilabench.record import SCHEMA_VERSION, Measured, Row, RunRecord, Slot
from dilabench.report.json import SUMMARY
from dilabench.validation import check_counts, check_depth, parsed, read_json

_FIRST_ROW = re.compile(rb'(?<!\\)"rows"\s*:\s*\[\s*(?=\{\s*"planned"\s*:)')
_PLANNED = b'"planned"'
_SLOT_FIELDS = set(Slot.model_fields)


def read_row_by_row(text: bytes) -> RunRecord | None:
    """The record that a JSON text holds, if it is of the current version and its rows begin with "planned".

    None if it differs in any way from what dilabench writes: reading it as a whole then finds the cause.
    Raises ValueError for more rows or values than a record may have.

    The text is one record exactly if each part is valid JSON and so is the text with an empty list of rows.
    """
    check_counts(text)
    found = _FIRST_ROW.search(text)
    if found is None:
        return None
    # Nothing that is made here refers to itself: a collector of cycles would walk through all of it, again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        *inner, (last, rest) = pairwise([*_starts(text, found.end()), len(text)])
        tail = text[last:rest].decode()
        _, end = json.JSONDecoder().raw_decode(tail)
        header = read_json(text[: found.end()] + tail[end:].encode())
        if header.get("rows") != [] or header.get("schema_version") != SCHEMA_VERSION:
            return None
        rows = [_row(text[start:stop].rstrip().removesuffix(b",")) for start, stop in inner]
        rows.append(_row(tail[:end].encode()))
        return RunRecord.model_validate({**header, "rows": rows})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    finally:
        if collects:
            gc.enable()


def _starts(text: bytes, first: int) -> Iterator[int]:
    """Where rows begin: each `{` behind a comma that "planned" follows. Texts inside a row only make it no JSON."""
    yield first
    place = text.find(_PLANNED, first) + len(_PLANNED)
    while (place := text.find(_PLANNED, place)) >= 0:
        start = text.rfind(b"{", first, place)
        if not text[start + 1 : place].strip() and text[max(0, start - 32) : start].rstrip().endswith(b","):
            yield start
        place += len(_PLANNED)


def _row(text: bytes) -> Row:
    document = parsed(text)
    # Of fixed depth, and most of a row.
    timings = document["outcome"].pop("timings", None)
    check_depth(document)
    if timings is not None:
        document["outcome"]["timings"] = timings
    # What `report --json` printed; it follows from the samples.
    document.pop(SUMMARY, None)
    row = Row.model_validate(document)
    for timing in row.outcome.timings if isinstance(row.outcome, Measured) else ():
        for slot in timing.slots:
            # pydantic keeps a set of names for each, larger than a slot's samples; most name all fields.
            if len(slot.model_fields_set) == len(_SLOT_FIELDS):
                object.__setattr__(slot, "__pydantic_fields_set__", _SLOT_FIELDS)
    return row

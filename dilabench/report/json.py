"""The run record as JSON; what is printed holds each row's figures, too, and is read as a record again."""

import json
import re
from pathlib import Path

from dilabench.atomic_file import write_text
from dilabench.record import RunRecord

FILENAME = "run.json"
# The key of a row's figures, which no record has.
SUMMARY = "summary"

# A JSON string has no raw newline, so this matches only lists of whole numbers laid out in lines.
_NUMBER_LIST = re.compile(r"\[\n\s+(-?\d+(?:,\n\s+-?\d+)*)\n\s+\]")


def render(record: RunRecord, folder: Path | None) -> str | None:
    """Write run.json, which is the record, into `folder` and print nothing; without a folder, return the text to print.

    The text has a `summary` in each row: the figures that CSV holds, under the same names (`columns.exported`), null
    if the row was not measured. Raises EnvironmentNotReady when the file cannot be written.
    """
    if folder is None:
        return _with_summaries(record)
    write_text(folder / FILENAME, to_text(record))
    return None


def to_text(record: RunRecord) -> str:
    """Indented JSON with the samples of a slot on one line, so that a record can be read and diffed."""
    return _compact(record.model_dump_json(indent=2)) + "\n"


def _with_summaries(record: RunRecord) -> str:
    # run.json is written without the statistics.
    from dilabench.comparison.view import locate_rows, view_of
    from dilabench.report.columns import exported

    locate_rows(record.rows)
    document = record.model_dump(mode="json")
    for written, row in zip(document["rows"], record.rows, strict=True):
        view = view_of(row)
        written[SUMMARY] = view and exported(view)
    return _compact(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"


def _compact(indented: str) -> str:
    return _NUMBER_LIST.sub(lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", indented)

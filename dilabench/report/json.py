"""The run record as JSON; what is printed holds each row's figures, too, and is read as a record again."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from dilabench.atomic_file import write_text
from dilabench.record import RunRecord

FILENAME = "run.json"
# The key of a row's figures, which no record has.
SUMMARY = "summary"

# The text after the digest, and the number of bytes from the digest on.
END = "\n}\n"
TAIL_BYTES = 2 + 2 * hashlib.sha256().digest_size + len(END)

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
    """Indented JSON with the samples of a slot on one line, so that a record can be read and diffed. It ends with the
    digest of all text before that.
    """
    text = _compact(record.model_copy(update={"digest": None}).model_dump_json(indent=2))
    head = text.removesuffix("null\n}")
    return f'{head}"{hashlib.sha256(head.encode()).hexdigest()}"{END}'


def is_as_written(chunks: Iterable[bytes]) -> bool:
    """Whether the parts of a text that `to_text` gave are still what it gave: its digest is that of the text."""
    digest, tail = hashlib.sha256(), b""
    for chunk in chunks:
        text = tail + chunk
        digest.update(text[:-TAIL_BYTES])
        tail = text[-TAIL_BYTES:]
    return tail == f'"{digest.hexdigest()}"{END}'.encode()


def _with_summaries(record: RunRecord) -> str:
    # run.json is written without the statistics.
    from dilabench.comparison.view import locate_rows, view_of
    from dilabench.report.columns import exported

    locate_rows(record.rows)
    document = record.model_dump(mode="json", exclude={"digest"})
    for written, row in zip(document["rows"], record.rows, strict=True):
        view = view_of(row)
        written[SUMMARY] = view and exported(view)
    return _compact(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"


def _compact(indented: str) -> str:
    return _NUMBER_LIST.sub(lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", indented)

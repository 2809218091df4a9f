"""The run record itself, as JSON."""

import re
from pathlib import Path

from dilabench.atomic_file import write_text
from dilabench.record import RunRecord

FILENAME = "run.json"

# A raw newline never stands inside a JSON string, so this matches only lists of whole numbers laid out in lines.
_NUMBER_LIST = re.compile(r"\[\n\s+(-?\d+(?:,\n\s+-?\d+)*)\n\s+\]")


def render(record: RunRecord, folder: Path | None) -> str | None:
    """Write run.json into `folder` and print nothing; without a folder, return the text to print.

    Raises EnvironmentNotReady when the file cannot be written.
    """
    text = to_text(record)
    if folder is None:
        return text
    write_text(folder / FILENAME, text)
    return None


def to_text(record: RunRecord) -> str:
    """Indented JSON with the samples of a slot on one line, so that a record can be read and diffed."""
    indented = record.model_dump_json(indent=2)
    return _NUMBER_LIST.sub(lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", indented) + "\n"

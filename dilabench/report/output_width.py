"""How wide texts are. Light: what prints a few lines needs no tables."""

import os
import shutil
from typing import IO

from dilabench.units import terminal_width


def output_width(stream: IO[str], piped: int) -> int:
    """The width for a stream: TERMINAL_WIDTH or COLUMNS where they say, the terminal's own, or `piped` in a pipe."""
    if pinned := os.environ.get("TERMINAL_WIDTH"):
        return terminal_width(pinned)
    asked = os.environ.get("COLUMNS", "")
    if not stream.isatty() and not (asked.isdecimal() and int(asked)):
        return piped
    return shutil.get_terminal_size().columns

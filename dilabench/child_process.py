"""Python processes that this one starts find the modules that are found here, and none of the working folder."""

import os
import sys
from pathlib import Path

SOURCE_ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: str) -> list[str]:
    """A command that runs this Python without the working folder on its path."""
    return [sys.executable, "-P", *arguments]


def environment(**changes: str) -> dict[str, str]:
    """Variables for a command of `python`: those of this process, its path of modules, and `changes`."""
    path = dict.fromkeys((*filter(None, sys.path), str(SOURCE_ROOT)))
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path), **changes}

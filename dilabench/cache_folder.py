"""Where is kept what can be made again: traced memory, what `tune` found, the charting library as one script."""

import os
from pathlib import Path

CACHE_VARIABLE = "DILABENCH_CACHE"
COMPILED_VARIABLE = "DILABENCH_COMPILED"


def cache_folder() -> Path:
    """$DILABENCH_CACHE, else ~/.cache/dilabench."""
    base = os.environ.get(CACHE_VARIABLE)
    return Path(base) if base else Path.home() / ".cache" / "dilabench"


def compiled_folder() -> Path:
    """Of C++ that was compiled for this machine: $DILABENCH_COMPILED, else a part of the cache folder."""
    base = os.environ.get(COMPILED_VARIABLE)
    return Path(base) if base else cache_folder() / "cpu"

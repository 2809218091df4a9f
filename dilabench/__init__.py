"""dilabench: which way of computing long-context attention is fastest, smallest and right, on this machine.

From Python: `dilabench.run(suite, ...)`, `dilabench.load(run)`, `dilabench.to_frame(record)` and
`dilabench.compare(baseline, candidate)`, which are imported when they are first used.
"""

import importlib

from dilabench.version import __version__

# Without an import of `typing`: `python -m dilabench` reads this file while the working folder, which may hold a
# typing.py, is still first on the path.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dilabench.api import compare, load, run, to_frame

__all__ = ["__version__", "compare", "load", "run", "to_frame"]


def __getattr__(name: str) -> "Any":
    if name in {"compare", "load", "run", "to_frame"}:
        return getattr(importlib.import_module("dilabench.api"), name)
    raise AttributeError(f"module 'dilabench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

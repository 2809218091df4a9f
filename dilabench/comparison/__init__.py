"""Comparisons of measured cases: which rows are compared with which, and the verdict on each pair.

================  ===========================================================================================
`fingerprint`     may two records be compared at all? hard fields refuse, soft ones warn
`view`            the figures of a row; slots of two interleaved cases -> rounds (`stats.paired`); rankings
`within`          rows of one record (or several of the same request) against each other, by interleaved rounds
`across`          two records joined on `case_id`, by the spread of the stored sessions; ratios of two machines
`matrix`          more than two records, each against each
`relative`        times in units of a reference that was interleaved with them
`comparison`      the result: compared pairs, and by name every row without a counterpart; the cases that `-k` names
`gate`            looks at sessions until every case is decided, second measurement of flagged pairs, the exit code
================  ===========================================================================================

Nothing here reads files or imports torch. The package can be called: `dilabench.compare(baseline, candidate)` is
`dilabench.api.compare`, whichever of package and function the name meant first.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *runs: Any, **settings: Any) -> Any:
        # By name: the function is in a higher layer.
        return importlib.import_module("dilabench.api").compare(*runs, **settings)


sys.modules[__name__].__class__ = _Callable

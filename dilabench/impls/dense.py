"""`dense`: full attention through one backend. In the terms of branches: one segment, every row, one kernel call."""

from __future__ import annotations

from dilabench.contracts import BuildContext
from dilabench.impls import strided
from dilabench.impls.union.union import Union
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> Union:
    """The backend's own out and lse are the result; nothing is copied or merged."""
    return strided.build(workload, context)

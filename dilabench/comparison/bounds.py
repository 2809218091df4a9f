"""How close a measured row is to what its device reaches in a copy and in a matrix product."""

from collections.abc import Mapping
from typing import NamedTuple

from dilabench.comparison.view import RowView
from dilabench.metadata import COPY_KEY, peak_flops
from dilabench.workload.lower_bounds import least_bytes, least_flops


class Bound(NamedTuple):
    """A ceiling of the device, 'memory' (of a copy) or 'compute' (of a matrix product), and the share reached."""

    name: str
    share: float


def nearer_bound(view: RowView, ceilings: Mapping[str, float]) -> Bound | None:
    """The measured ceiling of which the least work takes the larger share of the median; None without ceilings, and
    for a step of a model, most of whose work is not attention.
    """
    if view.row.case.workload.model is not None:
        return None
    workload, seconds = view.row.case.workload, view.median_ns * 1e-9
    limits = (
        ("memory", least_bytes(workload), ceilings.get(COPY_KEY)),
        ("compute", least_flops(workload), peak_flops(ceilings, workload.dtype)),
    )
    bounds = [Bound(name, work / seconds / ceiling) for name, work, ceiling in limits if ceiling]
    return max(bounds, key=lambda bound: bound.share, default=None)

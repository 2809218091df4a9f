"""What the library asks of the catalogue: which backend can serve a call on this machine."""

from __future__ import annotations

from functools import lru_cache

from dilabench.backends.load import load_backend
from dilabench.contracts import LoadedBackend
from dilabench.machine import detect
from dilabench.plugins.manager import discover
from dilabench.record import Case
from dilabench.request import AUTO, RunRequest
from dilabench.suites.planner import Planner


def backend_of(name: str, case: Case, device: str) -> LoadedBackend:
    """The backend of a name that can serve a case here, or what 'auto' means for it. Raises ValueError for others."""
    planner = planner_of(device)
    if name == AUTO:
        chosen, reasons = planner.choose_backend(case)
    else:
        chosen, asked = planner.catalogue.backends.get(name).name, case.model_copy(update={"backend": name})
        reasons = "; ".join(planner.catalogue.reasons_against_backend(asked, planner.machine))
    if chosen is None or (name != AUTO and reasons):
        raise ValueError(f"backend {name!r} cannot serve this call: {reasons}")
    return load_backend(planner.catalogue.backends.get(chosen))


@lru_cache(maxsize=2)
def planner_of(device: str) -> Planner:
    """What can run on a kind of device, as the library asks."""
    return Planner(discover().catalogue, detect(device), RunRequest(suite="library"))

"""The facts of a case and of a timer that a worker needs: plain data. No torch."""

from dilabench.patterns.registry import find_kinds_with
from dilabench.record import Case
from dilabench.validation import Model


class BackendSpec(Model):
    """The location of a backend's functions."""

    name: str
    target: str
    backward_target: str | None = None
    packed_target: str | None = None
    merging_target: str | None = None
    aligns_ends: bool = False
    places_results: bool = False


class SecondSpec(Model):
    """The location of an implementation that computes the same as a case by other means; `name`: as in the record."""

    name: str
    target: str
    backend: BackendSpec | None = None


class CaseSpec(Model):
    """The facts that a worker needs to build and call one case. Cases of one group have the same seed, so the same
    inputs.

    seconds: implementations that all its rows may be compared with, the first that the oracle confirms
    (engine/verify/confirmed.py).
    """

    case: Case
    target: str
    takes: str = "heads"
    deterministic: bool = False
    backend: BackendSpec | None = None
    seconds: tuple[SecondSpec, ...] = ()
    seed: int = 0

    @property
    def handle(self) -> str:
        """The name of the prepared case inside its worker."""
        return self.case.case_id


class TimerSpec(Model):
    """A timer by name, class and claim. fresh_process: it makes its calls in new processes."""

    name: str
    target: str
    proves: str
    fresh_process: bool = False


def _discover() -> None:
    # Only a process that meets a plug-in's pattern looks for plug-ins.
    from dilabench.plugins.manager import discover

    discover()


find_kinds_with(_discover)

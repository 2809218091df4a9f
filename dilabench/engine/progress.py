"""Callbacks for the progress of a run, from which a command line draws a bar. No torch."""

from collections.abc import Mapping, Sequence

from dilabench.record import Case, PlannedCase, Row
from dilabench.workload.spec import Workload


class Progress:
    """Called by the runner between measurements, never inside one. Its methods are empty; overriding ones must return
    quickly.
    """

    def device_held(self) -> None:
        """The device is locked for this run; from now on the budget runs."""

    def run_started(self, expected_s: Mapping[str, float]) -> None:
        """Cases that can run, by id, with their expected seconds; called again when a follow-up adds more."""

    def waiting(self, why: str) -> None:
        """The run waits: another run holds the device, or it must cool down."""

    def group_started(self, workload: Workload, cases: Sequence[PlannedCase]) -> None:
        """The implementations of one workload are measured next, interleaved."""

    def stage_started(self, case: Case, stage: str) -> None:
        """A case goes through 'build', 'verify', 'warmup', 'time', 'memory'."""

    def row_done(self, row: Row) -> None:
        """A case has ended; its row is already on disk."""

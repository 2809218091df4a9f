"""Callbacks for the progress of a run, from which a command line draws a bar. No torch."""

from collections.abc import Mapping, Sequence

from dilabench.record import Case, PlannedCase, Row, Verification
from dilabench.workload.spec import Workload


class Progress:
    """Called by the runner between measurements, never inside one. Methods do nothing here, and must return quickly."""

    def device_held(self) -> None:
        """No other run holds the device any more; from now on the budget runs."""

    def run_started(self, expected_s: Mapping[str, float]) -> None:
        """Cases by id with their expected seconds, 0 if skipped; called again when a follow-up adds more."""

    def waiting(self, why: str) -> None:
        """Nothing is measured for now: another run holds the device, or it must cool down."""

    def group_started(self, workload: Workload, cases: Sequence[PlannedCase]) -> None:
        """The implementations of one workload are measured next, interleaved."""

    def stage_started(self, case: Case, stage: str) -> None:
        """A case goes through 'build', 'verify', 'warmup', 'time', 'memory'."""

    def case_verified(self, case: Case, verification: Verification) -> None:
        """The output of a case was checked (it may have failed)."""

    def slot_done(self, case: Case, round_index: int) -> None:
        """A case had its turn in a round."""

    def row_done(self, row: Row) -> None:
        """A case has ended, in whatever way; its row is already safe on disk."""


class Silent(Progress):
    """A progress that shows nothing; subclass it to show some of it."""

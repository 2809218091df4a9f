"""The run that a text means: a file or folder, a baseline's name, 'latest', or the id of a stored run. No torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from dilabench.compare.fingerprint import machine_key
from dilabench.errors import ConfigError
from dilabench.record import RunRecord
from dilabench.store.archive import SUFFIX, Archive, read_compressed
from dilabench.store.baselines import Baselines
from dilabench.store.calibrations import Calibration, Calibrations
from dilabench.store.run_files import read_record


class Store:
    """Everything that is kept between runs: the archive, the baselines, the calibrations."""

    def __init__(self, root: Path | None = None) -> None:
        self.archive = Archive(root)
        self.root = self.archive.root
        self.baselines = Baselines(self.root)
        self.calibrations = Calibrations(self.root)

    def records(self, text: str) -> tuple[RunRecord, ...]:
        """The records that a text means: several for a baseline of several runs, else one.

        Raises ConfigError when nothing or more than one run fits, or a file cannot be read.
        """
        path = Path(text)
        # os.path: unlike Path's, its answer about a text that no file can have as its name is no error.
        if os.path.exists(text):
            return (read_compressed(path) if path.name.endswith(SUFFIX) else read_record(path),)
        baselines = self.baselines.all()
        if text in baselines:
            return tuple(self.archive.load(name) for name in baselines[text].runs)
        names = self.archive.find(text)
        if len(names) == 1:
            return (self.archive.load(names[0]),)
        if names:
            shown = ", ".join(names[:5])
            raise ConfigError(f"{text!r} fits {len(names)} stored runs ({shown}); write more of the id")
        known = ", ".join(sorted(baselines)) or "none"
        raise ConfigError(
            f"{text!r} is neither a file, nor a baseline (known: {known}), nor a run of the store {str(self.root)!r}; "
            "see `dilabench history` and `dilabench baseline list`"
        )

    def calibration_of(self, records: Sequence[RunRecord]) -> Calibration | None:
        """The calibration of the machine that all the records come from; None when there is none."""
        machines = {machine_key(record) for record in records}
        return self.calibrations.get(machines.pop()) if len(machines) == 1 else None

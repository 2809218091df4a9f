"""The run that a text means: a file or folder, a baseline's name, 'latest', or the id of a stored run. No torch."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from dilabench.compare.fingerprint import machine_key
from dilabench.errors import ConfigError, DilabenchError
from dilabench.record import RunRecord
from dilabench.store.archive import SUFFIX, Archive, read_compressed, sound_records
from dilabench.store.baselines import Baseline, Baselines
from dilabench.store.calibrations import Calibration, Calibrations
from dilabench.store.files import store_root
from dilabench.store.run_files import read_record


class Store:
    """Everything that is kept between runs: the archive, the baselines, the calibrations.

    `tell` hears of files that are damaged and were left out of an answer.
    """

    def __init__(self, root: Path | None = None, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self._root = root

    @cached_property
    def root(self) -> Path:
        """The store's folder."""
        return store_root() if self._root is None else self._root

    @cached_property
    def archive(self) -> Archive:
        """The runs."""
        return Archive(self.root)

    @cached_property
    def baselines(self) -> Baselines:
        """The names of runs."""
        return Baselines(self.root)

    @cached_property
    def calibrations(self) -> Calibrations:
        """The noise of machines."""
        return Calibrations(self.root)

    def records(self, text: str) -> tuple[RunRecord, ...]:
        """The records that a text means: several for a baseline of several runs, else one.

        Names go before paths, so that a folder called like a baseline does not hide it; './main' is always a path.
        'latest' is the newest run that can be read. Raises ConfigError when nothing or more than one run fits, or a
        file cannot be read.
        """
        if text == "latest" and (latest := self._latest()):
            return (latest,)
        if (path := self.path_of(text)) is not None:
            return (read_compressed(path) if path.name.endswith(SUFFIX) else read_record(path),)
        baselines = self._baselines()
        if text in baselines:
            return tuple(self.archive.load(name) for name in baselines[text].runs)
        names = self.archive.find(text)
        if len(names) == 1:
            return (self.archive.load(names[0]),)
        if names:
            shown = ", ".join(names[:5])
            raise ConfigError(f"{text!r} fits {len(names)} stored runs ({shown}); write more of the id")
        known = ", ".join(sorted(self.baselines.all())) or "none"
        raise ConfigError(
            f"{text!r} is neither a file, nor a baseline (known: {known}), nor a run of the store {str(self.root)!r}; "
            "see `dilabench history` and `dilabench baseline list`"
        )

    def runs_of(self, texts: Sequence[str]) -> list[str]:
        """The texts without the store's own folder, which `benchmark_results/*/` names among the runs."""
        root = os.path.realpath(self.root)
        kept = [text for text in texts if not os.path.isdir(text) or os.path.realpath(text) != root]
        return kept or list(texts)

    def path_of(self, text: str) -> Path | None:
        """The file or folder that a text means; None where it means something in the store."""
        # os.path: unlike Path's, its answer about a text that no file can have as its name is no error.
        if not os.path.exists(text) or (os.sep not in text and (text == "latest" or text in self._baselines())):
            return None
        return Path(text)

    def _baselines(self) -> Mapping[str, Baseline]:
        """The baselines; none where their file is damaged, which hides no run."""
        try:
            return self.baselines.all()
        except DilabenchError as error:
            self._tell(str(error))
            return {}

    def _latest(self) -> RunRecord | None:
        """The newest run that can be read; the error of the newest where none can, None where there is none."""
        names = self.archive.newest()
        refusal: DilabenchError | None = None
        for _, found in sound_records(self.archive, names[::-1]):
            if not isinstance(found, DilabenchError):
                return found
            self._tell(f"{found}; it is left out of 'latest'")
            refusal = refusal or found
        if refusal:
            raise refusal
        return None

    def calibration_of(self, records: Sequence[RunRecord]) -> Calibration | None:
        """The calibration of the machine that all the records come from; None when there is none that can be read."""
        machines = {machine_key(record) for record in records}
        try:
            return self.calibrations.get(machines.pop()) if len(machines) == 1 else None
        except DilabenchError as error:
            self._tell(str(error))
            return None

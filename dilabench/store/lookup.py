"""Find the run that a text names: a file or folder, a baseline, 'latest', or the id of a stored run. No torch."""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dilabench.comparison.fingerprint import machine_key
from dilabench.errors import ConfigError, DilabenchError
from dilabench.record import RunRecord
from dilabench.store.archive import SUFFIX, Archive, read_compressed, sound_records, store_root
from dilabench.store.baselines import Baseline, Baselines
from dilabench.store.calibrations import Calibration, Calibrations
from dilabench.store.run_files import read_record


class Store:
    """Everything stored between runs: the archive, the baselines, the calibrations.

    `tell` receives a message for each damaged file that was skipped.
    """

    def __init__(self, root: Path | None = None, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self.root = store_root() if root is None else root
        self.archive = Archive(self.root)
        self.baselines = Baselines(self.root)
        self.calibrations = Calibrations(self.root)

    def records(self, text: str) -> tuple[RunRecord, ...]:
        """Return the records that a text names: several for a baseline of several runs, else one.

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
        if os.sep in text or text.endswith((SUFFIX, ".json", ".jsonl")):
            raise ConfigError(f"there is no file or folder {text!r}; `dilabench history` lists the stored runs")
        if not self.archive.newest():
            named = "" if text == "latest" else f", then `dilabench baseline save {text}` gives it this name"
            raise ConfigError(
                f"{text!r} is no file, and no run is stored in {str(self.root)!r}; `dilabench run quick` makes "
                f"one{named}"
            )
        near = difflib.get_close_matches(text, baselines, n=1)
        save = f"`dilabench baseline save {text}` gives the newest run this name;"
        hint = f"did you mean {near[0]}?" if near else save
        known = ", ".join(sorted(baselines)) or "none"
        raise ConfigError(
            f"{text!r} is neither a file, nor a baseline (known: {known}), nor a run of the store {str(self.root)!r}; "
            f"{hint} `dilabench history` and `dilabench baseline list` show all"
        )

    def runs_of(self, texts: Sequence[str]) -> list[str]:
        """The texts without the store's own folder, which `benchmark_results/*/` names among the runs."""
        root = os.path.realpath(self.root)
        kept = [text for text in texts if not os.path.isdir(text) or os.path.realpath(text) != root]
        return kept or list(texts)

    def path_of(self, text: str) -> Path | None:
        """Return the file or folder that a text names; None if it names something in the store."""
        # os.path, unlike Path, does not raise for a text that cannot be a file name.
        if not os.path.exists(text) or (os.sep not in text and (text == "latest" or text in self._baselines())):
            return None
        return Path(text)

    def _baselines(self) -> Mapping[str, Baseline]:
        """Return the baselines; empty if their file is damaged, so that stored runs can still be found."""
        try:
            return self.baselines.all()
        except DilabenchError as error:
            self._tell(str(error))
            return {}

    def _latest(self) -> RunRecord | None:
        """Return the newest readable run, or None if the store is empty.

        Raises the newest run's error if none is readable.
        """
        names = self.archive.newest()
        refusal: DilabenchError | None = None
        for _, record in sound_records(self.archive, names[::-1]):
            if not isinstance(record, DilabenchError):
                return record
            self._tell(f"{record}; 'latest' skips it")
            refusal = refusal or record
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

"""Results of `dilabench calibrate` on a machine: noise floor and detection rate of slow-downs. No torch."""

from pathlib import Path

from pydantic import Field, ValidationError

from dilabench.atomic_file import read_file
from dilabench.errors import ConfigError
from dilabench.store.archive import unreadable, write_whole
from dilabench.validation import Model


class Detection(Model):
    """How often a slow-down of `effect` (0.05: 5 %; 0: same code) was called SLOWER, with the exact 95 % interval."""

    effect: float = Field(ge=0)
    hits: int = Field(ge=0)
    trials: int = Field(ge=1)
    low: float
    high: float

    @property
    def rate(self) -> float:
        """Share of the trials in which it was found."""
        return self.hits / self.trials


class Calibration(Model):
    """Noise between sessions of identical code (sd of the log ratio) on one machine, and its power curve.

    `machine` is the key of the hard fingerprint fields (`comparison.fingerprint.machine_key`), also kept in `fields`.
    """

    machine: str
    fields: dict[str, str]
    device: str
    sigma_aa: float = Field(ge=0)
    sessions: int = Field(ge=1)
    mde: float | None = None
    power: tuple[Detection, ...] = ()
    workload: str = ""
    measured_at: str
    tool_version: str


class Calibrations:
    """One file per machine and device: `calibrations/<machine>.json`."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "calibrations"

    def save(self, calibration: Calibration) -> Path:
        """Keep a calibration; an older one of the same machine is replaced."""
        path = self.folder / f"{calibration.machine}.json"
        write_whole(path, (calibration.model_dump_json(indent=1) + "\n").encode(), replace=True)
        return path

    def get(self, machine: str) -> Calibration | None:
        """The calibration of a machine, or None.

        Raises ConfigError when its file is damaged, EnvironmentNotReady when it cannot be read.
        """
        path = self.folder / f"{machine}.json"
        try:
            return Calibration.model_validate_json(read_file(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, error) from None
        except ValidationError as error:
            first = str(error).splitlines()[0]
            raise ConfigError(f"{str(path)!r} is damaged ({first}); run `dilabench calibrate` again") from None

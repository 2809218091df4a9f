"""`--resume`: the request, header and rows of a run that was interrupted."""

from collections.abc import Iterable
from pathlib import Path

from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.record import RunHeader
from dilabench.request import RunRequest
from dilabench.store.run_files import read_rows
from dilabench.validation import validated


def recorded_request(run: Path, suite: str, given: Iterable[str]) -> tuple[RunRequest, RunHeader]:
    """What the run was asked for and its header. `given` names the options that were given beside `--resume`.

    Raises ConfigError when it was of another suite, or an option would change what it measures.
    """
    header, _ = read_rows(run if run.is_dir() else run.parent)
    given = sorted(given)
    if header.suite != suite:
        raise ConfigError(
            f"run {str(run)!r} is of suite {header.suite!r}, not {suite!r}; write `run {header.suite} --resume`"
        )
    if given:
        raise ConfigError(f"--resume goes on with the run as it was asked for; leave out {', '.join(given)}")
    return validated(RunRequest, header.config), header


def resumed_header(earlier: RunHeader, now: RunHeader, machine: Machine) -> RunHeader:
    """The header of a run that goes on, in today's environment.

    Facts of torch that only a worker knows are kept, in case the rest of the run needs no worker.
    """
    from dilabench.engine.device.environment import with_torch

    environment = with_torch(now.environment, machine, earlier.environment.torch)
    return earlier.model_copy(update={"environment": environment})

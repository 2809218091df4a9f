"""Side effects of importing a module, observed inside a fresh process.

Python's audit hooks (PEP 578) report network, processes and files; settings of the process are compared before and
after.
"""

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from dilabench.errors import said
from dilabench.machine import child_environment, python_command
from dilabench.validation import Model

NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostby", "urllib.Request")
PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn")
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Packages that take seconds to load, or memory that a command which lists names does not need.
HEAVY = frozenset({"torch", "triton", "jax", "tensorflow", "transformers", "xformers", "flash_attn", "cutlass"})
OURS = ("numpy", "scipy.stats", "rich.console", "jinja2", "pluggy", "psutil", "matplotlib.figure")
TIMEOUT_S = 300.0


class ImportReport(Model):
    """The effects of importing one module. `heavy`: packages that it loaded; `lasted_ns`: the duration."""

    module: str
    error: str | None = None
    heavy: tuple[str, ...] = ()
    network: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    lasted_ns: int = 0


def import_reports(light: Sequence[str], heavy: Sequence[str]) -> tuple[ImportReport, ...]:
    """Import modules in a fresh process, one after another; before those in `heavy`, torch and dilabench.contracts.

    Takes seconds; nothing is imported here. If the process dies, the module being imported gets the error.
    """
    command = python_command("-m", "dilabench.conformance.fresh_import", json.dumps([list(light), list(heavy)]))
    # Bytecode files are not a side effect of the module.
    variables = child_environment(PYTHONDONTWRITEBYTECODE="1")
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        lines, ending = done.stdout, f"its process ended with code {done.returncode}: {done.stderr.strip()[-200:]}"
    except subprocess.TimeoutExpired as late:
        lines = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        ending = f"it did not end within {TIMEOUT_S:g} s"
    reports = [ImportReport.model_validate_json(line[1:]) for line in lines.split("\n") if line.startswith("\x1e")]
    missing = [*light, *heavy][len(reports) :]
    return (*reports, *(ImportReport(module=module, error=ending) for module in missing[:1]))


class _Watch:
    """Records audit events from `start` to `stop`. An audit hook cannot be removed from its process."""

    def __init__(self) -> None:
        self.network: list[str] = []
        self.effects: list[str] = []
        self._on = False
        sys.addaudithook(self._hear)

    def start(self) -> None:
        self.network, self.effects, self._on = [], [], True

    def stop(self) -> None:
        self._on = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        events: list[str] | None = None
        if event.startswith(NETWORK):
            events = self.network
        elif event.startswith((*PROCESSES, *CHANGES)) or (event == "open" and _writes(arguments)):
            events = self.effects
        if events is not None:
            self._on = False
            shown = ", ".join(
                f"{argument!r:.60}" for argument in arguments if not isinstance(argument, socket.socket | None)
            )
            events.append(f"{event}({shown}){_place()}")
            self._on = True


def _writes(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = (*arguments, None, None, None)[:3]
    writing = set(mode) & set("wax+") if isinstance(mode, str) else isinstance(flags, int) and flags & WRITING
    return bool(writing) and not str(path).startswith("/dev/")


def _place() -> str:
    """Return the responsible line: the innermost one outside Python's standard library."""
    library = os.path.dirname(os.__file__)
    for frame in reversed(traceback.extract_stack()):
        inside = frame.filename.startswith(library) and "site-packages" not in frame.filename
        if not inside and not frame.filename.startswith("<") and frame.filename != __file__:
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def _settings() -> dict[str, object]:
    """Return the settings of the process, by name."""
    settings: dict[str, object] = {f"environment variable {name}": value for name, value in os.environ.items()}
    settings |= {
        "working folder": os.getcwd(),
        "sys.path": tuple(sys.path),
        "recursion limit": sys.getrecursionlimit(),
        "sys.excepthook": sys.excepthook,
        "warnings filters": len(warnings.filters),
        "logging": (logging.root.level, len(logging.root.handlers)),
        "default timeout of sockets": socket.getdefaulttimeout(),
        "state of random": hash(random.getstate()),
        "threads of Python": threading.active_count(),
    }
    settings |= {
        f"handler of {number.name}": signal.getsignal(number)
        for number in signal.valid_signals()
        if isinstance(number, signal.Signals)
    }
    if "torch" in sys.modules:
        import torch

        from dilabench.engine.call.torch_settings import read_settings

        settings |= {f"torch's {name}": value for name, value in read_settings().items()}
        settings |= {"torch's random state": torch.initial_seed(), "CUDA is in use": torch.cuda.is_initialized()}  # type: ignore[no-untyped-call]
    return settings


def _changes(before: dict[str, object], after: dict[str, object]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        # If the module loads torch, settings that torch initialises are not changes.
        new = name.startswith(("torch's", "CUDA")) and name not in before
        if not new and before.get(name) != after.get(name):
            yield f"{name} was {before.get(name)!r:.80}, is {after.get(name)!r:.80}"


def _imported(module: str, watch: _Watch) -> ImportReport:
    loaded, before, error = set(sys.modules), _settings(), None
    watch.start()
    started = time.perf_counter_ns()
    try:
        import_module(module)
    # A module may raise anything, sys.exit() included.
    except BaseException as raised:  # noqa: BLE001
        error = said(raised)
    lasted = time.perf_counter_ns() - started
    watch.stop()
    fresh = {name.partition(".")[0] for name in set(sys.modules) - loaded}
    return ImportReport(
        module=module,
        error=error,
        heavy=tuple(sorted(fresh & HEAVY)),
        network=tuple(watch.network),
        effects=(*watch.effects, *_changes(before, _settings())),
        lasted_ns=lasted,
    )


def main() -> None:
    """Import the modules of the command line; print a report of each on a line with a record separator."""
    light, heavy = json.loads(sys.argv[1])
    import_module("dilabench.plugins")
    # dilabench's dependencies are loaded before, with their effects.
    for name in OURS:
        import_module(name)
    watch = _Watch()
    output, sys.stdout = sys.stdout, sys.stderr

    def report(module: str) -> None:
        output.write("\x1e" + _imported(module, watch).model_dump_json() + "\n")
        output.flush()

    for module in light:
        report(module)
    if heavy:
        import_module("dilabench.contracts")
        import_module("dilabench.engine.timers")
    for module in heavy:
        report(module)


if __name__ == "__main__":
    main()

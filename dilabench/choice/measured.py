"""The fastest way of each workload that was measured, in files of cells.

`dilabench tune` writes a file for this machine (its name: GPU, driver, every package whose kernels can serve, kernel
sources), and the library adds what it measures at the first call of a configuration (`choice.first_use`). The package
ships a file for each GPU that it was tuned on. An unreadable file is ignored.
"""

import contextlib
import hashlib
import logging
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from dilabench.atomic_file import CACHE_VARIABLE, cache_folder, locked, read_file, write_bytes
from dilabench.choice.backends import BACKENDS
from dilabench.choice.descriptors import NOT_PACKAGES, installed_version
from dilabench.choice.implementations import IMPLEMENTATIONS
from dilabench.choice.ways import Ways
from dilabench.errors import ConfigError, first_line
from dilabench.machine import Machine
from dilabench.patterns.registry import has_kind
from dilabench.units import format_seconds
from dilabench.validation import Model
from dilabench.workload.spec import Workload, attended_pairs

# A cell applies to the same configuration from half to twice its tokens; each doubling of its lead adds two doublings,
# because ratios change little with the length while the GPU limits the time.
NEAR_DOUBLINGS = 1.0
DOUBLINGS_PER_LEAD = 2.0
PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "tuned"
KERNELS = PACKAGE / "kernels"
SOURCES = {".py", ".cpp", ".h", ".cu"}
# torch's wheels have cuDNN in a separate distribution.
CUDNN = ("nvidia-cudnn-cu11", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
# A process that is stopped while holding the lock delays others by at most this time.
LOCK_TIMEOUT_S = 10.0
WAY_OUT = f"set {CACHE_VARIABLE} to a folder that you can write, or free some space"

logger = logging.getLogger(__name__)


class TunedCell(Model):
    """The fastest verified row of one workload, and how far ahead of the next it was.

    `lead`: how many times as long every other one took, by GPU time and by the time of consecutive calls, if known.
    `launching`, `runner_up_launching`: True if the time is the host's launch time, which exceeds the GPU's.
    """

    workload: Workload
    implementation: str
    backend: str | None = None
    median_ns: int
    launching: bool = False
    runner_up: str | None = None
    runner_up_ns: int | None = None
    runner_up_launching: bool = False
    lead: float = 1.0

    @property
    def times(self) -> str:
        """The time of a call, and that of the runner-up, as text."""
        own_time = _took(self.median_ns, self.launching)
        if self.runner_up is None or self.runner_up_ns is None:
            return own_time
        return f"{own_time}, {self.runner_up} {_took(self.runner_up_ns, self.runner_up_launching)}"

    def doublings_to(self, workload: Workload) -> float | None:
        """Return the doublings (or halvings) of tokens between the two, or None if they exceed `reach`."""
        doublings = abs(math.log2(self.workload.tokens / workload.tokens))
        return doublings if doublings <= self.reach else None

    @property
    def reach(self) -> float:
        """The number of doublings or halvings of tokens for which the cell applies to the same configuration."""
        return NEAR_DOUBLINGS + DOUBLINGS_PER_LEAD * math.log2(max(1.0, self.lead))


def _took(ns: int, launching: bool) -> str:
    return format_seconds(ns * 1e-9) + (" to launch" if launching else "")


class TuneFile(Model):
    """The measurements on one kind of machine.

    `unread`: cells of patterns that this process does not know (the library does not load plug-ins); they stay in the
    file.
    """

    schema_version: str = "1.0"
    device: str
    packages: dict[str, str] = Field(default_factory=dict)
    run_id: str | None = None
    cells: tuple[TunedCell, ...] = ()
    unread: tuple[dict[str, Any], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _separate_unknown_patterns(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        known: list[Any] = []
        unread: list[Any] = []
        for cell in (*fields.get("cells", ()), *fields.get("unread", ())):
            (known if isinstance(cell, TunedCell) or has_kind(_kind_of(cell)) else unread).append(cell)
        return {**fields, "cells": known, "unread": unread}

    @cached_property
    def by_configuration(self) -> Mapping[Hashable, Sequence[TunedCell]]:
        """The cells of each `configuration`: a file may hold hundreds."""
        cells: dict[Hashable, list[TunedCell]] = {}
        for cell in self.cells:
            cells.setdefault(configuration(cell.workload), []).append(cell)
        return cells


def _kind_of(cell: Any) -> Any:
    """The kind of pattern of a cell of a file; None if it has none, which its validation refuses."""
    for field_name in ("workload", "pattern", "kind"):
        cell = cell.get(field_name) if isinstance(cell, Mapping) else None
    return cell


def measured_near(ways: Ways, machine: Machine, workload: Workload) -> TunedCell | None:
    """Return this machine's nearest cell of the same configuration and a similar length (`TunedCell.reach`), or None.

    Cells whose implementation is not among `ways` do not count.
    """
    file = read_tune_file(tune_path(machine))
    near = [
        (doublings, cell)
        for cell in (file.by_configuration.get(configuration(workload), ()) if file else ())
        if cell.implementation in ways.implementations and (doublings := cell.doublings_to(workload)) is not None
    ]
    return min(near, key=lambda pair: pair[0])[1] if near else None


def configuration(workload: Workload) -> Hashable:
    """Return a key of everything except lengths: the scale as a number, the mode as forward or not, packed sequences by
    the binary logarithm of their mean length.
    """
    of_length = dict.fromkeys(("seq_len", "batch_size"))
    compared: dict[str, Any] = {"scale": workload.softmax_scale, "mode": workload.mode == "forward"}
    compared["cu_seqlens"] = workload.cu_seqlens and doublings_of_mean(workload.tokens, len(workload.cu_seqlens) - 1)
    return tuple({**dict(workload), **of_length, **compared}.values())


def doublings_of_mean(tokens: int, sequences: int) -> int:
    """Return the binary logarithm of the mean length of packed sequences, rounded."""
    return round(math.log2(tokens / sequences))


def alike(file: TuneFile | None, workload: Workload) -> Iterator[TunedCell]:
    """Cells of the same kind of work, the nearest in size first."""
    if file is None:
        return iter(())
    cells = [cell for cell in file.cells if _kind(cell.workload) == _kind(workload)]
    return iter(sorted(cells, key=lambda cell: _distance(cell.workload, workload)))


def _kind(workload: Workload) -> tuple[object, ...]:
    forward_only = workload.mode == "forward"
    dims = workload.head_dim, workload.value_dim, workload.softcap is None
    return workload.pattern.kind, workload.causal, forward_only, dims, workload.dtype


def _distance(a: Workload, b: Workload) -> float:
    """How many doublings apart two workloads are, in tokens x heads and in keys per query."""
    sizes = (
        (workload.tokens * workload.num_heads, attended_pairs(workload) / (workload.tokens * workload.num_heads))
        for workload in (a, b)
    )
    return sum(abs(math.log2(max(x, 1e-9) / max(y, 1e-9))) for x, y in zip(*sizes, strict=True))


def remember(path: Path, machine: Machine, cells: Iterable[TunedCell], run_id: str | None = None) -> None:
    """Write cells into a file, replacing older ones of the same workloads.

    Cells that other processes write meanwhile stay. An unreadable file is renamed to '.unreadable'.
    Raises EnvironmentNotReady if the folder cannot be written.
    """
    with locked(path, WAY_OUT, timeout_s=LOCK_TIMEOUT_S):
        try:
            before = _read(path)
        except ConfigError as error:
            logger.warning("%s; it is kept as %s.unreadable", error, path.name)
            with contextlib.suppress(OSError):
                path.replace(path.with_name(f"{path.name}.unreadable"))
            before = None
        merged = {cell.workload: cell for cell in before.cells} if before else {}
        merged |= {cell.workload: cell for cell in cells}
        file = TuneFile(
            device=device_name(machine),
            packages=package_versions(),
            run_id=run_id or (before.run_id if before else None),
            cells=tuple(merged.values()),
            unread=before.unread if before else (),
        )
        write_bytes(path, (file.model_dump_json(indent=1) + "\n").encode(), way_out=WAY_OUT)


def check_tune_file(path: Path) -> None:
    """Raise ConfigError for an existing file that is no tune file."""
    _read(path)


def read_tune_file(path: Path) -> TuneFile | None:
    """Return the file, or None if it is missing or invalid; the latter is logged once."""
    try:
        state = path.stat()
    except OSError:
        return None
    return _tune_file(path, (state.st_mtime_ns, state.st_size, state.st_ino))


@lru_cache(maxsize=4)
def _tune_file(path: Path, _state: tuple[int, ...]) -> TuneFile | None:
    try:
        return _read(path)
    except ConfigError as error:
        logger.warning("%s; it is ignored", error)
        return None


def _read(path: Path) -> TuneFile | None:
    try:
        return TuneFile.model_validate_json(read_file(path))
    except FileNotFoundError:
        return None
    # JSON may hold any type.
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        said = first_line(error)
        raise ConfigError(f"tune file {str(path)!r} cannot be read ({said}); delete it and tune again") from None


def shipped_path(machine: Machine) -> Path:
    """Return the path of the package's measurements for this kind of device, which may not exist."""
    return SHIPPED / f"{_slug(device_name(machine))}.json"


def tune_path(machine: Machine) -> Path:
    """Return the path of this machine's file, which depends on GPU, driver, package versions and kernel sources."""
    packages = package_versions()
    versions = [f"{name}{packages[name]}" for name in ("torch", "triton") if name in packages]
    driver = machine.used_gpus[0].driver if machine.used_gpus else None
    key = hashlib.sha256(repr((sorted(packages.items()), driver, kernel_hash())).encode()).hexdigest()[:12]
    parts = [_slug(device_name(machine)), f"sm{machine.compute_capability}", *versions, key]
    return cache_folder() / "tune" / ("-".join(parts) + ".json")


def device_name(machine: Machine) -> str:
    """The GPU's name, or that of the device: 'cpu', 'mps'."""
    return machine.used_gpus[0].name if machine.used_gpus else machine.device


def package_versions() -> dict[str, str]:
    """Versions of the packages whose kernels are compared: torch, cuDNN, Triton, and those that descriptors require."""
    versions = {name: installed_version(name) for name in ("torch", "triton", *CUDNN, *sorted(_required()))}
    return {name: version for name, version in versions.items() if version is not None}


def _required() -> set[str]:
    """Names of the modules and distributions that descriptors of dilabench require."""
    described = (*BACKENDS, *IMPLEMENTATIONS)
    alternatives = {
        part for descriptor in described for required in descriptor.requires for part in required.split("|")
    }
    return {part.partition(">=")[0].strip() for part in alternatives} - NOT_PACKAGES


@cache
def kernel_hash() -> str:
    """Eight hex digits over the sources of our kernels, in Python and in C++."""
    digest = hashlib.sha256()
    for path in sorted(path for path in KERNELS.rglob("*") if path.suffix in SOURCES):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

"""Which implementation and backend is fastest for a workload, as measured: what `-i auto` means.

`dilabench tune` writes a file of measured cells for this machine (GPU, torch, Triton and kernel sources in its name),
and the library adds what it measures at the first call of a configuration (`attention.first_use`). The package ships a
file for each GPU that it was tuned on. Without any, the priorities on the descriptors decide.
"""

import hashlib
import importlib.metadata
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from pydantic import Field, ValidationError

from dilabench.atomic_file import write_text
from dilabench.cache_folder import cache_folder
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.over_ranks import fastest_expected
from dilabench.record import Case
from dilabench.units import format_seconds
from dilabench.validation import Model
from dilabench.workload.spec import Workload
from dilabench.workload.work import attended_pairs

# A cell of the very same configuration is believed for up to twice the tokens, and down to half of them; with twice the
# lead for two doublings more, and so on: where the GPU is what takes the time, ratios change less from one to the next.
NEAR_DOUBLINGS = 1.0
DOUBLINGS_PER_LEAD = 2.0
PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "tuned"
KERNELS = PACKAGE / "kernels"


class TunedCell(Model):
    """The fastest verified row of one workload, and how far ahead of the next it was.

    `lead`: times as long as it all other ways took, of the GPU and to who waits for them, where both are known.
    `launching`, `runner_up_launching`: whether the time is that of the host that launches a call, the GPU's being less.
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
    def told(self) -> str:
        """What a call took, and one of the next best way, for who asks why."""
        own = _took(self.median_ns, self.launching)
        if self.runner_up is None or self.runner_up_ns is None:
            return own
        return f"{own}, {self.runner_up} {_took(self.runner_up_ns, self.runner_up_launching)}"

    def doublings_to(self, workload: Workload) -> float | None:
        """How many doublings of tokens, or halvings, lie between, where that is no more than its `reach`."""
        doublings = abs(math.log2(self.workload.tokens / workload.tokens))
        return doublings if doublings <= self.reach else None

    @property
    def reach(self) -> float:
        """For how many doublings of tokens, or halvings, it is believed of the same configuration."""
        return NEAR_DOUBLINGS + DOUBLINGS_PER_LEAD * math.log2(max(1.0, self.lead))


def _took(ns: int, launching: bool) -> str:
    return format_seconds(ns * 1e-9) + (" to launch" if launching else "")


class TuneFile(Model):
    """What was measured on one kind of machine."""

    schema_version: str = "1.0"
    device: str
    packages: dict[str, str] = Field(default_factory=dict)
    run_id: str | None = None
    cells: tuple[TunedCell, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """An implementation and backend, and what the choice rests on: 'first use', 'tuned', 'shipped', 'rule', or over
    ranks what is expected of it and of the next. `told`: the times that it rests on, where some were measured.
    """

    implementation: str
    backend: str | None
    source: str
    told: str = field(default="", compare=False)


def way_name(of: Choice | Case) -> str:
    """'strided:math', or 'fused', which takes no backend."""
    return f"{of.implementation}:{of.backend}" if of.backend else of.implementation


def choose(catalogue: Catalogue, machine: Machine, workload: Workload, ranks: int = 1) -> Choice:
    """The fastest known for the workload that can run here; measured on the nearest cell that is alike.

    What was measured is of one device. Raises ConfigError when nothing can compute it on this machine.
    """
    near = measured_near(machine, workload) if ranks == 1 else None
    return choose_after(near, catalogue, machine, workload, ranks)


def choose_after(
    near: TunedCell | None, catalogue: Catalogue, machine: Machine, workload: Workload, ranks: int = 1
) -> Choice:
    """As `choose`, by what `measured_near` gave."""
    if near and _usable(catalogue, machine, _case(near, workload, ranks), measured=True):
        return Choice(near.implementation, near.backend, "tuned", near.told)
    for source, path in (("tuned", tune_path(machine)), ("shipped", shipped_path(machine))):
        for cell in _alike(read_tune_file(path), workload):
            # What was measured on this very workload needs no rule.
            if _usable(catalogue, machine, _case(cell, workload, ranks), measured=cell.workload == workload):
                return Choice(cell.implementation, cell.backend, source, cell.told)
    names = by_priority(catalogue, workload, ranks)
    cases = (Case(implementation=name, workload=workload, world_size=ranks) for name in names)
    usable = (case for case in cases if _usable(catalogue, machine, case))
    best = _expected(catalogue, machine, tuple(usable)) if ranks > 1 else _first(usable)
    if best is not None:
        return best
    raise ConfigError(f"nothing here can compute {workload.label()}; `dilabench list --why` says why")


def _first(usable: Iterable[Case]) -> Choice | None:
    return next((Choice(case.implementation, None, "rule") for case in usable), None)


def _expected(catalogue: Catalogue, machine: Machine, usable: Sequence[Case]) -> Choice | None:
    """What should be the fastest over ranks, with what is expected of it and of the next."""
    told = fastest_expected(usable, machine.device, catalogue)
    if not told or told[0][1] is None:
        return _first(usable)
    (best, seconds), *others = [(case.implementation, one) for case, one in told if one is not None]
    next_best = "".join(f", {name} {format_seconds(one)}" for name, one in others[:1])
    return Choice(best, None, f"{format_seconds(seconds)} expected{next_best}")


def measured_near(machine: Machine, workload: Workload) -> TunedCell | None:
    """What this machine measured of the same configuration at nearly this length (`TunedCell.reach`), the nearest."""
    file, asked = read_tune_file(tune_path(machine)), configuration(workload)
    near = [
        (doublings, cell)
        for cell in (file.cells if file else ())
        # Told apart by it at once: a file may hold hundreds.
        if cell.workload.head_dim == workload.head_dim
        and (doublings := cell.doublings_to(workload)) is not None
        and configuration(cell.workload) == asked
    ]
    return min(near, key=lambda pair: pair[0])[1] if near else None


def configuration(workload: Workload) -> Hashable:
    """All but what makes it longer or shorter; its scale by number, of its mode whether that is forward alone."""
    of_length = dict.fromkeys(("seq_len", "batch_size", "cu_seqlens"))
    told = {"scale": workload.softmax_scale, "mode": workload.mode == "forward"}
    return tuple({**dict(workload), **of_length, **told}.values())


def _case(cell: TunedCell, workload: Workload, ranks: int) -> Case:
    return Case(implementation=cell.implementation, backend=cell.backend, workload=workload, world_size=ranks)


def by_priority(catalogue: Catalogue, workload: Workload, ranks: int = 1) -> tuple[str, ...]:
    """What may be taken unmeasured for a kind of pattern, on one device or over ranks, best first."""
    found = [
        one
        for one in catalogue.implementations
        if one.priority
        and one.supports.computes(workload.pattern.kind)
        # On one rank an implementation over ranks would do what its form for one device does.
        and (one.supports.max_world_size == 1) == (ranks == 1)
    ]
    return tuple(one.name for one in sorted(found, key=lambda one: -one.priority))


def _usable(catalogue: Catalogue, machine: Machine, case: Case, measured: bool = False) -> bool:
    """Whether it can run here, and is taken unasked for such a workload unless it was `measured`."""
    there = case.implementation in catalogue.implementations
    if not there or (case.backend is not None and case.backend not in catalogue.backends):
        return False
    if catalogue.implementations.get(case.implementation).chooses:
        return False
    if not measured and catalogue.reasons_unasked(case, machine):
        return False
    return not catalogue.reasons_against(case, machine)


def _alike(file: TuneFile | None, workload: Workload) -> Iterator[TunedCell]:
    """Cells of the same kind of work, the nearest in size first."""
    if file is None:
        return iter(())
    cells = [cell for cell in file.cells if _kind(cell.workload) == _kind(workload)]
    return iter(sorted(cells, key=lambda cell: _distance(cell.workload, workload)))


def _kind(workload: Workload) -> tuple[object, ...]:
    forward_only = workload.mode == "forward"
    return workload.pattern.kind, workload.causal, forward_only, workload.head_dim, workload.dtype


def _distance(a: Workload, b: Workload) -> float:
    """How many doublings apart two workloads are, in tokens x heads and in keys per query."""
    sizes = ((one.tokens * one.num_heads, attended_pairs(one) / (one.tokens * one.num_heads)) for one in (a, b))
    return sum(abs(math.log2(max(x, 1e-9) / max(y, 1e-9))) for x, y in zip(*sizes, strict=True))


def remember(path: Path, machine: Machine, cells: Iterable[TunedCell], run_id: str | None = None) -> None:
    """Put cells into a file, in the place of older ones of the same workloads. Raises as `read_tune_file`."""
    before = read_tune_file(path)
    kept = {cell.workload: cell for cell in before.cells} if before else {}
    kept |= {cell.workload: cell for cell in cells}
    file = TuneFile(
        device=device_name(machine),
        packages=package_versions(),
        run_id=run_id or (before.run_id if before else None),
        cells=tuple(kept.values()),
    )
    write_text(path, file.model_dump_json(indent=1) + "\n")


def read_tune_file(path: Path) -> TuneFile | None:
    """The file, or None when there is none. Raises ConfigError when it cannot be understood."""
    try:
        return _tune_file(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ConfigError(f"tune file {str(path)!r} cannot be read ({error}); delete it and tune again") from None


@lru_cache(maxsize=4)
def _tune_file(path: Path, _changed_ns: int) -> TuneFile:
    return TuneFile.model_validate_json(path.read_bytes())


def shipped_path(machine: Machine) -> Path:
    """Where the package's own measurements for this kind of device would be."""
    return SHIPPED / f"{_slug(device_name(machine))}.json"


def tune_path(machine: Machine) -> Path:
    """This machine's file: another GPU, torch, Triton or kernel source means another file."""
    versions = [f"{name}{version}" for name, version in package_versions().items()]
    parts = [_slug(device_name(machine)), f"sm{machine.compute_capability}", *versions, kernel_hash()]
    return cache_folder() / "tune" / ("-".join(parts) + ".json")


def device_name(machine: Machine) -> str:
    """The GPU's name, or 'cpu'."""
    return machine.gpus[0].name if machine.device == "cuda" else "cpu"


@cache
def package_versions() -> dict[str, str]:
    """Versions of the packages whose kernels are compared."""
    found = {}
    for name in ("torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def kernel_hash() -> str:
    """Eight hex digits over the sources of our kernels."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

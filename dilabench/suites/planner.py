"""What every suite needs to make cases: the catalogue, the machine, and the rules that fill in `auto`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dilabench.config import RunRequest, preset_names, workload_request
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.registry import Catalogue, Implementation
from dilabench.results import Case, Optimizations, PlannedCase
from dilabench.spec import Workload, WorkloadRequest

# Measured preference (catalog.md §2), best first; `auto` takes the first that can serve the case here.
PREFERENCE_SM90 = ("flash4", "flash3", "sdpa-cudnn", "flash2", "sdpa-flash", "sdpa-efficient", "math")
PREFERENCE_SM80 = ("flash2", "sdpa-flash", "xformers", "sdpa-efficient", "math")
PREFERENCE_OLDER = ("sdpa-efficient", "xformers", "math")
PREFERENCE_CPU = ("sdpa-flash", "math")


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes planned cases. Everything that cannot run here becomes a planned case with `skip`, never nothing."""

    catalogue: Catalogue
    machine: Machine
    request: RunRequest

    def workload_requests(self, defaults: Sequence[dict[str, Any]]) -> tuple[WorkloadRequest, ...]:
        """The workloads asked for: one per preset, or the suite's defaults, each with the user's overrides on top.

        `--lengths` multiplies each of them.
        """
        presets = preset_names(self.catalogue, self.request.presets)
        bases = [workload_request(self.catalogue, name, self.request.overrides) for name in presets] or [
            workload_request(self.catalogue, None, {**fields, **self.request.overrides}) for fields in defaults
        ]
        if not self.request.lengths:
            return tuple(dict.fromkeys(bases))
        return tuple(
            dict.fromkeys(
                workload_request(self.catalogue, None, {**base.model_dump(exclude_unset=True), "seq_len": length})
                for base in bases
                for length in self.request.lengths
            )
        )

    def implementations(self, default: Iterable[str]) -> tuple[Implementation, ...]:
        """The implementations asked for by name or alias, or the suite's default ones."""
        names = self.request.implementations or tuple(default)
        if "all" in names:
            names = self.catalogue.implementations.names
        return tuple(dict.fromkeys(self.catalogue.implementations.get(name) for name in names))

    def plan(
        self, implementation: Implementation, workload_request: WorkloadRequest, labels: dict[str, str] | None = None, **changes: Any
    ) -> tuple[PlannedCase, ...]:
        """The cases of one implementation and workload: one per backend asked for when it uses backends.

        `changes` are fields of Optimizations that differ from the request's.
        """
        workload = workload_request.resolve(self.machine.auto_dtype)
        backends: tuple[str | None, ...] = (None,)
        if implementation.uses_backend:
            backends = tuple(dict.fromkeys(self.request.backends)) or ("auto",)
        optimizations = Optimizations(
            **{
                "pattern_cache_entries": self.request.pattern_cache_entries,
                "buffer_pool_bytes": self.request.buffer_pool_bytes,
                "cuda_graph": self.request.cuda_graph,
                "compile": self.request.compile,
                **changes,
            }
        )
        return tuple(
            self._planned(implementation, backend, workload, workload_request, optimizations, labels or {}) for backend in backends
        )

    def _planned(
        self,
        implementation: Implementation,
        backend: str | None,
        workload: Workload,
        asked: WorkloadRequest,
        optimizations: Optimizations,
        labels: dict[str, str],
    ) -> PlannedCase:
        case = Case(
            implementation=implementation.name,
            backend=backend,
            workload=workload,
            optimizations=optimizations,
            world_size=self.request.nproc,
        )
        skip = None
        if backend == "auto":
            chosen = self.choose_backend(case)
            case = case.model_copy(update={"backend": chosen})
            skip = None if chosen else "no backend can serve this workload here"
        elif backend is not None:
            case = case.model_copy(update={"backend": self.catalogue.backends.get(backend).name})
        reasons = self.catalogue.reasons_against(case, self.machine)
        return PlannedCase(
            case=case,
            requested_backend=backend,
            requested_workload=asked,
            labels=labels,
            skip=skip or ("; ".join(reasons) or None),
        )

    def choose_backend(self, case: Case) -> str | None:
        """What backend `auto` means for a case here: the first of the measured preference that can serve it."""
        for name in self.preference():
            if name in self.catalogue.backends:
                trial = case.model_copy(update={"backend": name})
                if not self.catalogue.reasons_against_backend(trial, self.machine):
                    return name
        return None

    def preference(self) -> tuple[str, ...]:
        """Backend names for this device, best first."""
        capability = self.machine.compute_capability
        if self.machine.device == "cpu":
            return PREFERENCE_CPU
        if capability >= 90:
            return PREFERENCE_SM90
        return PREFERENCE_SM80 if capability >= 80 else PREFERENCE_OLDER


def as_dense(request: WorkloadRequest) -> WorkloadRequest:
    """The same shape without dilation: the workload of a yardstick row."""
    return request.model_copy(update={"pattern": "dense"})


def refuse_unknown_options(request: RunRequest, known: Iterable[str]) -> None:
    """Raise ConfigError for a suite option that this suite does not have."""
    known = sorted(known)
    for name in request.options:
        if name not in known:
            raise ConfigError(f"suite {request.suite!r} has no option {name!r}; it has {', '.join(known) or 'none'}")

"""From a request to its plan: the suite's cases, the machine, and how each case is timed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dilabench.choice.descriptors import load_target
from dilabench.choice.rules import choose
from dilabench.engine.method import Method, method_for
from dilabench.errors import ConfigError, PluginError, listed
from dilabench.machine import CXX_COMPILERS, Machine, cxx_compiler, detect
from dilabench.metadata import CHOSEN_BY, LABELS, refuse_unknown
from dilabench.patterns.dense import DENSE
from dilabench.patterns.registry import kinds_with
from dilabench.plugins.boundary import guarded, shown
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Implementation, Suite
from dilabench.plugins.manager import Found
from dilabench.record import Case, Optimizations, PlannedCase, Role, Row, SkipCode, Skipped
from dilabench.request import ALL, RunRequest, Shard
from dilabench.units import counted
from dilabench.validation import unknown_key, validated
from dilabench.workload.spec import AUTO, DEFAULT_PATTERN, WorkloadRequest

# Implementation `auto`: replaced by the choice of `dilabench.choice.rules`, workload by workload.
FASTEST = Implementation(AUTO, "the fastest known for the workload, from measurements", "dilabench.choice.rules:choose")


@dataclass(frozen=True, slots=True)
class Planner:
    """Creates planned cases. A case that cannot run here is still planned, with `skip`."""

    catalogue: Catalogue
    machine: Machine
    request: RunRequest

    def asking(self, **changes: Any) -> "Planner":
        """A planner for the request with fields filled in by a suite."""
        return replace(self, request=self.request.model_copy(update=changes))

    def workload_requests(self, defaults: Sequence[dict[str, Any]]) -> tuple[WorkloadRequest, ...]:
        """The requested workloads: one per preset, or the suite's defaults, each with the user's overrides.

        `--lengths` multiplies each of them.
        """
        presets = preset_names(self.catalogue, self.request.presets) if self.request.presets else ()
        bases = [workload_request(self.catalogue, name, self.request.overrides) for name in presets] or [
            workload_request(self.catalogue, None, {**fields, **self.request.overrides}) for fields in defaults
        ]
        asked: list[WorkloadRequest] = []
        for base in bases:
            fields = base.model_dump(exclude_unset=True)
            for length in self.request.lengths:
                asked.append(workload_request(self.catalogue, None, {**fields, "seq_len": length}))
        return tuple(dict.fromkeys(asked if self.request.lengths else bases))

    def implementations(self, default: Iterable[str]) -> tuple[Implementation, ...]:
        """The implementations requested by name or alias, or the suite's defaults."""
        registry = self.catalogue.implementations
        names = self.request.implementations
        if not names:
            # On one rank an implementation over ranks computes the same as its form for one device.
            several = self.request.nproc > 1
            names = tuple(
                name
                for name in default
                if several or name in {AUTO, ALL} or registry.get(name).supports.max_world_size is not None
            )
        if ALL in names:
            names = registry.names
        return tuple(dict.fromkeys(FASTEST if name == AUTO else registry.get(name) for name in names))

    def where(self, holds: Callable[[Implementation], bool]) -> tuple[str, ...]:
        """Names of the implementations for which `holds` is true, in the catalogue's order.

        Without the oracle, public projects (only by name or in suite `field`), those that choose among the others (only
        by name or in suite `choice`), and models (suite `model`).
        """
        names: list[str] = []
        for implementation in self.catalogue.implementations:
            if (
                implementation.role != "oracle"
                and implementation.project is None
                and not implementation.chooses
                and implementation.takes != "model"
                and holds(implementation)
            ):
                names.append(implementation.name)
        return tuple(names)

    def on_one_device(self, *patterns: str) -> tuple[str, ...]:
        """Names of implementations of these patterns on one device's q, k, v that do not compile for long per shape."""
        return self.where(
            lambda implementation: (
                implementation.supports.max_world_size == 1
                and implementation.takes == "heads"
                and not implementation.compiles
                and any(map(implementation.supports.computes, patterns))
            )
        )

    def over_ranks(self, asked: WorkloadRequest, ranks: int | None = None) -> tuple[str, ...]:
        """The default implementations of suites over ranks for a workload: those with a known sharding, best first.

        Without those whose rule excludes this number of ranks (None: the request's). If none supports such workloads,
        all of them, so that each row shows its reason.
        """
        known = self.where(
            lambda implementation: implementation.sharding is not None and implementation.takes == "heads"
        )
        registry = self.catalogue.implementations
        ordered = sorted(known, key=lambda name: -registry.get(name).priority)
        preferred = {name: registry.get(name).preferred_for or registry.get(name).supports for name in ordered}
        workload = asked.resolve(self.machine.auto_dtype, self.machine.auto_tokens)
        facts = workload, self.machine.device, ranks or self.request.nproc
        fitting = (
            name
            for name, limits in preferred.items()
            if limits.computes(asked.pattern)
            and asked.layout in limits.layouts
            and (limits.check_ranks is None or not self.catalogue.unsupported(registry.get(name), *facts))
        )
        return tuple(fitting) or tuple(ordered)

    def backends(self) -> tuple[str, ...]:
        """The backends requested by name or alias, with `all` expanded; `auto` if none was named."""
        registry = self.catalogue.backends
        names = registry.names if ALL in self.request.backends else self.request.backends
        return tuple(dict.fromkeys(name if name == AUTO else registry.get(name).name for name in names)) or (AUTO,)

    def compare(
        self, requests: Sequence[WorkloadRequest], implementations: Sequence[Implementation]
    ) -> tuple[PlannedCase, ...]:
        """Every implementation on every workload, or as a reference on its dense form (`reference_for`)."""
        cases: list[PlannedCase] = []
        for request in requests:
            for implementation in implementations:
                reference = self.reference_for(implementation, request, implementations)
                if reference is None:
                    cases += self.plan(implementation, request)
                else:
                    cases += self.plan(implementation, reference, role="yardstick")
        return tuple(cases)

    def reference_for(
        self, implementation: Implementation, asked: WorkloadRequest, beside: Iterable[Implementation]
    ) -> WorkloadRequest | None:
        """The same shape as dense attention, for an implementation that computes nothing else: an unranked reference.

        None for any other. A requested pattern is replaced only if another implementation computes it, so that a row of
        another function is never shown instead of it.
        """
        if not implementation.supports.only_dense or asked.pattern == DENSE.kind:
            return None
        if self.request.names_pattern:
            computed = (other is FASTEST or other.supports.computes(asked.pattern) for other in beside)
            return as_dense(asked) if any(computed) else None
        return as_dense(asked)

    def plan(
        self,
        implementation: Implementation,
        workload_request: WorkloadRequest,
        labels: Mapping[str, str] | None = None,
        role: Role | None = None,
        **changes: Any,
    ) -> tuple[PlannedCase, ...]:
        """The cases of one implementation and workload: one per requested backend if it uses backends.

        `role`: the role of its rows, if it differs from the implementation's; `changes`: fields of Optimizations that
        differ from the request's. Raises ConfigError for a field that does not exist.
        """
        workload = workload_request.resolve(self.machine.auto_dtype, self.machine.auto_tokens)
        labels = dict(labels or {})
        chosen_backend: str | None = None
        if implementation is FASTEST:
            choice = choose(self.catalogue, self.machine, workload, self.request.nproc)
            implementation = self.catalogue.implementations.get(choice.implementation)
            chosen_backend = choice.backend
            labels |= CHOSEN_BY.entry(f"auto ({choice.source})")
        if not (implementation.supports.square or workload.query_len or self.request.implementations):
            return ()
        backends: tuple[str | None, ...] = (None,)
        if implementation.uses_backend:
            backends = self.backends() if self.request.backends else (chosen_backend or AUTO,)
        labels |= workload.pattern.row_labels(workload.shapes)
        for name in changes.keys() - Optimizations.model_fields.keys():
            raise ConfigError(unknown_key(name, Optimizations.model_fields))
        optimizations = Optimizations(
            **{
                "pattern_cache_entries": self.request.pattern_cache_entries,
                "buffer_pool_bytes": self.request.buffer_pool_bytes,
                "cuda_graph": self.request.cuda_graph,
                "compile": self.request.compile,
                **changes,
            }
        )
        unusable = tuple(reasons_against_optimizations(optimizations, self.machine))
        planned: list[PlannedCase] = []
        for backend in backends:
            case = Case(
                implementation=implementation.name,
                backend=None if backend == AUTO else backend,
                workload=workload,
                optimizations=optimizations,
                world_size=self.request.nproc,
            )
            case, reasons = self._with_backend(case, backend)
            skip = None
            if reasons or unusable:
                code: SkipCode = "unsupported" if reasons else "unusable_optimization"
                skip = Skipped(code=code, why="; ".join((*reasons, *unusable)))
            planned.append(
                PlannedCase(
                    case=case,
                    requested_backend=backend,
                    requested_workload=workload_request,
                    labels=labels,
                    role=role or implementation.role,
                    takes=implementation.takes,
                    skip=skip,
                )
            )
        return tuple(planned)

    def _with_backend(self, case: Case, backend: str | None) -> tuple[Case, tuple[str, ...]]:
        """The case over the requested backend, or the one chosen for `auto`, and the reasons against it here."""
        # There is no reason against a backend that is chosen below.
        reasons = self.catalogue.reasons_against(case, self.machine)
        if backend != AUTO:
            return case, reasons
        chosen, against = self.catalogue.choose_backend(case, self.machine)
        reasons = reasons if chosen else (f"no backend can serve it here ({against})", *reasons)
        return Case(**{**dict(case), "backend": chosen}), reasons


class Nodes(Protocol):
    """The part of the torchrun nodes (`dilabench.engine.worker.nodes`) that a plan uses."""

    @property
    def size(self) -> int: ...
    def machine(self, machine: Machine) -> Machine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The planned measurement."""

    found: Found
    machine: Machine
    request: RunRequest
    planned: tuple[PlannedCase, ...]
    method: Method

    @property
    def catalogue(self) -> Catalogue:
        """The components that the cases may name."""
        return self.found.catalogue

    def planner(self) -> Planner:
        """The planner of further cases of the same request."""
        return Planner(self.catalogue, self.machine, self.request)


def plan_run(found: Found, request: RunRequest, nodes: Nodes | None = None) -> RunPlan:
    """The plan of a request. Under torchrun it is for all ranks, unless the request names a number.

    Raises ConfigError for a request that cannot be carried out, `--nproc` beyond the ranks of torchrun included, and
    PluginError for a suite that fails.
    """
    request, machine = asking_all(request, nodes), detect(request.device)
    machine = nodes.machine(machine) if nodes else machine
    planned = expand(found.catalogue, machine, request)
    method = method_for(request, machine.device, found.catalogue)
    return RunPlan(found=found, machine=machine, request=request, planned=planned, method=method)


def asking_all(request: RunRequest, nodes: Nodes | None) -> RunRequest:
    """The request for all ranks of torchrun unless it names a number. Raises ConfigError for more than there are."""
    if nodes is None:
        return request
    if request.nproc > nodes.size:
        raise ConfigError(
            f"--nproc {request.nproc} needs more ranks than torchrun started ({nodes.size}); leave --nproc out"
        )
    return request if request.nproc > 1 else request.model_copy(update={"nproc": nodes.size})


def expand(catalogue: Catalogue, machine: Machine, request: RunRequest) -> tuple[PlannedCase, ...]:
    """The cases of a request on a machine, planned by its suite.

    Raises ConfigError for an unknown suite, an impossible workload, or a field of a pattern that no case has,
    PluginError for a suite that fails or returns anything but cases.
    """
    suite = catalogue.suites.get(request.suite)
    if request.shard and suite.follow_up is not None and not suite.deals:
        raise ConfigError(
            f"suite {suite.name!r} finds its next cases from its rows, so it has no shards; leave --shard out"
        )
    planned = cases_of(suite, Planner(catalogue, machine, request))
    refuse_idle_fields(request, planned)
    return planned if suite.deals else in_shard(planned, request.shard)


def refuse_idle_fields(request: RunRequest, planned: Iterable[PlannedCase]) -> None:
    """Raise ConfigError for a field of a pattern that no case has: it would change nothing.

    An unranked reference may be requested with the fields of the requested pattern, so that pattern counts as well.
    """
    there = {case.case.workload.pattern.kind for case in planned} | {request.overrides.get("pattern", DEFAULT_PATTERN)}
    for name in sorted(request.overrides.keys() - WorkloadRequest.model_fields.keys()):
        kinds = tuple(kinds_with(name))
        if there.isdisjoint(kinds):
            raise ConfigError(
                f"{name}={request.overrides[name]} has no effect: it is a field of pattern "
                f"{listed(kinds, 'or')}, and the request is for {listed(sorted(there), 'and')}; "
                f"add --set pattern={kinds[0]}, or leave it out"
            )


def in_shard(planned: Sequence[PlannedCase], shard: Shard | None) -> tuple[PlannedCase, ...]:
    """The cases of one part of a request: each workload goes to one part with all its cases, which are interleaved.

    Raises ConfigError for more parts than there are workloads.
    """
    if shard is None:
        return tuple(planned)
    index, count = shard
    groups = list(dict.fromkeys(case.case.group_id for case in planned))
    if count > len(groups):
        raise ConfigError(
            f"shard {index}/{count}: the request has {counted(len(groups), 'workload')}, so there can be at most "
            "as many shards; the cases of one workload are measured together"
        )
    # In alternating direction, which balances alternating workloads (one and its reference) and growing lengths.
    places = {at: index - 1 if at // count % 2 == 0 else count - index for at in range(len(groups))}
    mine = {group for at, group in enumerate(groups) if at % count == places[at]}
    return tuple(case for case in planned if case.case.group_id in mine)


def cases_of(suite: Suite, planner: Planner) -> tuple[PlannedCase, ...]:
    """The suite's cases for the planner's request. Raises PluginError if it fails or returns anything but cases."""
    with guarded(planner.catalogue.suites.origin(suite.name), f"suite {suite.name!r}"):
        return _checked(suite.target, load_target(suite.target)(planner.request, planner), planner.catalogue)


def more_cases_of(suite: Suite, planner: Planner, rows: Sequence[Row]) -> tuple[PlannedCase, ...]:
    """The cases of a suite's follow-up after these rows; raises like `cases_of`."""
    if suite.follow_up is None:
        return ()
    with guarded(planner.catalogue.suites.origin(suite.name), f"follow-up of suite {suite.name!r}"):
        return _checked(
            suite.follow_up, load_target(suite.follow_up)(rows, planner.request, planner), planner.catalogue
        )


def _checked(target: str, planned: Any, catalogue: Catalogue) -> tuple[PlannedCase, ...]:
    """The cases, each with its source.

    Raises PluginError for other objects, and for a label that is neither in the registry nor a plug-in's.
    """
    if not isinstance(planned, Iterable) or isinstance(planned, str):
        raise PluginError(f"{target} returned {shown(planned)}; it must return a sequence of PlannedCase")
    cases: tuple[PlannedCase, ...] = tuple(planned)
    for case in cases:
        if not isinstance(case, PlannedCase):
            raise PluginError(f"{target} planned {shown(case)}, which is no PlannedCase")
        if not case.labels.keys() <= LABELS.keys():
            refuse_unknown("label", case.labels)
    sources = map(catalogue.source_of, (case.case for case in cases))
    return tuple(
        case if case.source == source else case.model_copy(update={"source": source})
        for case, source in zip(cases, sources, strict=True)
    )


def workload_request(catalogue: Catalogue, preset: str | None, overrides: Mapping[str, Any]) -> WorkloadRequest:
    """The request of a preset (or the defaults) with the overrides applied.

    Raises ConfigError for an unknown preset, a set where one workload is needed, an unknown key or a wrong value.
    """
    fields: dict[str, Any] = {}
    if preset is not None:
        descriptor = catalogue.workloads.get(preset)
        if descriptor.members:
            raise ConfigError(f"{preset!r} is a set of workloads ({', '.join(descriptor.members)}); name one of them")
        fields.update(descriptor.fields)
    fields.update(overrides)
    return validated(WorkloadRequest, fields)


def preset_names(catalogue: Catalogue, names: Iterable[str]) -> tuple[str, ...]:
    """The presets with sets replaced by their members, in order, each once."""
    flat: list[str] = []
    for name in names:
        descriptor = catalogue.workloads.get(name)
        flat.extend(descriptor.members or (descriptor.name,))
    return tuple(dict.fromkeys(flat))


def as_dense(request: WorkloadRequest) -> WorkloadRequest:
    """The same shape without dilation: the workload of an unranked reference."""
    return request.model_copy(update={"pattern": DENSE.kind})


def refuse_unknown_options(request: RunRequest, known: Iterable[str]) -> None:
    """Raise ConfigError for an option outside of `known`; for suites whose descriptor has no model of options."""
    known = sorted(known)
    for name in request.options:
        if name not in known:
            hint = f"it has {', '.join(known)}" if known else "it has no options, so omit it"
            raise ConfigError(f"suite {request.suite!r} has no option {name!r}; {hint}")


def reasons_against_optimizations(optimizations: Optimizations, machine: Machine) -> Iterator[str]:
    """Yield the reasons why optimizations cannot be switched on here; empty if they can."""
    if optimizations.cuda_graph and machine.device != "cuda":
        yield "cuda_graph needs a CUDA GPU"
    if optimizations.compile and machine.device == "cpu" and not cxx_compiler():
        yield f"compile needs a C++ compiler on a CPU, none of {', '.join(CXX_COMPILERS)} works here"

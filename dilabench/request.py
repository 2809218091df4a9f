"""A run request: what the command line, a TOML file and presets come to, before any case is made."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from dilabench.atomic_file import read_file
from dilabench.errors import ConfigError, listed, unknown_name
from dilabench.patterns.registry import request_fields
from dilabench.plugins.boundary import guarded
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Suite
from dilabench.retired import no_such_name
from dilabench.units import parse_duration
from dilabench.validation import Model, Sizes, parsed_toml, unknown_key, validated
from dilabench.workload.batch_notation import BATCH
from dilabench.workload.spec import WorkloadRequest

TABLES = ("workload", "run")
COMMAND_LINE_ONLY = {"suite", "overrides"}
COMMAND_LINE_ONLY_HINT = "name the suite on the command line and put workload fields under [workload]"
AUTO = "auto"
ALL = "all"
NO_BUDGET = "none"
POOL_BYTES = 2**30
# Fields that have an option for some of their values; `--set` takes any.
SWITCHES: Mapping[str, Mapping[Any, str]] = {
    "cuda_graph": {True: "--cuda-graph"},
    "compile": {True: "--compile"},
    "buffer_pool_bytes": {POOL_BYTES: "--enable-memory-pool"},
    "pattern_cache_entries": {0: "--disable-pattern-cache"},
}
# (2, 8): the second of eight parts of a request.
Shard = tuple[int, int]


class RunRequest(Model):
    """A complete request of `dilabench run`; the keys of a TOML file's [run] table except `suite` and `overrides`.

    `presets` names workloads. `overrides` are the workload fields that the user set by hand (TOML, `--set`, short
    options): a suite that varies a field (lengths, say) does not change these.
    """

    suite: str
    implementations: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    overrides: dict[str, Any] = Field(default_factory=dict)
    lengths: Sizes = ()
    device: str = AUTO
    timing: str = "warmup"
    warmup_runs: int | None = Field(default=None, ge=0, le=10**6)
    timing_runs: int | None = Field(default=None, ge=1, le=10**6)
    nproc: int = Field(default=1, ge=1, le=4096)
    budget_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**63)
    options: dict[str, Any] = Field(default_factory=dict)
    pattern_cache_entries: int = Field(default=64, ge=0)
    buffer_pool_bytes: int = Field(default=0, ge=0)
    cuda_graph: bool = False
    compile: bool = False
    shard: Shard | None = None

    @property
    def names_pattern(self) -> bool:
        """Return True if a preset, the pattern or a field of one was given: what is computed is then what was asked."""
        return bool(self.presets or "pattern" in self.overrides or self.overrides.keys() - WorkloadRequest.model_fields)

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,31}", value):
            raise ValueError(f"device {value!r} must be auto, cpu, cuda or the name of another, with no number")
        return value

    @field_validator("shard", mode="before")
    @classmethod
    def _shard(cls, value: Any) -> Any:
        if isinstance(value, str):
            if not re.fullmatch(r"\d{1,4}/\d{1,4}", value.strip()):
                raise ValueError(f"shard {value!r} must be like 2/8: the second of eight")
            return tuple(value.split("/"))
        return value

    @field_validator("shard")
    @classmethod
    def _shard_is_possible(cls, value: Shard | None) -> Shard | None:
        if value is not None and not 1 <= value[0] <= value[1] <= 4096:
            raise ValueError(f"shard {value[0]}/{value[1]} must be like 2/8: from 1 to the number of shards")
        return value

    @field_validator("lengths")
    @classmethod
    def _lengths_differ(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        repeated = sorted({length for length in value if value.count(length) > 1})
        if repeated:
            raise ValueError(f"{list(value)} repeats {', '.join(map(str, repeated))}; give each length once")
        return value

    @field_validator("budget_s", mode="before")
    @classmethod
    def _budget(cls, value: Any) -> Any:
        return read_budget(value) if isinstance(value, str) else value

    def command_line(self) -> tuple[str, ...]:
        """The arguments after `dilabench` that give the same request, as `run_request` reads them.

        Values with a default of the suite are always included.
        """
        words = ["run", self.suite]
        named = {"-i": self.implementations, "-b": self.backends, "--config": self.presets}
        words += [word for option, names in named.items() for name in names for word in (option, name)]
        if self.lengths:
            words += ["--lengths", ",".join(map(str, self.lengths))]
        for name, value in {**self.overrides, **self.options}.items():
            words += ["--set", assignment(name, value)]
        words += ["--device", self.device] if self.device != AUTO else []
        words += ["--nproc", str(self.nproc)] if self.nproc != 1 else []
        words += ["--shard", "{}/{}".format(*self.shard)] if self.shard else []
        for name, switches in SWITCHES.items():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                words += [switches[value]] if value in switches else ["--set", assignment(name, value)]
        if self.timing == type(self).model_fields["timing"].default:
            words += ["--timing", self.timing]
        return (*words, *measuring_options(self.model_dump()))


# Fields of a request that `--set` may give; for presets, options and overrides, their content.
BY_SET = RunRequest.model_fields.keys() - {"suite", "presets", "options", "overrides"}


def read_budget(text: str) -> float | None:
    """A duration in seconds; None, no limit, for 'none'."""
    return None if text.strip() == NO_BUDGET else parse_duration(text)


def shard_of(config: Mapping[str, Any]) -> Shard | None:
    """The requested part of a request (its fields by name). Raises ConfigError for an invalid shard."""
    return validated(RunRequest, {"suite": "", "shard": config.get("shard")}).shard


def measuring_options(config: Mapping[str, Any]) -> Iterator[str]:
    """Options of `dilabench run` for how a request (its fields by name) is measured, if that is not the default.

    The budget is always included, because a suite has one by default.
    """
    for name in ("timing", "seed", "warmup_runs", "timing_runs"):
        if (value := config.get(name)) is not None and value != RunRequest.model_fields[name].default:
            yield from (f"--{name.replace('_', '-')}", str(value))
    budget_s = config.get("budget_s")
    if budget_s is None:
        yield from ("--budget", NO_BUDGET)
    else:
        rounded = f"{budget_s:g}"
        yield from ("--budget", f"{rounded if float(rounded) == budget_s else repr(budget_s)}s")


def resume_command(suite: str, run: str, budget: str = "") -> str:
    """The command line that continues a run: its id, id and -o, or folder; `budget` is an option, or empty."""
    return f"dilabench run {suite} --resume {run} {budget}".rstrip()


def run_request(
    catalogue: Catalogue,
    *,
    suite: str,
    configs: Sequence[str] = (),
    assignments: Sequence[str] | Mapping[str, Any] = (),
    workload: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    keywords: Iterable[str] = (),
) -> RunRequest:
    """Bring together presets and TOML files (`configs`), `--set` texts and options; the later of these wins.

    `assignments` may also be fields by name. Each is one of the suite's options, of the request or of the workload.
    `workload` and `run` hold the fields given as separate options; a workload field that is None is not given.
    `keywords`: other names that the caller takes, which a misspelt one may mean. Raises
    ConfigError for an unknown name or key, a wrong value, or one field given two ways that differ.
    """
    try:
        descriptor = catalogue.suites.get(suite)
    # A plan refuses it; commands that have no suite ask for things by other names.
    except ConfigError:
        descriptor = None
    fields: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    presets: list[str] = []
    for config in configs:
        if config.endswith(".toml") or "/" in config or "\\" in config:
            tables = read_config(Path(config))
            overrides.update(tables["workload"])
            fields.update(tables["run"])
        else:
            presets.append(catalogue.workloads.get(config).name)
    assigned = dict(assignments) if isinstance(assignments, Mapping) else read_assignments(assignments)
    # A suite without a model passes on what others take.
    taking = () if descriptor is None else (descriptor,) if descriptor.options else catalogue.suites
    own = {name for taker in taking if taker.options for name in taker.options.model_fields}
    of_suite = {name: assigned.pop(name) for name in own if name in assigned}
    of_run = {name: assigned.pop(name) for name in BY_SET if name in assigned}
    # Fields of all patterns are asked for only if the name is none of these.
    for name in sorted(assigned.keys() - {*WorkloadRequest.model_fields, BATCH}):
        if name not in request_fields():
            known = {*WorkloadRequest.model_fields, BATCH, *request_fields(), *BY_SET, *own, *keywords}
            raise ConfigError(unknown_key(name, known))
    overrides.update(_agreed(assigned, workload or {}))
    options = {**fields.get("options", {}), **_agreed(of_suite, (run or {}).get("options", {}))}
    fields.update(_agreed(of_run, run or {}), options=options)
    if descriptor is not None:
        fields["options"] = checked_options(catalogue, descriptor, options)
        fields = {"timing": descriptor.timing, "budget_s": descriptor.budget_s, **fields}
    if presets:
        fields["presets"] = presets
    request = validated(RunRequest, {**fields, "suite": suite})
    _check_names(catalogue, request)
    typed = validated(WorkloadRequest, overrides)
    given = typed.model_dump(include=typed.model_fields_set, exclude_none=True)
    request = request.model_copy(update={"overrides": given})
    if request.lengths and "seq_len" in request.overrides:
        raise ConfigError(
            f"seq_len={request.overrides['seq_len']} and lengths {list(request.lengths)} are both given; leave one out"
        )
    return request


def checked_options(catalogue: Catalogue, suite: Suite, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a suite as its model reads them, as plain data; for a suite without a model, by the models of
    other suites.

    Raises ConfigError for an option that the suite does not have, or a wrong value; PluginError if a model fails.
    """
    if suite.options is not None:
        for name in options.keys() - suite.options.model_fields.keys():
            having = [other.name for other in catalogue.suites if other.options and name in other.options.model_fields]
            known = ", ".join(sorted(suite.options.model_fields))
            if having:
                have = "suite {} has" if len(having) == 1 else "suites {} have"
                hint = f"{have.format(listed(having, 'and'))} it: `dilabench run {having[0]}`, or leave it out"
            else:
                hint = f"it has {known}" if known else "it has no such options, omit it"
            raise ConfigError(f"suite {suite.name!r} has no option {name!r} (given as {options[name]!r}); {hint}")
    checked = dict(options)
    for taker in [suite] if suite.options else catalogue.suites:
        own = {name: options[name] for name in (taker.options.model_fields if taker.options else ()) if name in options}
        if taker.options and own:
            with guarded(catalogue.suites.origin(taker.name), f"options of suite {taker.name!r}"):
                checked |= validated(taker.options, own).model_dump(mode="json", exclude_unset=True)
    return checked


def _agreed(assigned: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if name in assigned and str(assigned[name]) != str(value):
            raise ConfigError(f"{name} is given twice: {value!r} and, by --set, {assigned[name]!r}; leave one out")
    return {**assigned, **options}


def _check_names(catalogue: Catalogue, request: RunRequest) -> None:
    """Refuse unknown names here, whether or not the suite would come to look at them."""
    for name in request.implementations:
        if name not in {AUTO, ALL}:
            catalogue.implementations.get(name)
    for name in request.backends:
        if name not in {AUTO, ALL}:
            if name not in catalogue.backends:
                raise no_such_name("backend", name, [*catalogue.backends.names, AUTO, ALL])
            catalogue.backends.get(name)
    for name in request.presets:
        catalogue.workloads.get(name)


def read_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse `--set key=value` texts into fields; values are read as TOML if possible, else kept as text."""
    fields: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment!r} has no 'key='; write for example --set seq_len=4096")
        fields[key.strip().replace("-", "_")] = _read_value(value.strip())
    return fields


def assignment(name: str, value: Any) -> str:
    """The `key=value` of a field for `--set`, which `read_assignments` reads back."""
    if isinstance(value, str) and _read_value(value.strip()) == value:
        return f"{name}={value}"
    # Numbers, texts and lists of them are written in TOML as in JSON.
    return f"{name}={json.dumps(value, ensure_ascii=False)}"


def _read_value(text: str) -> Any:
    try:
        return parsed_toml(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        # No TOML, or a number or nesting beyond Python's limits: the error of the field says what it may be.
        return text


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """The [workload] and [run] tables of a TOML file, checked one by one so that a mistake names the file.

    Raises ConfigError when it cannot be read or parsed, or has an unknown table, an unknown key or a wrong value.
    """
    document = read_toml(path)
    for name, table in document.items():
        if name not in TABLES or not isinstance(table, dict):
            raise ConfigError(f"config file {str(path)!r}: {unknown_name('table', name, TABLES).args[0]}")
    tables = {name: document.get(name, {}) for name in TABLES}
    if "budget" in tables["run"]:
        tables["run"]["budget_s"] = tables["run"].pop("budget")
    for name in COMMAND_LINE_ONLY & tables["run"].keys():
        raise ConfigError(f"config file {str(path)!r}: [run] cannot hold {name!r}; {COMMAND_LINE_ONLY_HINT}")
    try:
        validated(WorkloadRequest, tables["workload"])
        validated(RunRequest, {**tables["run"], "suite": ""})
    except ConfigError as error:
        raise ConfigError(f"config file {str(path)!r}: {error}") from None
    return tables


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError when it cannot be read or parsed, with the place."""
    try:
        return parsed_toml(read_file(path, pipe=True).decode())
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config file {str(path)!r} is not valid TOML: {error}") from None

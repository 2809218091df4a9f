"""A run request: what the command line, a TOML file and presets come to, before any case is made."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from dilabench.errors import ConfigError, unknown_name
from dilabench.plugins.catalogue import Catalogue
from dilabench.retired import no_such_name
from dilabench.units import parse_duration
from dilabench.validation import Model, Sizes, validated
from dilabench.workload.spec import WorkloadRequest

TABLES = ("workload", "run")
COMMAND_LINE_ONLY = {"suite", "overrides"}
COMMAND_LINE_ONLY_HINT = "name the suite on the command line and put workload fields under [workload]"
AUTO = "auto"
ALL = "all"
NO_BUDGET = "none"
# (2, 8): the second of eight parts of a request.
Shard = tuple[int, int]


class RunRequest(Model):
    """Everything `dilabench run` was asked for; the keys of a TOML file's [run] table but for `suite` and `overrides`.

    `presets` names workloads. `overrides` are the workload fields that the user set by hand (TOML, `--set`, short
    options): a suite that varies a field by itself (lengths, say) leaves alone what is named here.
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


def read_budget(text: str) -> float | None:
    """A duration in seconds; None, no limit, for 'none'."""
    return None if text.strip() == NO_BUDGET else parse_duration(text)


def shard_of(config: Mapping[str, Any]) -> Shard | None:
    """Which part of a request (its fields by name) was asked for. Raises ConfigError for what is none."""
    return validated(RunRequest, {"suite": "", "shard": config.get("shard")}).shard


def measuring_options(config: Mapping[str, Any]) -> Iterator[str]:
    """Options of `dilabench run` for how a request (its fields by name) is measured, where that is not the default.

    The budget always stands there: a suite has one unless told that there is none.
    """
    for name in ("timing", "seed", "warmup_runs", "timing_runs"):
        if (value := config.get(name)) is not None and value != RunRequest.model_fields[name].default:
            yield from (f"--{name.replace('_', '-')}", str(value))
    budget_s = config.get("budget_s")
    yield from ("--budget", NO_BUDGET if budget_s is None else f"{budget_s:g}s")


def run_request(
    catalogue: Catalogue,
    *,
    suite: str,
    configs: Sequence[str] = (),
    assignments: Sequence[str] = (),
    workload: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> RunRequest:
    """Bring together presets and TOML files (`configs`), `--set` texts and options; the later of these wins.

    `workload` and `run` hold the fields given as options of their own. Raises ConfigError for an unknown name or key, a
    wrong value, or one field given two ways that differ.
    """
    descriptor = catalogue.suites.get(suite) if suite in catalogue.suites else None
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
    assigned = read_assignments(assignments)
    own = () if descriptor is None or descriptor.options is None else descriptor.options
    of_suite = {name: assigned.pop(name) for name in own if name in assigned}
    overrides.update(_agreed(assigned, workload or {}))
    options = {**fields.get("options", {}), **_agreed(of_suite, (run or {}).get("options", {}))}
    fields.update(run or {}, options=options)
    if descriptor is not None:
        fields = {"timing": descriptor.timing, "budget_s": descriptor.budget_s, **fields}
    if presets:
        fields["presets"] = presets
    request = validated(RunRequest, {**fields, "suite": suite})
    _check_names(catalogue, request)
    typed = validated(WorkloadRequest, overrides)
    request = request.model_copy(update={"overrides": typed.model_dump(include=typed.model_fields_set)})
    if request.lengths and "seq_len" in request.overrides:
        raise ConfigError(
            f"seq_len={request.overrides['seq_len']} and lengths {list(request.lengths)} are both given; leave one out"
        )
    return request


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
    """Turn `--set key=value` texts into fields; values are read as TOML where they are TOML, else kept as text."""
    fields: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment!r} has no 'key='; write for example --set seq_len=4096")
        fields[key.strip().replace("-", "_")] = _read_value(value.strip())
    return fields


def _read_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        # No TOML, or a number or nesting beyond what Python reads: the field says what it may be.
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
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config file {str(path)!r} is not valid TOML: {error}") from None

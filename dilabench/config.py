"""A run request: what the command line, a TOML file and presets come to, before any case is made."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dilabench.errors import ConfigError
from dilabench.registry import Catalogue
from dilabench.spec import Model, WorkloadRequest, validated


class RunRequest(Model):
    """Everything `dilabench run` was asked for. Workload fields are in `workloads`, one per preset asked for.

    `overrides` are the workload fields that the user set by hand (TOML, `--set`, short options): a suite that varies a
    field by itself (lengths, say) leaves alone what is named here.
    """

    suite: str
    implementations: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    overrides: dict[str, Any] = Field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timing: str = "warmup"
    nproc: int = Field(default=1, ge=1, le=4096)
    budget_s: float | None = Field(default=None, gt=0)
    seed: int = Field(default=0, ge=0)
    options: dict[str, Any] = Field(default_factory=dict)
    pattern_cache_entries: int = Field(default=64, ge=0)
    buffer_pool_bytes: int = Field(default=0, ge=0)
    cuda_graph: bool = False
    compile: bool = False


def workload_request(catalogue: Catalogue, preset: str | None, overrides: Mapping[str, Any]) -> WorkloadRequest:
    """The request of a preset (or the defaults) with the overrides on top.

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


def preset_names(catalogue: Catalogue, names: Sequence[str]) -> tuple[str, ...]:
    """The presets with sets replaced by their members, in order, each once."""
    flat: list[str] = []
    for name in names:
        descriptor = catalogue.workloads.get(name)
        flat.extend(descriptor.members or (descriptor.name,))
    return tuple(dict.fromkeys(flat))


def read_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Turn `--set key=value` texts into fields; values are read as TOML where they are TOML, else kept as text."""
    fields: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment!r} has no '='; write for example --set seq_len=4096")
        fields[key.strip().replace("-", "_")] = _read_value(value.strip())
    return fields


def _read_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError when it cannot be read or parsed, with the place."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not valid TOML: {error}") from None

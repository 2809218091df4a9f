"""Records of older schema versions, brought up to date one version at a time. No torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dilabench.errors import ConfigError
from dilabench.plugins import builtin
from dilabench.record import SCHEMA_VERSION

Document = dict[str, Any]


def _to_1_1(document: Document) -> Document:
    """What a row is and what its call receives were labels; what a plain method is was known by its name."""
    roles = {one.name: one.role for one in builtin.dilabench_register_implementations()}
    rows = document.get("rows")
    return {**document, "rows": [_typed(row, roles) for row in rows]} if isinstance(rows, list) else document


def _typed(row: Any, roles: Mapping[str, str]) -> Any:
    """The row with a role; one that has it already, or is no row at all, as it is."""
    try:
        planned, labels = row["planned"], dict(row["planned"].get("labels") or {})
        own = roles.get(planned["case"]["implementation"], "method")
    except (KeyError, TypeError, AttributeError, ValueError):
        return row
    if "role" in planned:
        return row
    role = "yardstick" if labels.pop("role", None) == "yardstick" else own
    return {**row, "planned": {**planned, "role": role, "takes": labels.pop("takes", "heads"), "labels": labels}}


# From each version to the next one.
STEPS: Mapping[str, tuple[Callable[[Document], Document], str]] = MappingProxyType({"1.0": (_to_1_1, "1.1")})


def migrated(
    document: Document,
    path: Path,
    steps: Mapping[str, tuple[Callable[[Document], Document], str]] = STEPS,
    current: str = SCHEMA_VERSION,
) -> Document:
    """The document as the current version writes it. Raises ConfigError for a version without a way here."""
    version = str(document.get("schema_version", current))
    while version != current:
        if version not in steps:
            newer = _key(version) > _key(current)
            way_out = "update dilabench" if newer else "it is not a version that was ever released"
            raise ConfigError(
                f"{str(path)!r} has schema version {version!r}, this dilabench reads up to {current}; {way_out}"
            )
        step, version = steps[version]
        document = {**step(document), "schema_version": version}
    return document


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())

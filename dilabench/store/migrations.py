"""Records of older schema versions, brought up to date one version at a time. No torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dilabench.errors import ConfigError
from dilabench.record import SCHEMA_VERSION

Document = dict[str, Any]
# From each version to the next one: {"1.0": (to_1_1, "1.1")}. Empty while there is only the first.
STEPS: Mapping[str, tuple[Callable[[Document], Document], str]] = MappingProxyType({})


def migrated(
    document: Document,
    path: Path,
    steps: Mapping[str, tuple[Callable[[Document], Document], str]] = STEPS,
    current: str = SCHEMA_VERSION,
) -> Document:
    """The document as the current version writes it. Raises ConfigError for a version that cannot be converted."""
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

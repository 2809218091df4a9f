"""Which kinds of pattern there are. Plug-ins name them by the hook `dilabench_register_patterns`, ours included.

A workload is read in many places (requests, records, worker processes), often before anybody asked for the catalogue.
So the kinds that plug-ins were found to have are kept for the process, and a kind that is not there has plug-ins
looked for.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict

from dilabench.errors import ConfigError, PluginError
from dilabench.patterns.pattern import KeyGroup, Pattern, Positions, SequenceShape


@dataclass(frozen=True, slots=True)
class PatternKind:
    """A kind of pattern. `target` is its class, a `dilabench.patterns.pattern.Pattern` whose `kind` is `name`."""

    name: str
    summary: str
    target: str
    aliases: tuple[str, ...] = ()


class RetiredPattern(Pattern):
    """A kind that was removed, as old records hold it: its fields as they are. Which keys a row sees is not known."""

    model_config = ConfigDict(extra="allow")
    drawn_in_reports: ClassVar[bool] = False

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:  # noqa: ARG002
        """None, so that its pairs, density and FLOPs are 0."""
        return iter(())


_types: dict[str, type[Pattern]] = {}


def load(kind: PatternKind) -> type[Pattern]:
    """The class of a descriptor. Raises PluginError when it cannot be loaded or is no such pattern."""
    try:
        module, _, name = kind.target.partition(":")
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"pattern {kind.name!r}: target {kind.target!r} cannot be loaded ({error})") from error
    if not (isinstance(found, type) and issubclass(found, Pattern)):
        raise PluginError(f"pattern {kind.name!r}: {kind.target} is no subclass of dilabench.patterns.pattern.Pattern")
    if (own := found.model_fields["kind"].default) != kind.name:
        raise PluginError(f"pattern {kind.name!r}: the field kind of {kind.target} is {own!r}; make it the same name")
    return found


def register(kind: PatternKind, pattern: type[Pattern]) -> None:
    """Make a kind known in this process; the last one of a name holds."""
    _types.update(dict.fromkeys((kind.name, *kind.aliases), pattern))


def pattern_type(kind: str) -> type[Pattern]:
    """The class of a kind. Raises ConfigError for one that no plug-in has."""
    if kind not in _types:
        # Its registry raises the error for a kind that is missing there, too.
        _find_plugins().patterns.get(kind)
    return _types[kind]


def known_kinds() -> tuple[str, ...]:
    """All kinds, ours first."""
    if not _types:
        _find_plugins()
    return tuple(_types)


def read_pattern(value: Any) -> Pattern:
    """A pattern from its fields, `kind` among them; a `RetiredPattern` for a kind that was removed.

    Raises ConfigError for an unknown kind or without one.
    """
    if isinstance(value, Pattern):
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("kind"), str):
        raise ConfigError(f"pattern {value!r:.80} has no kind; write for example {{'kind': '{known_kinds()[0]}'}}")
    kind = value["kind"]
    retired = kind not in _types and importlib.import_module("dilabench.plugins.retired").is_retired("pattern", kind)
    return (RetiredPattern if retired else pattern_type(kind)).model_validate(value)


def kinds_with(field: str) -> Iterator[str]:
    """The kinds whose requests take a field of this name."""
    return (
        kind for kind in known_kinds() if field in pattern_type(kind).request_model().model_fields.keys() - {"kind"}
    )


def kind_with_fields(fields: Iterable[str]) -> str:
    """The first kind whose requests take all these fields, which then say what pattern is meant."""
    former = {name: now for kind in known_kinds() for name, (now, _) in pattern_type(kind).former_fields.items()}
    wanted = {former.get(field, field) for field in fields}
    return next(kind for kind in known_kinds() if wanted <= pattern_type(kind).request_model().model_fields.keys())


def with_present_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, those under names of before under today's. Raises ValueError for one under both."""
    renamed = dict(fields)
    for kind in known_kinds():
        for before, (now, read) in pattern_type(kind).former_fields.items():
            if before in renamed:
                value = read(renamed.pop(before))
                if now in renamed:
                    raise ValueError(f"{before} was the name of {now}, and both are given; leave {before} out")
                renamed[now] = value
    return renamed


def request_fields() -> set[str]:
    """Every field that a request may give to some pattern."""
    return {field for kind in known_kinds() for field in pattern_type(kind).request_model().model_fields} - {"kind"}


def _find_plugins() -> Any:
    """The catalogue. Imported by name, as any target, for patterns lie below the plug-ins that bring them."""
    return importlib.import_module("dilabench.plugins.manager").discover().catalogue

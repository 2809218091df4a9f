"""The kinds of pattern. Plug-ins, the built-in one included, register them by the hook `dilabench_register_patterns`.

Kinds of plug-ins are stored for the process. A workload is read in many places (requests, records, worker processes),
often before the catalogue is loaded: an unknown kind calls the finder, which the plug-in manager and the worker
processes set (`find_kinds_with`).
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, SerializeAsAny, WithJsonSchema

from dilabench.errors import ConfigError, PluginError
from dilabench.patterns.pattern import KeyGroup, Pattern, Positions, SequenceShape
from dilabench.retired import is_retired, no_such_name
from dilabench.validation import CHECKED, Name, Target, readable


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class PatternKind:
    """A kind of pattern."""

    name: Name
    """The `kind` of the pattern's class."""
    summary: str
    """One line for lists."""
    target: Target
    """Its class, a `dilabench.patterns.pattern.Pattern`."""
    aliases: tuple[Name, ...] = ()
    """Other names."""


OWN_KINDS = (
    PatternKind("dense", "every query sees every key", "dilabench.patterns.dense:DensePattern"),
    PatternKind(
        "dilated", "LongNet's branches of strided segments, as one softmax", "dilabench.patterns.dilated:DilatedPattern"
    ),
    PatternKind(
        "block_sparse",
        "blocks of queries see blocks of keys, by a mask",
        "dilabench.patterns.block_sparse:BlockSparsePattern",
    ),
    PatternKind(
        "window_sink",
        "the first keys and a sliding window (StreamingLLM)",
        "dilabench.patterns.window_sink:WindowSinkPattern",
    ),
    PatternKind(
        "column_bounds",
        "keys hidden from ranges of rows: documents, prefixes, shared questions (FlashMask)",
        "dilabench.patterns.column_bounds:ColumnBoundsPattern",
    ),
    PatternKind(
        "topk_blocks",
        "the best key blocks of each block of queries, by a selector (VSA; MoBA selects per query token)",
        "dilabench.patterns.topk_blocks:TopKBlocksPattern",
    ),
    PatternKind(
        "selected_blocks",
        "key blocks chosen per query token and key/value head, by a selector or given (NSA, MoBA, DSA, MSA)",
        "dilabench.patterns.selected_blocks:SelectedBlocksPattern",
    ),
    PatternKind(
        "native_sparse",
        "means of blocks, blocks selected per query token and a window, summed with gates (NSA)",
        "dilabench.patterns.native_sparse:NativeSparsePattern",
    ),
    PatternKind(
        "blockwise_native_sparse",
        "NSA's three attentions, selecting per block of queries",
        "dilabench.patterns.native_sparse:BlockwiseNativeSparsePattern",
    ),
)


# Parts of attention that the library calls and no request names.
PARTS = (
    PatternKind(
        "compressed_keys",
        "keys that stand for blocks of tokens (NSA's first branch)",
        "dilabench.patterns.native_sparse:CompressedKeysPattern",
    ),
)


class RetiredPattern(Pattern):
    """A removed kind, as old records hold it: its fields are kept, the keys that a row sees are unknown."""

    model_config = ConfigDict(extra="allow")
    drawn_in_reports: ClassVar[bool] = False

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:  # noqa: ARG002
        """Empty, so that its pairs, density and FLOPs are 0."""
        return iter(())


_parts: dict[str, PatternKind | type[Pattern]] = {part.name: part for part in PARTS}
# By name and alias; a descriptor until its class is first requested.
_types: dict[str, PatternKind | type[Pattern]] = {}
for _own in OWN_KINDS:
    _types |= dict.fromkeys((_own.name, *_own.aliases), _own)
_finder: Callable[[], object] | None = None
_is_complete = False


def find_kinds_with(finder: Callable[[], object]) -> None:
    """Set the function that is called for kinds that may be a plug-in's; it calls `register`."""
    global _finder
    _finder = finder


def load(kind: PatternKind) -> type[Pattern]:
    """Import the class of a descriptor. Raises PluginError if it cannot be loaded or is not a pattern of this name."""
    try:
        module, _, name = kind.target.partition(":")
        pattern = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"pattern {kind.name!r}: target {kind.target!r} cannot be loaded ({error})") from error
    if not (isinstance(pattern, type) and issubclass(pattern, Pattern)):
        raise PluginError(f"pattern {kind.name!r}: {kind.target} is no subclass of dilabench.patterns.pattern.Pattern")
    if (declared := pattern.model_fields["kind"].default) != kind.name:
        raise PluginError(
            f"pattern {kind.name!r}: the field kind of {kind.target} is {declared!r}; make it the same name"
        )
    return pattern


def register(patterns: Iterable[tuple[PatternKind, type[Pattern]]]) -> None:
    """Add the kinds of a plug-in in this process; a later one replaces an earlier one of the same name."""
    global _is_complete
    _is_complete = True
    for kind, pattern in patterns:
        _types.update(dict.fromkeys((kind.name, *kind.aliases), pattern))


def has_kind(kind: object) -> bool:
    """Return True if there is a kind of this name."""
    if not isinstance(kind, str):
        return False
    if kind not in _types:
        _find()
    return kind in _types


def pattern_type(kind: str) -> type[Pattern]:
    """The class of a kind. Raises ConfigError for one that no plug-in has."""
    types = _parts if kind in _parts else _types
    if types is _types and not has_kind(kind):
        raise no_such_name("pattern", kind, _types)
    entry = types[kind]
    if isinstance(entry, PatternKind):
        entry = types[kind] = load(entry)
    return entry


def known_kinds() -> tuple[str, ...]:
    """All kinds, dilabench's first."""
    if not _is_complete:
        _find()
    return tuple(_types)


def read_pattern(value: Any) -> Pattern:
    """Return a pattern from its fields, which include `kind`, or unchanged; a removed kind gives a `RetiredPattern`.

    Raises ValueError for an unknown kind or without one.
    """
    if isinstance(value, Pattern):
        known = _types.get(value.kind)
        if isinstance(known, PatternKind) or known is None or type(value) not in known.__mro__[1:]:
            return value
        # An instance of a plug-in's class; the registered class is a checked subclass of it.
        return known.model_construct(**value.__dict__)
    if not isinstance(value, Mapping) or not isinstance(value.get("kind"), str):
        raise ValueError(f"pattern {value!r:.80} has no kind; write for example {{'kind': '{known_kinds()[0]}'}}")
    kind = value["kind"]
    try:
        if kind not in _types and is_retired("pattern", kind):
            return RetiredPattern.model_validate(value)
        present = pattern_type(kind).kind_of(value)
        return pattern_type(present).model_validate({**value, "kind": present} if present != kind else value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


AnyPattern = Annotated[
    SerializeAsAny[Pattern],
    BeforeValidator(read_pattern),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"kind": {"type": "string"}},
            "required": ["kind"],
            "additionalProperties": True,
            "description": "A pattern by its kind, with the kind's own fields.",
        }
    ),
]


def kinds_with(field: str) -> Iterator[str]:
    """The kinds whose requests take a field of this name."""
    return (
        kind for kind in known_kinds() if field in pattern_type(kind).request_model().model_fields.keys() - {"kind"}
    )


def kind_with_fields(fields: Iterable[str]) -> str:
    """The first kind whose requests take all these fields, which then determine the pattern."""
    former = {name: now for kind in known_kinds() for name, (now, _) in pattern_type(kind).former_fields.items()}
    wanted = {former.get(field, field) for field in fields}
    return next(kind for kind in known_kinds() if wanted <= pattern_type(kind).request_model().model_fields.keys())


def with_present_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rename former field names of a request to today's. Raises ValueError for a field given under both."""
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


def _find() -> None:
    global _is_complete
    _is_complete = True
    if _finder is not None:
        _finder()

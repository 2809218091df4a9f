"""The models that data crosses boundaries in, and pydantic's refusals as one readable line."""

import contextlib
import difflib
import functools
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    create_model,
    model_serializer,
)
from pydantic_core import PydanticCustomError, from_json

from dilabench.errors import ConfigError, Ended, PluginError, encodable, said, type_name
from dilabench.units import MAX_COUNT, parse_count

ModelT = TypeVar("ModelT", bound=BaseModel)

# Fields in one message.
MOST_DESCRIBED = 20
# Parts that pydantic adds to a location for the arms of a union.
_TYPE_TAG = re.compile(r"tuple\[|literal\[|function-|(int|float|str|bool)$")
_RULE = "should be "
# Limits of a record. The largest that was met has 20 million values in 10,000 rows.
DEPTH_VARIABLE, MAX_DEPTH = "DILABENCH_MAX_DEPTH", 64
ROWS_VARIABLE, MAX_ROWS = "DILABENCH_MAX_ROWS", 200_000
VALUES_VARIABLE, MAX_VALUES = "DILABENCH_MAX_VALUES", 64_000_000
MAX_TOML = 1 << 20
_KEY_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_KEY_PART}(?:[ \t]*\.[ \t]*{_KEY_PART}){{{MAX_DEPTH}}}", re.ASCII)
_CONTAINERS = frozenset({dict, list})
# An object takes the memory of this many numbers.
VALUES_OF_OBJECT = 8
# Keys of one object. The environment with the most packages had 700.
MAX_KEYS = 10_000
# Digits of 64-bit integers, with the sign.
MAX_DIGITS = 20
# No float of a record has as many digits after its point; one that has is read like a long integer.
MAX_FRACTION = 64
# A search for a run of digits takes ten times as long as one for a run of zeros.
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * 19


ItemT = TypeVar("ItemT")
# A field with several of something, of which the first wrong one is refused.
Several = Annotated[tuple[ItemT, ...], FailFast()]


class Model(BaseModel):
    """Base of all data that crosses a boundary: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Extended(Model):
    """A model that is written without `later` fields that are None, as before these fields existed."""

    later: ClassVar[Collection[str]] = ()

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if value is not None or name not in self.later}


def validated(model: type[ModelT], fields: Any) -> ModelT:
    """Build a pydantic model; a refusal becomes a ConfigError with value, rule and place."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(describe(error, model)) from None


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence per field: the place, the value given and the rule; for an unknown key the nearest known one.

    At most MOST_DESCRIBED fields are described.
    """
    messages: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        place = _place(item["loc"])
        if place not in messages and len(messages) == MOST_DESCRIBED:
            messages["…"] = [f"and more, {error.error_count()} in all"]
            break
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = unknown_key(place, model.model_fields)
        elif item["type"] == "missing":
            message = f"{place} is missing"
        elif item["type"] != "value_error":
            message = f"{place} {item['input']!r:.80} {message.removeprefix('Input ')}"
        messages.setdefault(place, []).append(message)
    return "; ".join(_merged(alternatives) for alternatives in messages.values())


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The sentence about a key that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1)
    return f"{key}: unknown key; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}")


def _place(loc: tuple[int | str, ...]) -> str:
    """The path to a field, without the union arms and without the pattern that a flat request does not have."""
    parts = [str(part) for part in loc if not _TYPE_TAG.match(str(part))]
    return ".".join(parts[1:] if parts[0:1] == ["pattern"] and len(parts) > 1 else parts)


def _merged(alternatives: list[str]) -> str:
    """One sentence for the arms of a union that all refused a value: 'n 2.5 should be an integer or 'auto''."""
    different = list(dict.fromkeys(alternatives))
    start = different[0].partition(_RULE)[0] + _RULE
    if len(different) > 1 and all(text.startswith(start) for text in different):
        return start + " or ".join(text.removeprefix(start) for text in different)
    return "; ".join(different)


def defined(function: Any) -> str:
    """Name, file and line of a function, for a message about what it returned."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else str(name)


def shown(value: object) -> str:
    """A value in a message, shortened, even if its `__repr__` fails."""
    try:
        return f"{value!r:.80}"
    # The `__repr__` may be a plug-in's.
    except BaseException as error:
        if issubclass(type(error), Ended):
            raise
        return f"a {type_name(value)} ({said(error)})"


def _read_count(value: Any, info: ValidationInfo) -> Any:
    if value is None or value == "auto" or (type(value) is int and 0 < value <= MAX_COUNT):
        return value
    return parse_count(value if isinstance(value, int) else str(value), str(info.field_name))


def _read_counts(value: Any, info: ValidationInfo) -> Any:
    if value == "auto":
        return value
    if isinstance(value, str):
        value = [part for part in value.strip("()[] ").split(",") if part.strip()]
    elif isinstance(value, int):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    # An option that may be repeated gives a list of such texts.
    value = [part for item in value for part in (item.split(",") if isinstance(item, str) else [item])]
    return tuple(_read_count(item, info) if isinstance(item, str | int) else item for item in value)


# A size may be written as '4K', a list of sizes as '2K,4K', [2048, '4K'] or, when there is one, 2048; None and 'auto'
# stay as they are, for fields that also take them.
READ_COUNT, READ_COUNTS = BeforeValidator(_read_count), BeforeValidator(_read_counts)
Size = Annotated[int, READ_COUNT]
Sizes = Annotated[tuple[int, ...], READ_COUNTS]
SizesOrAuto = Annotated[tuple[int, ...] | Literal["auto"], READ_COUNTS]


def read_json(text: str | bytes) -> Any:
    """A JSON document of a record. Raises ValueError for other texts or for content that no record holds."""
    document = parsed(text)
    check_shape(document)
    return document


def check_shape(document: Any) -> None:
    """Raise ValueError for a JSON document with lists and objects in each other, or keys of an object, over the limits.

    pydantic would refuse each unknown key, and each wrong value of a mapping, in turn.
    """
    level, depth = [document] if type(document) in _CONTAINERS else [], 0
    while level:
        if any(len(container) > MAX_KEYS for container in level if type(container) is dict):
            raise ValueError(f"an object in it has over {MAX_KEYS} keys, which no record has")
        inner = (container.values() if type(container) is dict else container for container in level)
        # Most containers are lists of numbers, passed over without a look at each.
        nested = (several for several in inner if not _CONTAINERS.isdisjoint(map(type, several)))
        level, depth = [item for several in nested for item in several if type(item) in _CONTAINERS], depth + 1
        # Most documents end before the limit has to be known.
        if level and depth >= (deepest := _limit(DEPTH_VARIABLE, MAX_DEPTH)):
            raise ValueError(f"it is nested more than {deepest} levels deep; {DEPTH_VARIABLE}=100, say, reads more")


class OverLimitError(ValueError):
    """A record has more of something than its limit."""


def check_rows(count: int) -> None:
    """Raise OverLimitError for more rows than a record may have."""
    most = _limit(ROWS_VARIABLE, MAX_ROWS)
    if count > most:
        raise OverLimitError(f"it has over {most} rows, the limit; {ROWS_VARIABLE}={2 * most}, say, reads more")


def counted_chunks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The parts of a record's JSON text; raises OverLimitError at the one with which it has too many values."""
    most, count = _limit(VALUES_VARIABLE, MAX_VALUES), 0
    for chunk in chunks:
        # Each value but the first of a list or object has a comma before it.
        count += chunk.count(b",") + VALUES_OF_OBJECT * chunk.count(b"{")
        if count > most:
            raise OverLimitError(f"it has over {most} values, the limit; {VALUES_VARIABLE}={2 * most}, say, reads more")
        yield chunk


def _limit(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    return parse_count(text, variable) if text else default


def parsed(text: str | bytes) -> Any:
    """A JSON document of any depth, in which halves of surrogate pairs, which UTF-8 lacks, are spelt out.

    Raises ValueError for what is none, or holds an integer of over 64 bits.
    """
    # A document may hold half of a surrogate pair, which is no UTF-8.
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if not _has_long_integer(content):
        # Several times as fast as Python's own, which is asked where this one refuses, for what it says.
        with contextlib.suppress(ValueError):
            return from_json(text)
    try:
        return _encodable(json.loads(text, parse_int=_machine_int))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parsed_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML document.

    Raises ValueError or RecursionError for what is none, and for more than a person writes: Python's parser takes the
    square of a key's parts.
    """
    if len(text) > MAX_TOML:
        raise ValueError(f"it has over {MAX_TOML} letters")
    if _LONG_KEY.search(text):
        raise ValueError(f"a key in it has over {MAX_DEPTH} parts")
    return tomllib.loads(text)


def _encodable(document: Any) -> Any:
    if isinstance(document, str):
        return encodable(document)
    if isinstance(document, list):
        return [_encodable(item) for item in document]
    if isinstance(document, dict):
        return {encodable(key): _encodable(item) for key, item in document.items()}
    return document


def _has_long_integer(content: bytes) -> bool:
    """Return True if some integer may exceed 64 bits; digits after a point may be as many."""
    zeros = content.translate(_DIGITS_AS_ZEROS)
    place = zeros.find(_LONG_NUMBER)
    while place >= 0 and zeros[place - 1 : place] == b".":
        place += len(zeros[place : place + MAX_FRACTION]) - len(zeros[place : place + MAX_FRACTION].lstrip(b"0"))
        place = zeros.find(_LONG_NUMBER, place)
    return place >= 0


def _machine_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"the number {digits[:20]}… has {len(digits)} digits, which no measurement has")
    return int(digits)


def content_hash(content: Any) -> str:
    """The first 16 hex digits of the SHA-256 of the content's canonical JSON."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


# ASCII: letters of other scripts look the same.
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_TARGET = re.compile(r"\w+(\.\w+)*:\w+")
KindT = TypeVar("KindT", bound=type)


def refused(text: str) -> PydanticCustomError:
    """The error of a check of one field of a descriptor; the text follows the field's name."""
    # A brace would be a place for a value.
    return PydanticCustomError("descriptor", "{text}", {"text": text})


def among(words: frozenset[str]) -> AfterValidator:
    """The check that a field holds none but these words."""

    def check(value: frozenset[str]) -> frozenset[str]:
        if wrong := sorted(value - words):
            raise refused(f"{', '.join(wrong)} is not known; it may hold {', '.join(sorted(words))}")
        return value

    return AfterValidator(check)


def at_least(least: int) -> AfterValidator:
    """The check of a number's least value."""

    def check(value: float) -> float:
        if value < least:
            raise refused(f"{value} must be at least {least}")
        return value

    return AfterValidator(check)


def _is_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise refused(f"{value!a} is not a name; write letters from a to z, digits, '-', '_' and '.' only")
    return value


def _is_target(value: str) -> str:
    if not _TARGET.fullmatch(value):
        raise refused(f"{value!r} must be a text like 'package.module:name'")
    return value


Name = Annotated[str, AfterValidator(_is_name)]
Target = Annotated[str, AfterValidator(_is_target)]
Count = Annotated[int, at_least(1)]
Priority = Annotated[int, at_least(0)]


def _is_options(value: Any) -> Any:
    if isinstance(value, tuple) and all(isinstance(name, str) and name.isidentifier() for name in value):
        # As suites stated them before: names alone, with values of any kind.
        untyped: Any = dict.fromkeys(value, (Any, None))
        value = create_model("Options", **untyped)
    if value is None:
        return value
    if not (isinstance(value, type) and issubclass(value, BaseModel)):
        raise refused(f"{shown(value)} must be a pydantic model that has a field for each option")
    if required := [name for name, option in value.model_fields.items() if option.is_required()]:
        raise refused(f"{value.__name__}: {', '.join(required)} needs a default, for a request may leave it out")
    return value


# A model of what may be set, each field with a default.
Options = Annotated[type[BaseModel] | None, BeforeValidator(_is_options)]


# `revalidate_instances`: a dataclass that a descriptor is given is checked with it, under its name.
CHECKED = ConfigDict(strict=True, extra="forbid", revalidate_instances="always")


def readable(kind: KindT) -> KindT:
    """Make a pydantic dataclass raise PluginError, one line with the descriptor's name, the field and the rule."""
    initialise = kind.__init__  # type: ignore[misc]

    @functools.wraps(initialise)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        try:
            initialise(self, *values, **named)
        except ValidationError as error:
            own = [field_.name for field_ in fields(kind)]
            given = dict(zip(own, values, strict=False)) | named
            raise PluginError(_explained(kind, given, error)) from None

    kind.__init__ = checked  # type: ignore[misc]
    return kind


def _explained(kind: Any, given: Mapping[str, Any], error: ValidationError) -> str:
    where, hints = f"{kind.__name__} {shown(given.get('name'))}", get_type_hints(kind)
    item = error.errors(include_url=False)[0]
    place = list(item["loc"])
    name = place[0]
    if isinstance(name, int):
        if name >= len(hints):
            return f"{where}: it has {len(hints)} fields and was given more"
        name = list(hints)[name]
    if item["type"] == "missing":
        return f"{where}: {name} is missing"
    if name not in hints:
        return f"{where}: {name} is no field of it"
    value: Any = given[name]
    inside = place[1:]
    while inside and is_dataclass(value):
        where, name, hints = f"{where}: {name}", inside.pop(0), get_type_hints(value.__class__)
        value = getattr(value, str(name))
    if item["type"] == "descriptor":
        return f"{where}: {name} {item['msg']}"
    wanted = hints[str(name)]
    text = wanted.__name__ if isinstance(wanted, type) else str(wanted).replace("typing.", "")
    return f"{where}: {name} {shown(value)} must be " + re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)


def targets_of(descriptor: object) -> dict[str, str | None]:
    """The fields of a descriptor that name code ('package.module:name'), in alphabetical order."""
    hints = sorted(get_type_hints(type(descriptor), include_extras=True).items())
    return {name: getattr(descriptor, name) for name, hint in hints if Target in (hint, *get_args(hint))}

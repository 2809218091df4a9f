"""The models that data crosses boundaries in, and pydantic's refusals as one readable line."""

import contextlib
import difflib
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from dilabench.errors import ConfigError, said
from dilabench.units import parse_count

ModelT = TypeVar("ModelT", bound=BaseModel)

# What pydantic adds to a place for the arms of a union.
_TYPE_TAG = re.compile(r"tuple\[|literal\[|function-|(int|float|str|bool)$")
_RULE = "should be "
MAX_DEPTH = 64
_CONTAINERS = frozenset({dict, list})
# Of 64-bit integers, with the sign.
MAX_DIGITS = 20
# A search for a run of digits takes ten times as long as one for a run of zeros.
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * 19


class Model(BaseModel):
    """Base of all data that crosses a boundary: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def validated(model: type[ModelT], fields: Any) -> ModelT:
    """Build a pydantic model; a refusal becomes a ConfigError with value, rule and place."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(describe(error, model)) from None


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence per field: the place, the value given and the rule; for an unknown key the nearest known one."""
    messages: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        place = _place(item["loc"])
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
    """A value in a message, short, whatever its `__repr__` does."""
    try:
        return f"{value!r:.80}"
    # The `__repr__` may be a plug-in's.
    except Exception as error:  # noqa: BLE001
        return f"a {type(value).__name__} ({said(error)})"


def read_counts(value: Any, what: str) -> Any:
    """Let lists of sizes be written as '2K,4K', [2048, '4K'] or, when there is one, 2048."""
    if isinstance(value, str):
        value = [part for part in value.strip("()[] ").split(",") if part.strip()]
    elif isinstance(value, int):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(parse_count(item, what) if isinstance(item, str | int) else item for item in value)
    return value


def read_count(value: Any, what: str) -> Any:
    """Let a size be written as '4K'; None and 'auto' stay as they are."""
    if value is None or value == "auto":
        return value
    return parse_count(value if isinstance(value, int) else str(value), what)


def read_json(text: str | bytes) -> Any:
    """A JSON document of a record. Raises ValueError for what is none, or holds what no record of ours ever holds."""
    document = _parsed(text)
    level = [document] if type(document) in _CONTAINERS else []
    for _ in range(MAX_DEPTH):
        inner = (one.values() if type(one) is dict else one for one in level)
        # Most containers are lists of numbers, passed over without a look at each.
        nested = (several for several in inner if not _CONTAINERS.isdisjoint(map(type, several)))
        level = [one for several in nested for one in several if type(one) in _CONTAINERS]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    return document


def _parsed(text: str | bytes) -> Any:
    # A document may hold half of a surrogate pair, which is no UTF-8.
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if _LONG_NUMBER not in content.translate(_DIGITS_AS_ZEROS):
        # Several times as fast as Python's own, which is asked where this one refuses, for what it says.
        with contextlib.suppress(ValueError):
            return from_json(text)
    try:
        return json.loads(text, parse_int=_machine_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _machine_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"the number {digits[:20]}… has {len(digits)} digits, which no measurement has")
    return int(digits)


def content_hash(content: Any) -> str:
    """The first 16 hex digits of the SHA-256 of the content's canonical JSON."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]

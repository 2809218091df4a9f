"""Turns pydantic's refusals into one readable line: which field, the value given, the rule."""

import difflib
import re

from pydantic import BaseModel, ValidationError

# What pydantic adds to a place for the arms of a union.
_TYPE_TAG = re.compile(r"tuple\[|literal\[|function-|(int|float|str|bool|dense|dilated|block_sparse)$")
_RULE = "should be "


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence per field: the place, the value given and the rule; for an unknown key the nearest known one."""
    messages: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        place = _place(item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            known = sorted(model.model_fields)
            near = difflib.get_close_matches(place, known, n=1)
            message = f"{place}: unknown key; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
        elif item["type"] == "missing":
            message = f"{place} is missing"
        elif item["type"] != "value_error":
            message = f"{place} {item['input']!r:.80} {message.removeprefix('Input ')}"
        messages.setdefault(place, []).append(message)
    return "; ".join(_merged(alternatives) for alternatives in messages.values())


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

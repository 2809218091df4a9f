"""A subclass of a third party's pattern that checks each result; it is registered instead of the pattern."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from dilabench.errors import PluginError
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.plugins.boundary import defined, guarded, shown

# The result types of the methods that the main process calls.
ANSWERS: Mapping[str, type | tuple[type, ...]] = {
    "request_model": type,
    "examples": tuple,
    "trials": Mapping,
    "label": str,
    "details": str,
    "row_labels": dict,
    "files": tuple,
    "pairs": tuple,
    "reached_rows": tuple,
    "keys_per_row": int,
    "cut_length": (int, type(None)),
    "parts": int,
    "is_detached": bool,
    "has_grouped_heads": bool,
    "has_zero_keys": bool,
    "why_not_over": (str, type(None)),
    "has_fixed_length": bool,
    "under": Pattern,
}
OURS = frozenset({"dilabench", "pydantic", "abc", "typing", "builtins"})
TRIED_OVER = SequenceShape(48, 4, 2, causal=True, window=(-1, -1))


@functools.cache
def checked_pattern(plugin: str, pattern: type[Pattern]) -> type[Pattern]:
    """A subclass of a plug-in's pattern whose methods raise PluginError if they fail or return the wrong type.

    Methods inherited from dilabench are not checked; the plug-in's class does not change. Cheap methods are called
    immediately on its examples: a pattern without a working label is refused.
    """
    checked: dict[str, Any] = {}
    for owner in pattern.__mro__:
        if owner.__module__.partition(".")[0] not in OURS:
            for name in vars(owner).keys() & vars(Pattern).keys() - checked.keys():
                member = _checked_member(plugin, owner, name)
                if member is not None and not name.startswith("_"):
                    checked[name] = member
    if not checked and pattern.__module__.partition(".")[0] in OURS:
        return pattern

    # The pattern's validators run inside.
    def model_validate(cls: type[Pattern], *arguments: Any, **named: Any) -> Pattern:
        return super(found, cls).model_validate(*arguments, **named)

    def equal(self: Pattern, other: object) -> Any:
        return self.__dict__ == other.__dict__ if isinstance(other, pattern) else NotImplemented

    checked["model_validate"] = classmethod(_held(plugin, f"pattern {pattern.__name__}", model_validate))
    names = {"__module__": pattern.__module__, "__qualname__": pattern.__qualname__, "__doc__": pattern.__doc__}
    # A plug-in's suite may create instances of the original class, which are equal patterns.
    metaclass: Any = type(pattern)
    found: type[Pattern] = metaclass(pattern.__name__, (pattern,), {**names, "__eq__": equal, **checked})
    _try(found)
    return found


def _checked_member(plugin: str, owner: type[Any], name: str) -> Any:
    member, what = vars(owner)[name], f"pattern {owner.__name__}.{name}"
    if isinstance(member, property) and member.fget:
        return property(_held(plugin, what, member.fget, name))
    if isinstance(member, classmethod | staticmethod):
        return type(member)(_held(plugin, what, member.__func__, name))
    return _held(plugin, what, member, name) if inspect.isfunction(member) else None


def _held(plugin: str, what: str, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        refusal: ValidationError | None = None
        with guarded(plugin, what):
            try:
                answer = function(*arguments, **named)
            except ValidationError as error:
                refusal = error
            else:
                wanted = ANSWERS.get(name, object)
                if not isinstance(answer, wanted):
                    kinds = " or ".join(
                        type_.__name__ for type_ in (wanted if isinstance(wanted, tuple) else (wanted,))
                    )
                    raise PluginError(f"{defined(function)} returned {shown(answer)}; it must return {kinds}")
        if refusal is not None:
            # The pattern refuses a value: pydantic's message is meant for the user.
            raise refusal
        return _iterated(plugin, what, answer) if inspect.isgenerator(answer) else answer

    return call


def _iterated(plugin: str, what: str, items: Iterator[Any]) -> Iterator[Any]:
    end = object()
    while True:
        with guarded(plugin, what):
            item = next(items, end)
        if item is end:
            return
        yield item


def _try(pattern: type[Pattern]) -> None:
    if not issubclass(pattern.request_model(), BaseModel):
        raise PluginError(f"{pattern.__name__}.request_model returned {shown(pattern.request_model())}, no model")
    pattern.trials()
    for example in pattern.examples():
        if not isinstance(example, pattern):
            raise PluginError(f"{pattern.__name__}.examples holds {shown(example)}, which is no {pattern.__name__}")
        example.label(), example.details((TRIED_OVER,)), example.row_labels((TRIED_OVER,)), example.files()
        example.keys_per_row(TRIED_OVER.length), example.why_not_over(TRIED_OVER)
        _ = (example.parts, example.cut_length, example.is_detached, example.has_grouped_heads, example.has_zero_keys)
        _ = example.under

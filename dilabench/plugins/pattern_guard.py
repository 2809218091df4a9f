"""A third party's pattern is asked in many places; so its class is held once, in each answer that it gives."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from dilabench.errors import PluginError
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.plugins.boundary import defined, guarded, shown

# What the questions that are asked in the main process must be answered with.
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
# Classes that were held before: plug-ins are looked for more than once.
_known: set[type[Pattern]] = set()
TRIED_OVER = SequenceShape(48, 4, 2, causal=True, window=(-1, -1))


def hold(plugin: str, pattern: type[Pattern]) -> None:
    """Have whatever the class answers by itself raise PluginError when it fails or is of the wrong type.

    What costs nothing to ask is asked at once, of its examples: a pattern that cannot be named is not let in.
    """
    own = [one for one in pattern.__mro__ if one.__module__.partition(".")[0] not in OURS]
    if own and pattern not in _known:
        _known.add(pattern)
        for owner in own:
            for name in [name for name in vars(owner) if name in vars(Pattern) and not name.startswith("_")]:
                _replace(plugin, owner, name)
        # Its validators run in here.
        pattern.model_validate = classmethod(  # type: ignore[assignment,method-assign]
            _held(plugin, f"pattern {pattern.__name__}", pattern.model_validate.__func__)  # type: ignore[attr-defined]
        )
    if own:
        _try(pattern)


def _replace(plugin: str, owner: type[Any], name: str) -> None:
    member, what = vars(owner)[name], f"pattern {owner.__name__}.{name}"
    if isinstance(member, property) and member.fget:
        setattr(owner, name, property(_held(plugin, what, member.fget, name)))
    elif isinstance(member, classmethod | staticmethod):
        setattr(owner, name, type(member)(_held(plugin, what, member.__func__, name)))
    elif inspect.isfunction(member):
        setattr(owner, name, _held(plugin, what, member, name))


def _held(plugin: str, what: str, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    if hasattr(function, "held"):
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        refusal: ValidationError | None = None
        with guarded(plugin, what):
            try:
                answer = function(*arguments, **named)
            except ValidationError as error:
                refusal = error
            else:
                _check(function, answer, ANSWERS.get(name, object))
        if refusal is not None:
            # A value that the pattern does not take: pydantic's own words are for the user.
            raise refusal
        return _iterated(plugin, what, answer) if inspect.isgenerator(answer) else answer

    setattr(call, "held", True)  # noqa: B010 - mypy knows no attribute of a function
    return call


def _check(function: Callable[..., Any], answer: object, wanted: type | tuple[type, ...]) -> None:
    if not isinstance(answer, wanted):
        names = " or ".join(one.__name__ for one in (wanted if isinstance(wanted, tuple) else (wanted,)))
        raise PluginError(f"{defined(function)} returned {shown(answer)}; it must return {names}")


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

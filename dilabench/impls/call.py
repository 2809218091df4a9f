"""The options of one call of attention, as a key of computations and as text for operators, and what computes it."""

import ast
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from types import MethodType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from dilabench.contracts import Attend
from dilabench.errors import ConfigError
from dilabench.patterns.answers import SelectedKeys
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.registry import pattern_type, read_pattern
from dilabench.workload.spec import AUTO, UNBOUNDED, Window


class OwnBackend:
    """A caller's function as a backend, equal to itself alone: functions may compare equal and compute differently."""

    __slots__ = ("function", "identity")

    def __init__(self, function: Attend) -> None:
        self.function = function
        # A bound method is another object each time that it is named.
        self.identity: tuple[int, ...] = (id(function),)
        if isinstance(function, MethodType):
            self.identity = id(function.__func__), id(function.__self__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnBackend) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return repr(self.function)


# Functions that callers gave as backends, by the names that operators take for them.
_functions: dict[str, Attend] = {}
_names: dict[tuple[int, ...], str] = {}


def name_of_function(function: Attend) -> str:
    """Register a caller's function and return the name by which operators of this process find it."""
    # torch.compile compares a function by its code alone, so that a closure over other values would be taken for it;
    # what `id` was asked of it compares by identity. A bound method is another object each time that it is named.
    if isinstance(function, MethodType):
        return _registered(function.__func__, function.__self__, id(function.__func__), id(function.__self__))
    return _registered(function, None, id(function))


def _registered(function: Callable[..., Any], owner: object, *identity: int) -> str:
    name = _names.setdefault(identity, f"function {len(_names)}")
    # Held from now on, so that no other object gets its identity.
    _functions[name] = function if owner is None else MethodType(function, owner)
    return name


# As by `torch.compiler.assume_constant_result`, which loads Dynamo: a graph is traced with the name, for it runs before
# what the traced code has registered is.
_registered._dynamo_marked_constant = True  # type: ignore[attr-defined]


def function_of(backend: str | OwnBackend) -> Attend | None:
    """The caller's function that a backend is; None for a name of dilabench's."""
    return backend.function if isinstance(backend, OwnBackend) else _functions.get(backend)


class Call(NamedTuple):
    """The options of one call: with the shapes, dtypes and devices of its tensors, the key of its computation.

    cu_seqlens: bounds of packed sequences as numbers, empty for a batch or if they are in a tensor. max_seqlen: 0, or a
    bound of their lengths if they stay in a tensor. wants_gradient: whether a backward pass may follow. algorithm: over
    ranks, by name; '' on one device. key_bounds: of packed sequences the bounds of their keys, of a batch the number of
    keys of each item; empty if keys have the bounds of queries, all are there, or the numbers are in a tensor. softcap:
    scores s become softcap · tanh(s / softcap).
    """

    pattern: Pattern
    causal: bool = False
    window: Window = UNBOUNDED
    scale: float | None = None
    cu_seqlens: tuple[int, ...] = ()
    max_seqlen: int = 0
    wants_gradient: bool = False
    backend: str | OwnBackend = AUTO
    algorithm: str = ""
    key_bounds: tuple[int, ...] = ()
    softcap: float | None = None

    @property
    def has_constant_lse(self) -> bool:
        """Whether lse gets no gradient: over ranks, and in a merge whose weights, made of it, are constants."""
        return bool(self.algorithm or self.pattern.is_detached)

    @property
    def of_one_sequence(self) -> Self:
        """The same call over a single sequence, or over a batch of equal ones."""
        return self._replace(cu_seqlens=(), max_seqlen=0, key_bounds=())


class PatternFields(NamedTuple):
    """A pattern for graphs of compilers, which make constants of texts and lists of numbers, and of no pattern.

    words: the fields as 'name=text', 'name#' for the next of `sizes`, 'name#3' for the next three, or 'name~' for the
    next of `fractions`, behind a '?' if a request has them; or the pattern as JSON.
    """

    words: str
    sizes: tuple[int, ...] = ()
    fractions: tuple[float, ...] = ()


AnyPattern = Pattern | PatternFields | SelectedKeys
"""A pattern, its fields while a compiler traces, or for `indices` the unit of the blocks that they select."""

# Between fields in `PatternFields.words`.
_NEXT = "\x1f"


def fields_of(pattern: Pattern) -> PatternFields | None:
    """A pattern as fields, to be read back in any process; None if a compiler cannot trace them.

    Raises ValueError for a pattern whose kind is not registered under its name.
    """
    if torch.compiler.is_compiling():
        return _traced([(name, getattr(pattern, name)) for name in pattern.field_names])
    try:
        registered = pattern_type(pattern.kind)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not issubclass(registered, type(pattern)):
        raise ValueError(
            f"pattern {pattern.kind!r} of {type(pattern).__module__} is not the registered kind of this name, and no "
            "graph can hold it; register it with dilabench_register_patterns"
        )
    return PatternFields(pattern.model_dump_json())


def _traced(items: list[tuple[str, Any]]) -> PatternFields | None:
    """Fields by name, the kind among them; None if one is no number, text or tuple of integers. Compilers trace it."""
    words, sizes, fractions = [], [], []
    for name, value in items:
        if value is None:
            continue
        if isinstance(value, str):
            words.append(name + "=" + value)
        elif isinstance(value, int):
            words.append(name + "#")
            sizes.append(value)
        elif isinstance(value, float):
            words.append(name + "~")
            fractions.append(value)
        elif isinstance(value, tuple):
            words.append(name + "#" + str(len(value)))
            sizes.extend(value)
        else:
            return None
    return PatternFields(_NEXT.join(words), tuple(sizes), tuple(fractions))


def pattern_of(kind: str, **fields: Any) -> Pattern | PatternFields:
    """The pattern of a request's fields, made once for equal ones; while a compiler traces, the fields.

    Raises ValueError for fields that do not go together, TypeError for those that cannot be hashed.
    """
    if torch.compiler.is_compiling():
        traced = _traced([("kind", kind), *fields.items()])
        assert traced is not None, "fields are texts, numbers and tuples"
        return traced._replace(words="?" + traced.words)
    return _requested(kind, tuple(fields.items()))


@lru_cache(maxsize=256)
def _requested(kind: str, fields: tuple[tuple[str, Any], ...]) -> Pattern:
    try:
        return pattern_type(kind).from_request(dict(fields))
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _pattern_from(words: str, sizes: tuple[int, ...], fractions: tuple[float, ...]) -> Pattern:
    """The pattern of `PatternFields`. Raises ValueError."""
    if words.startswith("{"):
        return read_pattern(json.loads(words))
    of_sizes, of_fractions = iter(sizes), iter(fractions)
    fields: dict[str, Any] = {}
    for word in words.removeprefix("?").split(_NEXT):
        name, equals, text = word.partition("=")
        if equals:
            fields[name] = text
        elif name.endswith("~"):
            fields[name[:-1]] = next(of_fractions)
        else:
            name, _, count = name.partition("#")
            numbers = tuple(islice(of_sizes, int(count or 1)))
            fields[name] = numbers if count else numbers[0]
    if words.startswith("?"):
        return _requested(fields.pop("kind"), tuple(fields.items()))
    return read_pattern(fields)


def written(
    pattern: str,
    sizes: Sequence[int],
    fractions: Sequence[float],
    causal: bool,
    window: Sequence[int],
    scale: float | None,
    cu_seqlens: Sequence[int],
    max_seqlen: int,
    wants_gradient: bool,
    backend: str,
    algorithm: str,
    key_bounds: Sequence[int],
    softcap: float | None,
) -> str:
    """A call as a text that means the same in every process, for the compiler keeps what it compiles on disk.

    One text costs a compiled call less than a dozen options.
    """
    # A length that the compiler holds for a variable is a constant from here on.
    of_sizes, sides, *bounds = (tuple(map(int, numbers)) for numbers in (sizes, window, cu_seqlens, key_bounds))
    factor = None if scale is None else float(scale)
    of_pattern = pattern, of_sizes, tuple(map(float, fractions))
    cap = None if softcap is None else float(softcap)
    options = causal, sides, factor, bounds[0], int(max_seqlen), wants_gradient, backend, algorithm, bounds[1], cap
    return repr((of_pattern, *options))


@lru_cache(maxsize=256)
def read_call(text: str) -> Call:
    """The call that `written` gives as a text, made once for each. Raises ValueError."""
    of_pattern, *options = ast.literal_eval(text)
    return Call(_pattern_from(*of_pattern), *options)


def has_constant_lse(asked: str) -> bool:
    """Whether the call with this text has an lse without gradient; False for an empty text."""
    return bool(asked) and read_call(asked).has_constant_lse


def is_over_ranks(asked: str) -> bool:
    """Whether the call with this text is over ranks; False for an empty text."""
    return bool(asked and read_call(asked).algorithm)


# A compiler cannot trace how a text is read.
has_constant_lse._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_over_ranks._dynamo_marked_constant = True  # type: ignore[attr-defined]


@runtime_checkable
class Computation(Protocol):
    """Attention outside autograd; the backward pass needs only out and lse of the forward pass.

    `forward` gives out [B, N, H, D] and lse [B, H, N] first, then perhaps a list of tensors, which `backward` takes
    last; `backward` gives dq, dk, dv. It may have `forward_before_backward`, too: `forward` that prepares for
    `backward`; and `differentiable`, which gives out and lse that torch itself differentiates, or None if torch cannot
    differentiate these. If `exchanges` is true, its ranks exchange gradients even if no loss depends on out; `forward`
    then also takes a sink, and `summed` adds up the gradients that ranks have for it.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any: ...
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class CallFinder(Protocol):
    """The computations of calls and the work of these, as operators look them up."""

    def _computation_for(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        indices: Tensor | None,
        bounds: Tensor | None,
        key_bounds: Tensor | None,
    ) -> Computation:
        """The computation for tensors like these. indices: selected blocks; bounds, key_bounds: `Call.cu_seqlens` and
        `Call.key_bounds` as tensors.
        """

    def _pairs_for(self, q: torch.Size, k: torch.Size, call: Call, indices: torch.Size | None) -> int:
        """(query, key) pairs that a call of these shapes attends to, over batch and heads."""

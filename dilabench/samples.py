"""Samples of a record as 64-bit integers in one block of memory. No numpy."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, overload

from pydantic import GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, core_schema

if TYPE_CHECKING:
    import numpy as np


class Nanoseconds(Sequence[int]):
    """Times in ns that never change: equal to the tuple of the same integers, in a quarter of its memory.

    Slices and sums are tuples. A pydantic field of `Times` is read from, and written as, a list of integers.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[int] = ()) -> None:
        """Raises ValueError for an integer of more than 64 bits."""
        try:
            self._values = array("q", values)
        except OverflowError:
            raise ValueError("a sample has more than 64 bits, which no time in ns has; leave it out") from None

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self._values[index]) if isinstance(index, slice) else self._values[index]

    def __add__(self, other: Sequence[int]) -> tuple[int, ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[int]) -> tuple[int, ...]:
        return (*other, *self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Nanoseconds):
            return self._values == other._values
        return tuple(self._values) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._values))

    def __repr__(self) -> str:
        return repr(tuple(self._values))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        """What numpy makes an array of: a copy, so that the samples stay as they are."""
        import numpy as np

        if copy is False:
            raise ValueError("samples are not shared; leave out copy=False")
        return np.array(self._values, dtype=dtype)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        integers = handler.generate_schema(tuple[int, ...])
        written = core_schema.plain_serializer_function_ser_schema(tuple, return_schema=integers)
        return core_schema.no_info_wrap_validator_function(_read, integers, serialization=written)


def _read(value: Any, handler: ValidatorFunctionWrapHandler) -> Nanoseconds:
    """A list of integers as it is; whatever else the handler takes for one, by its rules."""
    if isinstance(value, Nanoseconds):
        return value
    if type(value) is list:
        try:
            return Nanoseconds(value) if value else NO_SAMPLES
        except TypeError:
            # A float of an integer's value, say.
            pass
    return Nanoseconds(handler(value))


NO_SAMPLES = Nanoseconds()
# A field of samples; to a type checker it is the tuple that it equals.
Times = Annotated[tuple[int, ...], Nanoseconds]

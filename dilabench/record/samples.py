"""Samples of times, and the turns (slots) that they were taken in, each in a few blocks of memory.

A record may hold ten million samples in a million slots. As integers and models they would take ten times the space
that they take here, and most of the time in which a record is read.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, overload

from pydantic import GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, core_schema

from dilabench.validation import Model, Several

if TYPE_CHECKING:
    import numpy as np


class Nanoseconds(Sequence[int]):
    """Times in ns in one block of memory: equal to the tuple of the same integers, in a quarter of its memory.

    Slices and sums are tuples. A pydantic field of `Times` is read from, and written as, a list of integers.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[int] = ()) -> None:
        """Raises ValueError for an integer of more than 64 bits."""
        try:
            self._values = array("q", values)
        except OverflowError:
            raise ValueError("a sample has more than 64 bits, which no time in ns has; leave it out") from None

    @classmethod
    def of_block(cls, block: "array[int]") -> "Nanoseconds":
        """The integers of a block ('q'), which must not change any more."""
        times = cls.__new__(cls)
        times._values = block
        return times

    def part(self, start: int, stop: int) -> "Nanoseconds":
        """The times from `start` to before `stop`."""
        return Nanoseconds.of_block(self._values[start:stop])

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
        """A copy as an array, so that the samples stay as they are."""
        import numpy as np

        if copy is False:
            raise ValueError("samples are not shared; leave out copy=False")
        return np.array(self._values, dtype=dtype)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        integers = handler.generate_schema(Several[int])
        written = core_schema.plain_serializer_function_ser_schema(tuple, return_schema=integers)
        return core_schema.no_info_wrap_validator_function(_samples, integers, serialization=written)


def _samples(value: Any, handler: ValidatorFunctionWrapHandler) -> Nanoseconds:
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


class Slot(Model):
    """Consecutive samples of one case in one round. The device state is read at the slot's end.

    Over ranks `samples_ns` are the slowest rank's, `rank_samples_ns` each rank's. `renewed`: samples on new inputs.
    `changed`: samples before which one row of each input changed. Over ranks inputs change before every call.
    """

    session: int = 0
    round: int = 0
    position: int = 0
    samples_ns: Times
    renewed: Several[int] = ()
    changed: Several[int] = ()
    rank_samples_ns: Several[Times] = ()
    enqueue_ns: Times = ()
    sm_clock_mhz: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None
    throttle: Several[str] = ()


_FIELDS = set(Slot.model_fields)
# In the order of the fields.
_DEFAULTS: dict[str, Any] = {name: field.default for name, field in Slot.model_fields.items()}
_NOTHING_ELSE = (("pydantic_extra", None), ("pydantic_private", None))
_NUMBERS = ("session", "round", "position")
_READINGS = ("sm_clock_mhz", "power_mw", "temperature_c")
_MARKED = ("renewed", "changed")
_LISTS = ("samples_ns", *_MARKED, "enqueue_ns", "rank_samples_ns", "throttle")
# The value of each field in most slots.
_MOSTLY: tuple[tuple[str, list[Any] | None], ...] = (
    *((name, None) for name in _READINGS),
    *((name, []) for name in _LISTS[1:]),
)
# The type of the values in a list.
_INSIDE = (("rank_samples_ns", list), ("throttle", str))


class _Lists:
    """A list of integers of each slot, all in one block: `values[ends[i] - sizes[i] : ends[i]]` are slot i's."""

    __slots__ = ("ends", "sizes", "values")

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        values = array("q")
        for several in lists:
            # Three times as fast as `extend`.
            values.fromlist(several) if type(several) is list else values.extend(several)
        self.values = Nanoseconds.of_block(values)
        self.sizes = array("q", map(len, lists))
        self.ends = array("q", accumulate(self.sizes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Lists) and self.sizes == other.sizes and self.values == other.values

    def of(self, slot: int) -> Nanoseconds:
        return self.values.part(self.ends[slot] - self.sizes[slot], self.ends[slot])


class SlotColumns(Sequence[Slot]):
    """The slots of a timing by column: equal to the tuple of the same slots, which are made when they are asked for.

    A pydantic field of `Slots` is read from, and written as, a list of slots.
    """

    __slots__ = ("_columns", "_count", "_samples")

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        """Raises ValueError for an integer of more than 64 bits."""
        slots = tuple(slots)
        try:
            self._lay_out(len(slots), {name: [getattr(slot, name) for slot in slots] for name in _FIELDS})
        except OverflowError:
            raise ValueError("a slot has a number of more than 64 bits, which no measurement has") from None

    @classmethod
    def of_documents(cls, documents: Sequence[Any]) -> "SlotColumns | None":
        """The slots in JSON objects; None if one is not written as `Slot` is: pydantic then finds the cause."""
        if set(map(type, documents)) != {dict}:
            return None
        names, count = tuple(documents[0]), len(documents)
        # From two names on, `itemgetter` gives a tuple.
        if not {"samples_ns"} < set(names) <= _FIELDS or set(map(len, documents)) != {len(names)}:
            return None
        columns = cls.__new__(cls)
        try:
            values = dict(zip(names, map(list, zip(*map(itemgetter(*names), documents), strict=True)), strict=True))
            for name, nothing in _MOSTLY:
                if name in values and values[name].count(nothing) == count:
                    del values[name]
            if not _are_all(list, *(values[name] for name in _LISTS if name in values)) or any(
                not _are_all(kind, *values[name]) for name, kind in _INSIDE if name in values
            ):
                return None
            columns._lay_out(count, values)
        except (KeyError, TypeError, OverflowError):
            return None
        return columns

    def _lay_out(self, count: int, values: Mapping[str, Sequence[Any]]) -> None:
        """Keep the values by field; fields in which all slots have the default are left out.

        Raises TypeError for what should be an integer and is none, OverflowError for one of more than 64 bits.
        """
        self._count = count
        self._samples = _Lists(values["samples_ns"])
        kept: dict[str, Any] = {name: array("q", values.get(name) or bytes(8 * count)) for name in _NUMBERS}
        kept |= {name: _Lists(values[name]) for name in (*_MARKED, "enqueue_ns") if any(values.get(name, ()))}
        for name in _READINGS:
            if readings := values.get(name):
                try:
                    kept[name] = array("q", readings)
                except TypeError:
                    # Values other than None must be integers.
                    if array("q", [value for value in readings if value is not None]):
                        kept[name] = tuple(readings)
        if any(ranks := values.get("rank_samples_ns", ())):
            kept["rank_samples_ns"] = tuple(tuple(map(Nanoseconds, slot)) for slot in ranks)
        if any(reasons := values.get("throttle", ())):
            known: dict[tuple[str, ...], tuple[str, ...]] = {}
            kept["throttle"] = tuple(known.setdefault(slot, slot) for slot in map(tuple, reasons))
        self._columns = kept

    @property
    def samples_ns(self) -> "Nanoseconds":
        """The samples of all slots, in the order taken."""
        return self._samples.values

    @property
    def sizes(self) -> Sequence[int]:
        """How many samples each slot has."""
        return self._samples.sizes

    def column(self, name: str) -> Sequence[Any]:
        """The values of one field, a slot after the other."""
        if name == "samples_ns":
            return [self._samples.of(slot) for slot in range(self._count)]
        known = self._columns.get(name)
        if isinstance(known, _Lists):
            return [known.of(slot) for slot in range(self._count)]
        return [Slot.model_fields[name].default] * self._count if known is None else known

    @property
    def turns(self) -> "tuple[array[int], array[int], array[int]]":
        """Session, round and position of each slot."""
        session, number, position = (self._columns[name] for name in _NUMBERS)
        return session, number, position

    def is_set(self, name: str) -> bool:
        """Return True if a slot has more in this field than its default."""
        return name in self._columns

    @property
    def texts(self) -> frozenset[str]:
        """All texts in the slots."""
        return frozenset(chain.from_iterable(set(self._columns.get("throttle", ()))))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Slot]:
        return map(self._slot, range(self._count))

    @overload
    def __getitem__(self, index: int) -> Slot: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Slot, ...]: ...
    def __getitem__(self, index: int | slice) -> Slot | tuple[Slot, ...]:
        at = range(self._count)[index]
        return self._slot(at) if isinstance(at, int) else tuple(map(self._slot, at))

    def _slot(self, at: int) -> Slot:
        fields = _DEFAULTS | {"samples_ns": self._samples.of(at)}
        for name, column in self._columns.items():
            fields[name] = column.of(at) if isinstance(column, _Lists) else column[at]
        fields |= {name: tuple(fields[name]) for name in _MARKED}
        # As `model_construct` does, which looks up all fields and defaults again for each slot. The set of names is
        # shared, because a separate set takes more memory than a slot's samples.
        slot = Slot.__new__(Slot)
        for name, value in (("dict", fields), ("pydantic_fields_set", _FIELDS), *_NOTHING_ELSE):
            object.__setattr__(slot, f"__{name}__", value)
        return slot

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SlotColumns):
            mine, theirs = ((slots._count, slots._samples, slots._columns) for slots in (self, other))
            return mine == theirs
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        slots = handler.generate_schema(Several[Slot])
        written = core_schema.plain_serializer_function_ser_schema(tuple, return_schema=slots)
        return core_schema.no_info_wrap_validator_function(_slots, slots, serialization=written)


def _slots(value: Any, handler: ValidatorFunctionWrapHandler) -> SlotColumns:
    """JSON objects by column, if all are what dilabench writes; everything else by the handler's rules."""
    if isinstance(value, SlotColumns):
        return value
    columns = SlotColumns.of_documents(value) if type(value) is list and value else None
    return SlotColumns(handler(value)) if columns is None else columns


def _are_all(kind: type, *columns: Iterable[Any]) -> bool:
    return set(map(type, chain.from_iterable(columns))) <= {kind}


# A field of slots; to a type checker it is the tuple that it equals.
Slots = Annotated[tuple[Slot, ...], SlotColumns]

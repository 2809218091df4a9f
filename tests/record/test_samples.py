"""Slots are kept by column and are the slots that they were made from."""

import copy
import json
import pickle

import pytest
from pydantic import TypeAdapter, ValidationError

from dilabench.record import Slot, Timing
from dilabench.record.samples import SlotColumns

SLOT = Slot(samples_ns=(5, 6))
FIELDS = {
    "session": 2,
    "round": 3,
    "position": -1,
    "samples_ns": (7,),
    "renewed": (0, 1),
    "changed": (2,),
    "rank_samples_ns": ((5, 6), (7,)),
    "enqueue_ns": (1, 2),
    "sm_clock_mhz": 1980,
    "power_mw": 0,
    "temperature_c": 40,
    "throttle": ("sw_power_cap", "\x1b[2J"),
}


def timing(slots):
    return Timing(timer="wall", proves="elapsed time", slots=slots)


def test_every_field_is_tried():
    assert FIELDS.keys() == Slot.model_fields.keys()


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_slot_comes_back_as_it_was(name, place):
    slots = tuple(SLOT.model_copy(update={name: FIELDS[name]}) if at == place else SLOT for at in range(3))
    columns = timing(slots).slots
    assert isinstance(columns, SlotColumns)
    assert tuple(columns) == slots == columns
    assert (columns[place], columns[-1], columns[1:]) == (slots[place], slots[-1], slots[1:])
    made = Slot(**{"samples_ns": SLOT.samples_ns, name: FIELDS[name]})
    assert {key: type(value) for key, value in columns[place]} == {key: type(value) for key, value in made}
    assert list(columns.column(name)) == [getattr(slot, name) for slot in slots]
    assert columns != timing((SLOT, SLOT, SLOT)).slots
    assert copy.deepcopy(columns) == columns == pickle.loads(pickle.dumps(columns))
    written = timing(slots).model_dump_json()
    assert Timing.model_validate_json(written) == timing(slots) == Timing.model_validate(timing(slots).model_dump())
    assert written.count('"samples_ns"') == 3


DOCUMENTS = {
    "a number as a text": ({"round": "3"}, 3),
    "a whole float": ({"round": 3.0}, 3),
    "a sample as a float": ({"samples_ns": [5.0]}, (5,)),
    "another order of the fields": ({"round": 3, "session": 0}, 3),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_pydantic_takes_for_a_slot_is_one(name):
    fields, value = DOCUMENTS[name]
    found = timing([{"samples_ns": [5]}, {"samples_ns": [5], **fields}]).slots[1]
    assert getattr(found, next(iter(fields))) == value


REFUSED = {
    "no samples": ({}, "slots.1.samples_ns"),
    "an unknown field": ({"samples_ns": [5], "rounds": 3}, "slots.1.rounds"),
    "no number": ({"samples_ns": [5], "round": "x"}, "slots.1.round"),
    "half a sample": ({"samples_ns": [5.5]}, "slots.1.samples_ns"),
    "no list": ({"samples_ns": [5], "throttle": "hot"}, "slots.1.throttle"),
    "no text": ({"samples_ns": [5], "throttle": [4]}, "slots.1.throttle"),
    "a list of no numbers": ({"samples_ns": [5], "rank_samples_ns": [5]}, "slots.1.rank_samples_ns"),
    "too long a number": ({"samples_ns": [2**70]}, "64 bits"),
    "too long a round": ({"samples_ns": [5], "round": 2**70}, "64 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_slot_is_refused_by_its_place(name):
    document, place = REFUSED[name]
    with pytest.raises(ValidationError) as caught:
        timing([{"samples_ns": [5]}, document])
    places = [".".join(map(str, error["loc"])) + " " + error["msg"] for error in caught.value.errors()]
    assert any(place in found for found in places), places


@pytest.mark.parametrize("value", [None, True, 1.0, 1.5, "3", "", [], {}, [1], [1.5], [None], ["x"], [[1]]], ids=repr)
@pytest.mark.parametrize("name", FIELDS)
def test_columns_take_what_slots_take(name, value):
    documents = [json.loads(SLOT.model_copy(update={name: FIELDS[name]}).model_dump_json()) for _ in range(2)]
    documents[1][name] = value
    try:
        slots = TypeAdapter(tuple[Slot, ...]).validate_python(documents)
    except ValidationError:
        with pytest.raises(ValidationError):
            timing(documents)
    else:
        assert timing(documents).slots == slots


def test_samples_take_eight_bytes_each():
    columns = timing([{"samples_ns": [10**6] * 1000, "throttle": ["sw_power_cap"]} for _ in range(100)]).slots
    assert len(pickle.dumps(columns)) < 9 * 100 * 1000

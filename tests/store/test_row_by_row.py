"""Records are read one row at a time, with the result of reading them whole."""

import gzip
import json

import pytest

from dilabench.errors import ConfigError
from dilabench.record import SCHEMA_VERSION, RunHeader, RunRecord, Slot
from dilabench.record.samples import Nanoseconds
from dilabench.report.json import render, to_text
from dilabench.store.archive import read_compressed, read_row_by_row
from dilabench.store.run_files import RunFolder, read_record
from dilabench.validation import MAX_KEYS, VALUES_OF_OBJECT, describe

FORMS = {
    "run.json": to_text,
    "archive": RunRecord.model_dump_json,
    "report --json": lambda record: render(record, None),
}
TEXT = '},\n    {"planned": [], "rows": [{"planned":'


@pytest.fixture
def record(make_row, make_record):
    rows = [make_row(seed=seed) for seed in range(4)]
    planned = rows[1].planned.model_copy(update={"labels": {"plugin:note": TEXT}})
    rows[1] = rows[1].model_copy(update={"planned": planned})
    return make_record(rows, config={"note": TEXT}, argv=(TEXT,))


@pytest.mark.parametrize("form", FORMS)
def test_a_record_is_the_same_as_read_whole(record, form):
    assert read_row_by_row([FORMS[form](record).encode()]) == record


def test_rows_share_equal_requests_and_workloads_and_no_others(make_row, make_record):
    rows = [make_row(name, batch_size=size) for name in ("gather", "strided") for size in (1, 2)]
    found = read_row_by_row([to_text(make_record(rows)).encode()]).rows
    for first in found:
        for second in found:
            equal = first.case.workload == second.case.workload
            assert (first.case.workload is second.case.workload) == equal
    assert found == tuple(rows)


def test_rows_share_equal_checks_without_a_figure(make_row, make_record):
    rows = read_row_by_row([to_text(make_record([make_row(seed=seed) for seed in range(2)])).encode()]).rows
    for first, second in zip(*(row.outcome.verification.checks for row in rows), strict=True):
        assert first == second
        assert (first is second) == (first.error is None)


def test_a_text_like_an_earlier_workload_is_none(make_row, make_record):
    document = json.loads(to_text(make_record([make_row(), make_row()])))
    case = document["rows"][1]["planned"]["case"]
    assert read_row_by_row([json.dumps(document).encode()]) is not None
    case["workload"] = str(case["workload"])
    assert read_row_by_row([json.dumps(document).encode()]) is None


@pytest.mark.parametrize("part", ["workload", "optimizations", "checks"])
@pytest.mark.parametrize("other", [{}, [[]], "", 0])
def test_a_shared_part_of_another_type_is_none(make_row, make_record, part, other):
    document = json.loads(to_text(make_record([make_row(), make_row()])))
    row = document["rows"][0]
    holder = row["outcome"]["verification"] if part == "checks" else row["planned"]["case"]
    if (part, other) == ("optimizations", {}):
        other = [{}]
    holder[part] = other
    assert read_row_by_row([json.dumps(document).encode()]) is None


CHANGES = {
    "older": (f'"schema_version": "{SCHEMA_VERSION}"', '"schema_version": "1.0"'),
    "cut": ("\n  ]", ""),
    "comma": ("\n    },", "\n    },,"),
    "a second row list": ('"status"', '"rows": [], "status"'),
    "unknown field": ('"round"', '"rounds"'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_dilabench_does_not_write_is_left_to_the_reader_of_whole_records(record, change):
    old, new = CHANGES[change]
    text = to_text(record)
    assert old in text
    changed = new.join(text.rsplit(old, 1))
    found = read_row_by_row([changed.encode()])
    assert found is None or found == record


LIMITS = {
    "rows": ("DILABENCH_MAX_ROWS", "3", "it has over 3 rows, the limit; DILABENCH_MAX_ROWS=6"),
    "values": ("DILABENCH_MAX_VALUES", "50", "it has over 50 values, the limit; DILABENCH_MAX_VALUES=100"),
    "depth": ("DILABENCH_MAX_DEPTH", "2", "more than 2 levels deep; DILABENCH_MAX_DEPTH=100"),
}


@pytest.mark.parametrize("value", ["x", "-1", "0", "1.5", "1e999"])
@pytest.mark.parametrize("variable", ["DILABENCH_MAX_FILE", *(variable for variable, _, _ in LIMITS.values())])
def test_a_limit_that_is_no_number_is_named(make_row, make_record, tmp_path, monkeypatch, variable, value):
    path = tmp_path / "run.json"
    path.write_text(to_text(make_record([make_row(), make_row("other")])))
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable):
        read_record(path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_named_with_the_variable_that_raises_it(make_row, make_record, tmp_path, monkeypatch, limit, packed):
    variable, value, message = LIMITS[limit]
    text = to_text(make_record([make_row(seed=seed) for seed in range(4)])).encode()
    path = tmp_path / ("run.json.gz" if packed else "run.json")
    path.write_bytes(gzip.compress(text) if packed else text)
    read = read_compressed if packed else read_record
    read(path)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        read(path)


KEYS = ", ".join(f'"key_{number}": 1' for number in range(100_000))
# Documents of a megabyte or so that hold nothing, and what is said of them.
HOLLOW = {
    "rows without a word": ('"rows": [' + ",".join(["{}"] * 250_000) + "]", "it has over 200000 rows, the limit"),
    "rows of another type": ('"rows": [' + ",".join(["[]"] * 250_000) + "]", "it has over 200000 rows, the limit"),
    "fewer such rows": ('"rows": [' + ",".join(["{}"] * 150_000) + "]", "rows.0.planned is missing"),
    "unknown keys": (
        ", ".join(f'"key_{number}": 1' for number in range(100_000)),
        "an object in it has over 10000 keys",
    ),
    "fewer of them": (", ".join(f'"key_{number}": 1' for number in range(9_000)), "tool_version is missing"),
    "numbers for texts": (
        '"environment": {"packages": {' + KEYS + "}}",
        "an object in it has over 10000 keys",
    ),
    "wrong plug-ins": ('"plugins": [' + ",".join(["{}"] * 150_000) + "]", "plugins.0.name is missing"),
    "wrong arguments": ('"argv": [' + ",".join(["1"] * 500_000) + "]", "argv.0 1 should be a valid string"),
    "unknown keys in a row": (
        '"rows": [{"planned": {' + KEYS + "}}]",
        "an object in it has over 10000 keys",
    ),
}

# They take seconds; packed they are read by the same code.
LONGEST = ("rows of another type", "fewer such rows")


@pytest.mark.parametrize(
    ("form", "case"),
    [
        *(("run.json", case) for case in HOLLOW),
        *(pytest.param("run.json.gz", case, marks=[pytest.mark.slow] * (case in LONGEST)) for case in HOLLOW),
        *(("rows.jsonl", case) for case in ("fewer of them", "wrong plug-ins", "wrong arguments")),
    ],
)
def test_a_document_that_holds_nothing_is_refused_at_its_first_errors(tmp_path, monkeypatch, form, case):
    counts = []

    def counted(error, model):
        counts.append(error.error_count())
        return describe(error, model)

    for module in ("archive", "run_files"):
        monkeypatch.setattr(f"dilabench.store.{module}.describe", counted)
    content, message = HOLLOW[case]
    text = f'{{"schema_version": "{SCHEMA_VERSION}", "run_id": "hollow", {content}}}'
    path = tmp_path / form
    path.write_bytes(
        {
            "run.json": text.encode(),
            "run.json.gz": gzip.compress(text.encode()),
            "rows.jsonl": f'{{"header": {text}}}\n'.encode(),
        }[form]
    )
    with pytest.raises(ConfigError) as caught:
        (read_compressed if form.endswith("gz") else read_record)(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert all(count <= MAX_KEYS for count in counts)


def test_rows_of_a_stream_are_counted(make_row, make_record, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    rows = [make_row(batch_size=size) for size in range(1, 5)]
    record = make_record(rows)
    folder.start(RunHeader(**{name: getattr(record, name) for name in RunHeader.model_fields}))
    for row in rows:
        folder.row(row)
    folder.close()
    monkeypatch.setenv("DILABENCH_MAX_ROWS", "4")
    assert len(read_record(tmp_path).rows) == 4
    monkeypatch.setenv("DILABENCH_MAX_ROWS", "3")
    with pytest.raises(ConfigError, match="over 3 rows, the limit; DILABENCH_MAX_ROWS=6"):
        read_record(tmp_path)


def test_ten_times_the_rows_take_ten_times_the_calls(calls_of, make_row, make_record):
    few, many = ([to_text(make_record([make_row(seed=seed) for seed in range(count)])).encode()] for count in (10, 100))
    read_row_by_row(few)
    assert calls_of(read_row_by_row, many) < 12 * calls_of(read_row_by_row, few)


def test_samples_equal_the_tuple_and_are_written_as_a_list():
    slot = Slot(samples_ns=(5, 2**62), rank_samples_ns=((5, 7),))
    assert isinstance(slot.samples_ns, Nanoseconds)
    assert slot.samples_ns == (5, 2**62)
    assert slot.samples_ns[-1:] == (2**62,)
    assert {slot.samples_ns: "found"}[5, 2**62] == "found"
    assert slot.model_dump(mode="json")["samples_ns"] == [5, 2**62]
    assert Slot.model_validate_json(slot.model_dump_json()) == slot
    with pytest.raises(ValueError, match="more than 64 bits"):
        Slot(samples_ns=(2**63,))


@pytest.mark.parametrize("size", [1, 7, 500])
@pytest.mark.parametrize("form", FORMS)
def test_chunks_of_any_size_are_one_record(record, form, size):
    text = FORMS[form](record).encode()
    assert read_row_by_row(text[at : at + size] for at in range(0, len(text), size)) == record


@pytest.mark.parametrize("size", [1, 7, 500])
@pytest.mark.parametrize(("variable", "what"), [("DILABENCH_MAX_ROWS", "rows"), ("DILABENCH_MAX_VALUES", "values")])
def test_a_limit_counts_what_lies_on_the_border_of_chunks(make_row, make_record, monkeypatch, variable, what, size):
    text = to_text(make_record([make_row(seed=seed) for seed in range(4)])).encode()
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    exact = {"rows": 4, "values": text.count(b",") + VALUES_OF_OBJECT * text.count(b"{")}[what]
    monkeypatch.setenv(variable, str(exact))
    assert read_row_by_row(chunks) is not None
    monkeypatch.setenv(variable, str(exact - 1))
    with pytest.raises(ValueError, match=f"over {exact - 1} {what}"):
        read_row_by_row(chunks)


def test_a_row_in_many_chunks_is_searched_once(calls_of, make_row, make_record):
    """A row of ten times the length takes ten times the calls, not a hundred times."""
    few, many = (to_text(make_record([make_row(samples=samples)])).encode() for samples in (50, 500))
    counts = [calls_of(read_row_by_row, [text[at : at + 50] for at in range(0, len(text), 50)]) for text in (few, many)]
    assert counts[1] < 12 * counts[0]

"""Records of older versions: what their texts said is a code, a type or a number, and nothing is lost."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from dilabench.errors import ConfigError
from dilabench.metadata import COUNTERS, FORM, LABELS, NOTES, VARIANT
from dilabench.record import SCHEMA_VERSION, CheckName, Failed, Measured, RunHeader, RunRecord, Skipped
from dilabench.store.archive import read_compressed
from dilabench.store.migrations import STEPS, failure_code, has_current_rows, migrated, newer_tool, skip_code
from dilabench.store.run_files import ROWS_NAME, RunFolder, completed_rows, read_record, read_rows
from dilabench.validation import content_hash
from dilabench.version import __version__
from tests.conftest import stored_records, text_of

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "run_record.v1.json"
RECORDS = [
    GOLDEN,
    GOLDEN.with_name("isolated_record.v1.json"),
    *(path for path in stored_records() if '"schema_version"' in text_of(path)),
]


@pytest.fixture(scope="module")
def records():
    return [(json.loads(text_of(path)), read_record(path)) for path in RECORDS]


def test_every_record_of_the_documentation_loads_with_all_its_rows_texts_and_samples(records):
    for old, new in records:
        assert len(new.rows) == len(old["rows"]) > 0
        for before, row in zip(old["rows"], new.rows, strict=True):
            assert before["outcome"].get("why") == getattr(row.outcome, "why", None)
            skip = before["planned"].get("skip")
            # Older versions have the reason alone.
            assert (skip["why"] if isinstance(skip, dict) else skip) == (row.planned.skip and row.planned.skip.why)
            if isinstance(row.outcome, Measured):
                taken = [slot["samples_ns"] for timing in before["outcome"]["timings"] for slot in timing["slots"]]
                assert taken == [list(slot.samples_ns) for timing in row.outcome.timings for slot in timing.slots]


def rows_of_older_versions():
    """Rows of schema 1.0, in the records that are never made again."""
    kept = [path for path in RECORDS if path.is_relative_to(GOLDEN.parent)]
    return [
        row for path in kept if json.loads(text_of(path))["schema_version"] == "1.0" for row in read_record(path).rows
    ]


def test_old_rows_get_the_codes_of_their_reasons():
    rows = rows_of_older_versions()
    skipped = Counter(row.outcome.code for row in rows if isinstance(row.outcome, Skipped))
    failed = Counter(row.outcome.code for row in rows if isinstance(row.outcome, Failed))
    assert skipped == {"budget": 23, "unsupported": 5, "out_of_memory": 22, "unusable_optimization": 3}
    assert failed == {"wrong_output": 3, "out_of_memory": 1}
    assert all(row.outcome == row.planned.skip for row in rows if row.planned.skip)
    assert {row.outcome.code for row in rows if row.planned.skip} == {"unsupported"}


def test_old_labels_counters_and_notes_are_fields_or_in_the_registry():
    rows = rows_of_older_versions()
    assert sum(row.planned.procedure == "isolated" for row in rows) == 73
    assert sum(FORM.of(row.planned) is not None for row in rows) == 1
    assert Counter(VARIANT.of(row.planned) for row in rows)["CUDA graph"] == 9
    measured = [row.outcome for row in rows if isinstance(row.outcome, Measured)]
    assert {key for row in rows for key in row.planned.labels} <= LABELS.keys()
    assert {key for outcome in measured for key in outcome.counters} <= COUNTERS.keys()
    assert {note.code for outcome in measured for note in outcome.notes} <= NOTES.keys()
    assert Counter(outcome.memory.source for outcome in measured) == {"allocator": 160, "resident_set": 17}


@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("needs about 3.0 TiB (3298534883328 bytes) of memory, this device has 139.8 GiB; use a shorter length", None),
        ("needs at least 1.0 GiB (1 bytes) of memory, this device has 1.0 MiB; use a smaller batch", None),
        ("torch.compile: no answer to 'prepare' within 60 s", "unusable_optimization"),
        ("compile needs a C++ compiler on a CPU, none of c++, g++, clang++ is on the path", "unusable_optimization"),
        ("gradient checkpointing saves nothing in a forward pass", "not_applicable"),
        ("needs cuda, have cpu (no NVIDIA GPU is visible)", "unsupported"),
        ("ours: no budget of any kind", "unsupported"),
    ],
)
def test_reasons_to_skip(why, code):
    assert skip_code(why) == (code or "does_not_fit")


@pytest.mark.parametrize(
    ("why", "checks", "code"),
    [
        ("2 of 3 checks failed: out, dependency", [True, False], "wrong_output"),
        ("nothing was checked", [], "wrong_output"),
        ("claims flash3 but no such kernel ran: expected a match of x; ran: y", [True], "backend_not_proven"),
        ("out of memory: CUDA out of memory. Tried to allocate 80 GiB", None, "out_of_memory"),
        ("rank 3: out of memory: tried", None, "out_of_memory"),
        ("no answer to 'slot' within 20 s (a hang, or far too slow); the worker was ended", [True], "timeout"),
        ("the worker process on b did not reach rank 0 within 180 s", None, "timeout"),
        ("rank 1: the worker process died during 'slot': killed by SIGSEGV (segmentation fault)", None, "crash"),
        ("the process that torchrun started for rank 1 on b is gone (during 'alive')", None, "crash"),
        ("timer 'graph' was not used: it waits for the device", [True], "no_samples"),
        ("ValueError: out of range", [True], "exception"),
    ],
)
def test_reasons_to_fail(why, checks, code):
    found = None if checks is None else {"checks": [{"name": "out", "passed": passed} for passed in checks]}
    assert failure_code(why, found) == code


def test_keys_of_plug_ins_get_their_namespace():
    old = json.loads(GOLDEN.read_text())
    row = next(row for row in old["rows"] if row["outcome"]["status"] == "measured")
    row["planned"]["labels"] = {"procedure": "alone", "memory_limit_bytes": "1024", "speed": "7"}
    row["outcome"]["counters"] = {"pattern_cache_hits": 1, "steps": 2}
    row["outcome"]["notes"] = [{"code": "graph_unusable", "message": "m"}, {"code": "odd", "message": "m"}]
    new = migrated({**old, "rows": [row]}, GOLDEN)["rows"][0]
    assert new["planned"]["labels"] == {"plugin:speed": "7"}
    assert (new["planned"]["procedure"], new["planned"]["memory_limit_bytes"]) == ("isolated", 1024)
    assert new["outcome"]["counters"] == {"pattern_cache_hits": 1, "plugin:steps": 2}
    assert [note["code"] for note in new["outcome"]["notes"]] == ["timer_unusable", "plugin:odd"]


def test_a_run_of_an_old_version_is_resumed(tmp_path):
    """Its header stays the old one; rows of both versions stand below it."""
    old = json.loads(GOLDEN.read_text())
    budget, *others = (row for row in old["rows"] if row["outcome"]["status"] == "skipped")
    why = "budget of 60 s used up before its turn; allow more with --budget, or go on with --resume"
    budget = {"planned": {**budget["planned"], "skip": None}, "outcome": {"status": "skipped", "why": why}}
    header = {key: value for key, value in old.items() if key in RunHeader.model_fields}
    lines = [{"header": header}, *({"row": row} for row in (budget, *others))]
    path = tmp_path / ROWS_NAME
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = completed_rows(tmp_path)
    assert len(kept) == len(others)

    folder = RunFolder.resume(tmp_path)
    folder.start(RunHeader.model_validate({**header, "schema_version": SCHEMA_VERSION}))
    measured = next(row for row in read_record(GOLDEN).rows if isinstance(row.outcome, Measured))
    folder.row(measured)
    folder.close()
    assert read_rows(tmp_path)[1][-1] == measured
    assert read_record(tmp_path).schema_version == SCHEMA_VERSION


def test_old_rows_pass_through_every_step(tmp_path):
    steps = {
        "0.8": (lambda row: {"b": row["a"]}, "0.9"),
        "0.9": (lambda row: {**row, "c": row["b"] + 1}, "1.0"),
    }
    new = migrated({"schema_version": "0.8", "rows": [{"a": 1}]}, tmp_path, steps, "1.0")
    assert new == {"schema_version": "1.0", "rows": [{"b": 1, "c": 2}]}


def test_a_row_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is not what dilabench 1\.0 wrote: KeyError"):
        migrated({"schema_version": "1.0", "rows": [{"planned": {}}]}, tmp_path)


def test_check_names_of_every_record_are_members_and_stay_as_they_are_written(records):
    for old, new in records:
        for before, row in zip(old["rows"], new.rows, strict=True):
            written = [one["name"] for one in (before["outcome"].get("verification") or {}).get("checks", ())]
            found = getattr(row.outcome, "verification", None)
            names = [one.name for one in found.checks] if found else []
            assert names == written
            # The text of an early development version stays a text.
            assert {name for name in names if not isinstance(name, CheckName)} <= {"inputs unchanged"}
            assert found is None or [one["name"] for one in found.model_dump(mode="json")["checks"]] == written


def test_roles_of_old_rows_do_not_change_with_the_implementations_of_today():
    rows = rows_of_older_versions()
    roles = {(row.case.implementation, row.planned.role) for row in rows if row.planned.role != "yardstick"}
    assert {one for one in roles if one[1] != "method"} == {
        ("reference", "oracle"),
        ("gather", "plain"),
        ("gather-multihead", "plain"),
    }
    source = (ROOT / "dilabench" / "store" / "migrations.py").read_text()
    assert "dilabench.plugins" not in source
    assert "dilabench.choice" not in source


def format_of(schema):
    """A JSON schema without what is for people."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key not in ("description", "title")}
        return {key: format_of(value) for key, value in sorted(kept.items())}
    return [format_of(item) for item in schema] if isinstance(schema, list) else schema


def test_a_record_that_older_versions_cannot_read_has_a_new_version():
    """Of a version, the format is known by its hash. After a change: a new SCHEMA_VERSION, a step, and a line here."""
    known = json.loads((ROOT / "tests" / "golden" / "record_formats.json").read_text())
    schema = RunRecord.model_json_schema()
    # Properties are named by the keys of the JSON, so one called "title" would be lost.
    assert not {"description", "title"} & {
        name for part in schema["$defs"].values() for name in part.get("properties", ())
    }
    assert known[SCHEMA_VERSION] == content_hash(format_of(schema))
    assert set(known) <= {SCHEMA_VERSION, *STEPS}


@pytest.mark.parametrize("version", STEPS)
def test_every_older_version_leads_to_this_one(version):
    assert migrated({"schema_version": version}, GOLDEN)["schema_version"] == SCHEMA_VERSION
    assert has_current_rows(version) == (version != "1.0")


def newer(document, form):
    if form == "a later schema":
        return {**document, "schema_version": "1.9", "tool_version": "9.1"}
    if form == "a later key":
        return {**document, "tool_version": "9.1", "weather": "fine"}
    rows = [{**row, "weather": "fine"} for row in document["rows"]]
    return {**document, "tool_version": "9.1", "rows": rows}


@pytest.mark.parametrize("name", ["run.json", "run.json.gz", "rows.jsonl"])
@pytest.mark.parametrize("form", ["a later schema", "a later key", "a later key in a row"])
def test_a_record_of_a_newer_version_is_named_as_one(tmp_path, make_row, make_record, form, name):
    document = newer(json.loads(make_record([make_row()]).model_dump_json()), form)
    path = tmp_path / name
    if name == "rows.jsonl":
        header = {key: value for key, value in document.items() if key in RunHeader.model_fields or key == "weather"}
        lines = [{"header": header}, *({"row": row} for row in document["rows"])]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        path.write_bytes((gzip.compress if name.endswith("gz") else bytes)(json.dumps(document).encode()))
    with pytest.raises(ConfigError, match=rf"written by dilabench 9\.1, this is {__version__}: upgrade with `pip"):
        (read_compressed if name.endswith("gz") else read_record)(path)


def test_a_version_that_an_older_tool_wrote_is_not_called_newer(tmp_path):
    for version in ("0.0.1", __version__, "nonsense", 3, None):
        assert newer_tool({"tool_version": version}) == ""

import errno
import json
import lzma
import os
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from dilabench import validation
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.patterns.block_sparse import block_mask
from dilabench.record import (
    SCHEMA_VERSION,
    Case,
    Check,
    CpuInfo,
    Environment,
    Failed,
    Measured,
    PlannedCase,
    Row,
    RunHeader,
    RunRecord,
    SkipCode,
    Skipped,
    Slot,
    Timing,
    Verification,
)
from dilabench.store.run_files import RECORD_NAME, ROWS_NAME, RunFolder, completed_rows, read_record, read_rows
from dilabench.workload.spec import WorkloadRequest


def header(**hard: str) -> RunHeader:
    environment = Environment(
        os="Linux", python="3.12", cpu=CpuInfo(model="cpu", cores=2, threads=2), fingerprint_hard=hard
    )
    return RunHeader(tool_version="0", run_id="r1", suite="quick", started_at="2026-01-01", environment=environment)


def case(seq_len: int) -> Case:
    return Case(implementation="gather", workload=WorkloadRequest(seq_len=seq_len).resolve("float32"))


def measured(seq_len: int) -> Row:
    outcome = Measured(
        verification=Verification(checks=(Check(name="out", passed=True),)),
        timings=(Timing(timer="wall", proves="p", slots=(Slot(samples_ns=(seq_len, 7)),)),),
    )
    return Row(planned=PlannedCase(case=case(seq_len)), outcome=outcome)


def skipped(seq_len: int, code: str) -> Row:
    return Row(planned=PlannedCase(case=case(seq_len)), outcome=Skipped(code=code, why="in any words"))


def failed(seq_len: int) -> Row:
    return Row(
        planned=PlannedCase(case=case(seq_len)), outcome=Failed(stage="time", code="crash", why="killed by SIGSEGV")
    )


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(tmp_path / "results", "quick", "r1")
    yield made
    made.close()


def test_a_finished_run_reads_back_equal(folder):
    rows = (measured(512), failed(1024))
    folder.start(header())
    for row in rows:
        folder.row(row)
    record = RunRecord.model_validate({**header().model_dump(), "rows": rows})
    folder.finish(record)
    assert read_record(folder.path) == record
    assert read_record(folder.path / RECORD_NAME) == record
    assert folder.path.name.endswith("-quick-r1")


@pytest.mark.parametrize("becomes", ["gone", "another", "moved with its run"])
def test_a_record_is_read_with_the_mask_that_it_was_made_with(folder, tmp_path, becomes):
    mask = np.tri(8, dtype=bool)
    mask_file = tmp_path / "mask.npy"
    np.save(mask_file, mask)
    request = WorkloadRequest(pattern="block_sparse", mask_file=str(mask_file), seq_len=1024, num_heads=2)
    workload = request.resolve("float32")
    planned = PlannedCase(case=Case(implementation="block-sparse", workload=workload))
    row = measured(512).model_copy(update={"planned": planned})
    folder.start(header())
    folder.keep_masks([workload, case(512).workload, workload.replace(mode="backward")])
    folder.row(row)
    folder.finish(RunRecord.model_validate({**header().model_dump(), "rows": (row,)}))
    mask_file.unlink()
    path = folder.path
    if becomes == "another":
        np.save(mask_file, ~mask)
    elif becomes != "gone":
        path = path.rename(tmp_path / "elsewhere")
    (read,) = read_record(path).rows
    assert (block_mask(read.case.workload.pattern, 1024, False, 2) == mask).all()


def test_a_mask_that_cannot_be_read_stops_a_run_before_it_measures(folder, tmp_path):
    mask_file = tmp_path / "mask.npy"
    np.save(mask_file, np.tri(8, dtype=bool))
    workload = WorkloadRequest(pattern="block_sparse", mask_file=str(mask_file), seq_len=1024).resolve("float32")
    mask_file.unlink()
    with pytest.raises(ConfigError, match=r"mask\.npy' cannot be read"):
        folder.keep_masks([workload])


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_record_that_cannot_be_written_names_the_way_to_go_on_with_the_rows(folder, rows):
    folder.start(header())
    for length in (512, 1024)[:rows]:
        folder.row(measured(length))
    (folder.path / "run.json").mkdir()
    with pytest.raises(EnvironmentNotReady, match=f"rows so far are kept: .* --resume {folder.path}"):
        folder.finish(RunRecord.model_validate({**header().model_dump(), "rows": ()}))
    assert len(read_rows(folder.path)[1]) == rows


def test_rows_alone_tell_an_interrupted_run(folder):
    folder.start(header())
    folder.row(measured(512))
    record = read_record(folder.path)
    assert record.status == "interrupted"
    assert record.rows == (measured(512),)


def test_each_row_is_on_disk_when_row_returns(folder):
    folder.start(header())
    for count, length in enumerate((512, 1024, 2048), 1):
        folder.row(measured(length))
        # Read through another descriptor while the stream is open, as after a kill -9.
        assert len(read_rows(folder.path)[1]) == count


@pytest.mark.parametrize("lost", [1, 2, 40, 200])
def test_a_last_line_that_was_cut_short_is_left_out_and_resumed_over(folder, lost):
    folder.start(header())
    folder.row(measured(512))
    folder.row(measured(1024))
    folder.close()
    path = folder.path / ROWS_NAME
    path.write_bytes(path.read_bytes()[:-lost])
    kept = read_rows(folder.path)[1]
    assert kept[0] == measured(512)
    # Only the line feed gone: the row is whole.
    assert len(kept) == (2 if lost == 1 else 1)

    again = RunFolder.resume(path)
    again.start(header())
    again.row(measured(2048))
    again.close()
    lengths = [row.case.workload.seq_len for row in read_rows(path)[1]]
    assert lengths == ([512, 1024, 2048] if lost == 1 else [512, 2048])


def test_a_damaged_line_in_the_middle_is_told_not_dropped(folder):
    folder.start(header())
    folder.row(measured(512))
    path = folder.path / ROWS_NAME
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "not json at all", lines[1]]) + "\n")
    with pytest.raises(ConfigError, match="line 2 cannot be read"):
        read_rows(path)


def test_resume_repeats_what_the_budget_left_out_and_nothing_else(folder):
    folder.start(header())
    folder.row(measured(512))
    folder.row(failed(1024))
    codes = dict(enumerate(get_args(SkipCode), 2048))
    for length, code in codes.items():
        folder.row(skipped(length, code))
    kept = [length for length, code in codes.items() if code != "budget"]
    assert [row.case.workload.seq_len for row in completed_rows(folder.path)] == [512, 1024, *kept]


def test_the_latest_row_of_a_case_counts(folder):
    folder.start(header())
    folder.row(skipped(512, "budget"))
    folder.row(measured(512))
    assert read_rows(folder.path)[1] == (measured(512),)


def test_resuming_removes_the_record_that_knows_less(folder):
    folder.start(header())
    folder.row(measured(512))
    folder.finish(
        RunRecord.model_validate({**header().model_dump(), "rows": (measured(512),), "status": "interrupted"})
    )
    again = RunFolder.resume(folder.path)
    again.start(header())
    again.row(measured(1024))
    again.close()
    assert len(read_record(folder.path).rows) == 2


def test_resume_on_another_machine_is_refused_with_the_field(folder):
    folder.start(header(gpu="H200", driver="1"))
    with pytest.raises(ConfigError, match="driver was '1', now it is '2'"):
        completed_rows(folder.path, header(gpu="H200", driver="2"))
    assert completed_rows(folder.path, header(gpu="H200", driver="1")) == ()


def test_resume_of_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be resumed"):
        RunFolder.resume(tmp_path)


class FullDisk:
    """A stream that takes some bytes, then none."""

    def __init__(self, stream, room: int) -> None:
        self._stream, self._room = stream, room

    def write(self, data: bytes) -> int:
        part = data[: self._room]
        self._stream.write(part)
        if len(part) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(part)

    def fileno(self) -> int:
        return self._stream.fileno()


def test_a_full_disk_is_told_and_leaves_whole_lines_only(folder):
    folder.start(header())
    folder.row(measured(512))
    stream = folder._stream
    folder._stream = FullDisk(stream, 30)
    with pytest.raises(EnvironmentNotReady, match="No space left on device") as refused:
        folder.row(measured(1024))
    folder._stream = stream
    assert str(folder.path) in str(refused.value)
    assert (folder.path / ROWS_NAME).read_bytes().endswith(b"\n")
    assert read_rows(folder.path)[1] == (measured(512),)


def test_a_full_disk_is_noticed_before_anything_is_measured(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentNotReady, match="choose another folder with -o"):
        RunFolder.create(tmp_path, "quick", "r1")
    assert list(tmp_path.iterdir()) == []


def test_a_base_that_is_a_file_is_refused_with_its_path(tmp_path):
    base = tmp_path / "file"
    base.write_text("")
    with pytest.raises(EnvironmentNotReady, match="file"):
        RunFolder.create(base, "quick", "r1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a run record, or was cut: .*; copy it again from its source"),
        ("[]", "is JSON, but no run record"),
        ('{"rows": []}', "none of schema_version, run_id, so no run of dilabench wrote it"),
        ('{"schema_version": "1.0"}', "run_id is missing"),
        ('{"schema_version": "9.0"}', "update"),
    ],
)
def test_files_that_are_no_record_are_refused(tmp_path, text, message):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_record(path)


def test_a_header_that_is_no_object_is_none(tmp_path):
    path = tmp_path / ROWS_NAME
    path.write_text('{"header": 3}\n')
    with pytest.raises(ConfigError, match="has no header line"):
        read_record(path)


def test_a_folder_that_may_not_be_entered_is_refused(tmp_path, monkeypatch):
    stat = Path.stat

    def refuse(path, **_):
        if path == tmp_path:
            return stat(path)
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr("dilabench.store.run_files.read_file", refuse)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        read_record(tmp_path)


def test_a_missing_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path / "nothing")


def test_the_golden_record_loads():
    golden = Path(__file__).parents[1] / "golden" / "run_record.v1.json"
    record = read_record(golden)
    assert json.loads(golden.read_text())["schema_version"] == "1.0"
    assert record.schema_version == SCHEMA_VERSION
    found = {(row.case.implementation, row.planned.role, row.planned.takes) for row in record.rows}
    assert found >= {
        ("dense", "yardstick", "heads"),
        ("gather", "plain", "heads"),
        ("gather-multihead", "plain", "embeddings"),
        ("strided", "method", "heads"),
    }
    assert not any(row.planned.labels for row in record.rows)


def test_old_rows_of_a_run_that_was_cut_short_get_their_roles_too(tmp_path):
    golden = json.loads((Path(__file__).parents[1] / "golden" / "run_record.v1.json").read_text())
    rows = golden.pop("rows")
    lines = [{"header": {name: golden[name] for name in RunHeader.model_fields if name in golden}}]
    (tmp_path / ROWS_NAME).write_text(
        "\n".join(json.dumps(line) for line in [*lines, *({"row": row} for row in rows)]) + "\n"
    )
    found = read_record(tmp_path).rows
    assert {row.planned.role for row in found} == {"oracle", "plain", "method", "yardstick"}
    # A run that goes on adds rows of today's form behind the old header.
    with (tmp_path / ROWS_NAME).open("a") as file:
        file.write(json.dumps({"row": found[0].model_dump(mode="json")}) + "\n")
    assert sorted(map(repr, read_record(tmp_path).rows)) == sorted(map(repr, found))


def test_many_digits_after_a_point_are_no_long_integer(monkeypatch):
    """A record with a small error of 17 digits took several times as long to read."""
    monkeypatch.setattr(validation, "_machine_int", pytest.fail)
    assert validation.read_json("[0.000012345678901234567, 7, 1.00000000012345678901]") == [
        1.2345678901234567e-05,
        7,
        1.00000000012345678901,
    ]


@pytest.mark.parametrize("text", ["[0.000012345678901234567, 12345678901234567890]", "-12345678901234567890"])
def test_a_long_integer_beside_a_fraction_is_refused(text):
    with pytest.raises(ValueError, match="which no measurement has"):
        validation.read_json(text)


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (lambda data: data, None),
        (lambda data: data[:-5], "the xz file was cut"),
        (lambda _: b"plain", "no xz file"),
        (lambda data: data + b"more", "no xz file"),
        (lambda _: lzma.compress(bytes(3 << 20)), "it has over 2.0 MiB"),
    ],
    ids=["whole", "cut", "plain", "longer", "bomb"],
)
def test_a_record_may_be_compressed(tmp_path, monkeypatch, make_record, make_row, spoilt, message):
    monkeypatch.setenv("DILABENCH_MAX_FILE", "2M")
    record = make_record([make_row()])
    path = tmp_path / "run.json.xz"
    path.write_bytes(spoilt(lzma.compress(record.model_dump_json().encode())))
    if message is None:
        assert read_record(path) == record
    else:
        with pytest.raises(ConfigError, match=message):
            read_record(path)

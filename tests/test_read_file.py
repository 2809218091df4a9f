"""What is read whole: plain files of bounded size, and pipes where a user names one."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dilabench import atomic_file
from dilabench.errors import ConfigError, DilabenchError
from dilabench.request import read_toml
from dilabench.store.archive import read_compressed
from dilabench.store.baselines import Baselines
from dilabench.store.calibrations import Calibrations
from dilabench.store.run_files import completed_rows, read_record, read_rows

ARCHIVED = "runs/20260102T030405Z-a.json.gz"
GOLDEN = Path(__file__).parent / "golden" / "run_record.v1.json"

Read = Callable[[Path], object]


# The file that each reader opens in a folder.
STORE: dict[str, tuple[str, Read]] = {
    "rows": ("rows.jsonl", read_rows),
    "rows to resume": ("rows.jsonl", completed_rows),
    "record of a folder": ("run.json", read_record),
    "archived run": (
        "runs/20260102T030405Z-a.json.gz",
        lambda folder: read_compressed(folder / "runs/20260102T030405Z-a.json.gz"),
    ),
    "baselines": ("baselines.toml", lambda folder: Baselines(folder).all()),
    "calibration": ("calibrations/m.json", lambda folder: Calibrations(folder).get("m")),
}


@pytest.mark.parametrize("kind", ["fifo", "endless"])
@pytest.mark.parametrize(("name", "read"), STORE.values(), ids=STORE)
def test_files_of_the_store_are_plain_files(tmp_path: Path, name: str, read: Read, kind: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DilabenchError, match="it is no plain file"):
        read(tmp_path)


@pytest.mark.parametrize(("name", "read"), STORE.values(), ids=STORE)
def test_files_have_a_limit_that_can_be_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: Read
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    content = b" " * 5000
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    monkeypatch.setenv(atomic_file.LIMIT_VARIABLE, "4K")
    with pytest.raises(DilabenchError, match=r"it has over 4\.0 KiB; DILABENCH_MAX_FILE="):
        read(tmp_path)


@pytest.mark.parametrize("read", [read_record, read_toml])
def test_what_a_user_names_may_be_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Read) -> None:
    content = GOLDEN.read_bytes() if read is read_record else b"[run]\n"
    plain, fifo = tmp_path / "plain", tmp_path / "fifo"
    plain.write_bytes(content)
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(content,))
    writer.start()
    assert read(fifo) == read(plain)
    writer.join()
    monkeypatch.setattr(atomic_file, "SILENCE_S", 0.05)
    with pytest.raises(ConfigError, match=r"it sent no data within 0\.05 s"):
        read(fifo)
    monkeypatch.setenv(atomic_file.LIMIT_VARIABLE, "4K")
    with pytest.raises(ConfigError, match=r"it has over 4\.0 KiB"):
        read(Path("/dev/zero"))

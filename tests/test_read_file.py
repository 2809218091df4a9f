"""What is read whole: plain files of bounded size, and pipes where a user names one."""

from __future__ import annotations

import gzip
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dilabench import atomic_file
from dilabench.cli import github
from dilabench.errors import ConfigError, DilabenchError
from dilabench.patterns import mask_files
from dilabench.patterns.mask_files import keep_mask, mask_digest, mask_of_digest, named_file, read_mask_file
from dilabench.patterns.pattern import SequenceShape
from dilabench.patterns.registry import pattern_type
from dilabench.predict.memory import plan
from dilabench.request import read_toml
from dilabench.store.archive import read_compressed
from dilabench.store.baselines import Baselines
from dilabench.store.calibrations import Calibrations
from dilabench.store.run_files import RunFolder, completed_rows, read_record, read_rows

pytestmark = pytest.mark.faults

ARCHIVED = "runs/20260102T030405Z-a.json.gz"
GOLDEN = Path(__file__).parent / "golden" / "run_record.v1.json"

Read = Callable[[Path], object]


def npy_bytes(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


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


# What is written to in place: the file that each writer opens in a folder.
WRITTEN: dict[str, tuple[str, Read]] = {
    "rows of a resumed run": ("rows.jsonl", RunFolder.resume),
    "baselines' lock": (".baselines.toml.lock", lambda folder: Baselines(folder).save("main", ["a"], "now")),
    "summary of a job": ("summary", lambda folder: github.append_summary("text")),
    "traced memory": ("traces.jsonl", lambda folder: plan.open_to_append(folder / "traces.jsonl")),
}


@pytest.mark.parametrize("kind", ["fifo", "endless", "terminal", "folder"])
@pytest.mark.parametrize(("name", "write"), WRITTEN.values(), ids=WRITTEN)
def test_only_plain_files_are_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Read, kind: str
) -> None:
    monkeypatch.setenv(github.VARIABLE, str(tmp_path / name))
    devices = {"endless": "/dev/zero", "terminal": "/dev/ptmx"}
    path = tmp_path / name
    if kind in devices:
        path.symlink_to(devices[kind])
    else:
        (os.mkfifo if kind == "fifo" else os.mkdir)(path)
    with pytest.raises((DilabenchError, OSError), match=r"it is no plain file|it is a folder|Is a directory"):
        write(tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_look_at_free_space_touches_no_file(tmp_path: Path, kind: str) -> None:
    """A run that a stranger sent may hold any name."""
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("keep me")
    run.mkdir()
    (run / "rows.jsonl").write_bytes(b"")
    if kind == "fifo":
        os.mkfifo(run / ".probe")
    else:
        (run / ".probe").symlink_to(precious)
    RunFolder.resume(run).close()
    assert precious.read_text() == "keep me"
    assert (run / ".probe").is_symlink() == (kind == "link")


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


MASKS: dict[str, bytes] = {".npy": npy_bytes(np.tri(4, dtype=bool)), ".json": b"[[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]"}


@pytest.mark.parametrize("suffix", MASKS)
def test_a_mask_that_a_user_names_may_be_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path / "cache"))
    plain, fifo = tmp_path / f"plain{suffix}", tmp_path / "fifo"
    plain.write_bytes(MASKS[suffix])
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(MASKS[suffix],))
    writer.start()
    name, digest = named_file(str(fifo))
    writer.join()
    # A request reads it for each of its lengths.
    assert (name, digest) == named_file(str(fifo)) == (name, mask_digest(plain))
    assert (read_mask_file(Path(name), 4) == read_mask_file(plain, 4)).all()


FORMS = {
    "topk_blocks": ("indices", r"integers \[n, k\] or \[K, n, k\], -1 where a row has fewer blocks"),
    "selected_blocks": ("indices", r"integers \[N, S\] or \[N, K, S\], -1 where a token has fewer blocks"),
    "column_bounds": ("bounds", r"integers \[ranges, 2, N\]"),
}
NO_ARRAYS = {
    "rows.json": (b"[[0], [0, 1]]", r"it begins with b'\[\[0\], \[0, 1\]\]'"),
    "rows.npy": (b"[[0], [1]]", r"it begins with b'\[\[0\], \[1\]\]'"),
    "objects.npy": (npy_bytes(np.array([[0], [0, 1]], dtype=object)), "Python objects"),
    "empty.npy": (b"", "it is empty"),
}


@pytest.mark.parametrize("by_pipe", [False, True], ids=["path", "pipe"])
@pytest.mark.parametrize("name", NO_ARRAYS)
@pytest.mark.parametrize("kind", FORMS)
def test_a_file_that_is_no_array_is_refused_with_what_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, by_pipe: bool
) -> None:
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path / "cache"))
    (content, cause), (what, form), path = NO_ARRAYS[name], FORMS[kind], tmp_path / name
    if by_pipe:
        os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    if not by_pipe:
        writer.join()
    pattern = pattern_type(kind).from_request({f"{what}_file": str(path)})
    writer.join()
    with pytest.raises(ConfigError, match=rf"^{what} file .* is not a valid \.npy file: .*{cause}.*; save {form}"):
        pattern.pairs(SequenceShape(64, 2, 1, causal=False, window=(-1, -1)))


def test_a_mask_has_a_limit_and_is_waited_for_in_vain_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse, fifo = tmp_path / "sparse.npy", tmp_path / "fifo.npy"
    with sparse.open("wb") as file:
        file.truncate(3 << 30)
    os.mkfifo(fifo)
    monkeypatch.setenv(atomic_file.LIMIT_VARIABLE, "4K")
    monkeypatch.setattr(atomic_file, "SILENCE_S", 0.05)
    for path, why in ((sparse, "it has over 4"), (Path("/dev/zero"), "it has over 4"), (fifo, "it sent no data")):
        with pytest.raises(ConfigError, match=why):
            named_file(str(path))


@pytest.mark.parametrize("kind", ["link", "another mask", "fifo"])
def test_the_copy_of_a_mask_is_the_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The folder of a run, which holds the copy, may be a stranger's."""
    mask, precious, folder = tmp_path / "mask.json", tmp_path / "precious", tmp_path / "masks"
    mask.write_bytes(MASKS[".json"])
    precious.write_text("keep me")
    digest = mask_digest(mask)
    copy = folder / f"{digest}.json"
    folder.mkdir()
    if kind == "fifo":
        os.mkfifo(copy)
    elif kind == "link":
        copy.symlink_to(precious)
    else:
        copy.write_text("[[0]]")
    monkeypatch.setattr(mask_files, "_kept_in", [folder])
    with pytest.raises(ConfigError, match="cannot be read"):
        mask_of_digest(tmp_path / "gone.json", digest)
    keep_mask(mask, digest, folder)
    assert precious.read_text() == "keep me"
    assert mask_of_digest(tmp_path / "gone.json", digest) == copy

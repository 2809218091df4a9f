"""A cache folder, compiler or compiled file that does not work: torch's kernels serve, with one line that says why."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dilabench.atomic_file import with_digest
from dilabench.attention import attention
from dilabench.choice import descriptors
from dilabench.choice.ways import own_ways
from dilabench.kernels.cpu import compiled, flash
from dilabench.machine import cxx_compiler, detect
from tests.conftest import slow

pytestmark = pytest.mark.skipif(cxx_compiler() is None, reason="needs a C++ compiler, none works here")

# Answers twice, so that what is logged twice shows; the first two lines of output are the answers.
CHILD = """
import ctypes, logging, resource, signal, sys
logging.basicConfig(format="logged %(message)s", stream=sys.stdout)
from dilabench.kernels.cpu import compiled
{fault}
answers = compiled.why_unavailable(), compiled.why_unavailable()
print("answer", *{{answer or "loaded" for answer in answers}})
print("torch" in sys.modules)
"""
# A full disk: no file may have more than so many bytes.
FULL = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
NOEXEC = """
def refuse(path):
    raise OSError(f"{path}: failed to map segment from shared object")
compiled.ctypes.CDLL = refuse
"""
COPIES = 'case "$*" in *" -S "*) exit 0;; esac; while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done; '
LOADED, SERVE_INSTEAD = "loaded", "torch's serve instead"


@pytest.fixture(scope="module")
def library_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library, without its digest: a compiler that copies it takes no time. Nobody calls it, so nothing
    is optimised.
    """
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-O0"))
        patch.setenv("DILABENCH_COMPILED", str(folder))
        compiled.library.__wrapped__()
    (file,) = folder.iterdir()
    data = file.read_bytes()[:-32]
    assert with_digest(data) == file.read_bytes()
    # This process has mapped the other file, and ends by a signal where that changes.
    without_digest = folder / "without_digest"
    without_digest.write_bytes(data)
    return without_digest


def answer(tmp_path: Path, folder: Path, compiler: str, fault: str = "") -> tuple[str, list[str]]:
    """What a fresh process without torch says of the kernels with this script as its compiler, and what it logs."""
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\n{compiler}\n")
    script.chmod(0o755)
    # The name of a compiled file depends on the time of its compiler.
    os.utime(script, (1, 1))
    finished = subprocess.run(
        [sys.executable, "-c", CHILD.format(fault=fault)],
        env={**os.environ, "CXX": str(script), "DILABENCH_COMPILED": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    *logged, said, has_torch = finished.stdout.splitlines()
    assert has_torch == "False"
    return said.removeprefix("answer "), [line.removeprefix("logged ") for line in logged]


@pytest.mark.parametrize(
    ("compiler", "fault", "reason"),
    [
        (None, "", LOADED),
        (None, FULL, "File too large"),
        (None, NOEXEC, "failed to map segment"),
        ('[ -n "$out" ] && echo "int main() {}" > "$out"', "", "cannot be loaded: .*invalid ELF header|file too short"),
        slow("exit 0", "", "cannot be loaded"),
        ("rm -f $out", "", "No such file or directory"),
        ("exit 1", "", "does not compile .* it ended with 1 and no message"),
        slow('kill -9 $$ # "$out"', "", "does not compile"),
    ],
    ids=["sound", "full", "noexec", "only-preprocesses", "writes-nothing", "removes", "fails-silently", "is-killed"],
)
def test_a_compiler_or_folder_that_fails(library_file, tmp_path, compiler, fault, reason):
    folder = tmp_path / "cache"
    said, logged = answer(tmp_path, folder, COPIES + (compiler or f'cp {library_file} "$out"'), fault)
    if reason is LOADED:
        assert (said, logged) == (LOADED, [])
        return
    assert re.search(reason, said), said
    assert len(logged) == 1
    assert SERVE_INSTEAD in logged[0]
    # Nothing half made stays behind for the next process.
    assert not list(folder.glob("*"))


@pytest.mark.parametrize("kind", ["file", slow("link-to-nothing"), slow("below-a-file"), "proc"])
def test_a_folder_that_cannot_be_made(library_file, tmp_path, kind):
    folder = tmp_path / "cache"
    if kind == "link-to-nothing":
        folder.symlink_to("/proc/none-such")
    elif kind != "proc":
        folder.write_text("")
    place = {"below-a-file": folder / "cpu", "proc": Path("/proc/none-such")}.get(kind, folder)
    said, (line,) = answer(tmp_path, place, COPIES + f'cp {library_file} "$out"')
    assert str(place) in said
    assert "set DILABENCH_CACHE to a folder that you can write" in said
    assert SERVE_INSTEAD in line


DAMAGES = {
    "empty": lambda data: b"",
    "one-byte": lambda data: data[:1],
    "truncated-to-a-page": lambda data: data[:4096],
    "truncated-by-half": lambda data: data[: len(data) // 2],
    "truncated-by-a-byte": lambda data: data[:-1],
    "without-digest": lambda data: data[:-32],
    "flipped-bit": lambda data: data[:9000] + bytes([data[9000] ^ 1]) + data[9001:],
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"#!/bin/sh\n" * 100,
    "longer": lambda data: data + b"\0",
}


@pytest.mark.slow
def test_a_damaged_library_is_made_again(library_file, tmp_path):
    folder, compiler = tmp_path / "cache", COPIES + f'cp {library_file} "$out"'
    assert answer(tmp_path, folder, compiler) == (LOADED, [])
    (kept,) = folder.iterdir()
    sound = kept.read_bytes()
    for name, damage in DAMAGES.items():
        kept.write_bytes(damage(sound))
        said, (line,) = answer(tmp_path, folder, compiler)
        assert said == LOADED, name
        assert str(kept) in line
        assert "is damaged" in line
        assert kept.read_bytes() == sound, name
        assert list(folder.iterdir()) == [kept]


def test_a_damaged_library_that_cannot_be_made_again(library_file, tmp_path):
    folder = tmp_path / "cache"
    answer(tmp_path, folder, COPIES + f'cp {library_file} "$out"')
    (kept,) = folder.iterdir()
    kept.write_bytes(kept.read_bytes()[:5000])
    said, logged = answer(tmp_path, folder, COPIES + "exit 1")
    assert "does not compile" in said
    assert len(logged) == 2


def test_torchs_kernels_serve_instead(monkeypatch):
    reason = "the cache is full"
    monkeypatch.setattr(flash, "why_unavailable", lambda: reason)
    monkeypatch.setattr(descriptors, "why_unavailable", lambda: reason)
    monkeypatch.setattr(flash, "library", lambda: pytest.fail("an unavailable library was loaded"))
    assert descriptors.unmet(own_ways().backends.get("flash-cpu").requires, detect("cpu")) == (reason,)
    q, k, v = (torch.randn(1, 70, 2, 16, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, causal=True)
    out.sum().backward()
    heads = (x.detach().transpose(1, 2) for x in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out, exact)


COMPILING = """
import sys, time
from pathlib import Path
from dilabench.errors import EnvironmentNotReady
from dilabench.kernels.cpu import compiled

if sys.argv[3] == "timed out":
    compiled.LONGEST_COMPILATION_S = 2
try:
    compiled._compile([sys.argv[1], "flash.cpp"], Path(sys.argv[2]) / "kept.so")
except EnvironmentNotReady as error:
    print(error)
"""


@pytest.mark.parametrize("ending", ["killed", "timed out"])
def test_a_compiler_ends_with_the_command_and_so_does_what_it_started(tmp_path: Path, ending: str) -> None:
    compiler, pids = tmp_path / "c++", tmp_path / "pids"
    # As g++, which starts cc1plus.
    compiler.write_text(f"#!/bin/sh\nsleep 300 &\necho $$ $! > {pids}.part; mv {pids}.part {pids}\nwait\n")
    compiler.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(Path(compiled.__file__).parents[3])}
    command = [sys.executable, "-c", COMPILING, str(compiler), str(tmp_path), ending]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    while not pids.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if ending == "killed":
        process.kill()
    process.communicate(timeout=60)
    started = [int(pid) for pid in pids.read_text().split()]
    while any(map(runs, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, started))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""dilabench's C++ code, compiled for this machine's processor at first use and kept in the cache folder (ctypes)."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dilabench.atomic_file import OTHER_CACHE, compiled_folder, read_checked, with_digest
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import CXX_COMPILERS, cpuinfo, cxx_compiler

SOURCE = Path(__file__).with_name("flash.cpp")
FUNCTIONS = ("flash_forward", "flash_backward")
# Rows of a tile, tiles that a thread works on together, and numbers behind the result of each of few rows, for its
# maximum and sum.
CONSTANTS = {"QUERIES": 64, "KEYS": 64, "FORWARD_TILES": 4, "BACKWARD_TILES": 2, "BEHIND_ROW": 16}
# Rows that share keys up to which a forward pass has channels in the lanes of vectors, not queries.
FEW_ROWS = 16
# Fused multiply-add; no errno and traps. Not -ffast-math, which assumes that no number is infinite or NaN.
FLAGS = (
    "-std=c++17",
    "-O2",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
LONGEST_COMPILATION_S = 300
# Runs a compiler, and ends it with the processes that it started when the other end of standard input is closed.
_WITH_THIS_PROCESS = """
exec 3<&0
"$@" 3<&- & compiler=$!
{ cat <&3; kill -9 -$$; } >/dev/null 2>&1 & watching=$!
wait $compiler; ended=$?
kill $watching
exit $ended
"""
# Limit of the library's size; it has about 120 KiB.
LARGEST_BYTES = 1 << 20

logger = logging.getLogger(__name__)


@cache
def why_unavailable() -> str | None:
    """Why the library cannot be built and loaded here, which is logged; None if it is loaded. Asked once."""
    try:
        library()
    except EnvironmentNotReady as error:
        logger.warning("the C++ kernels of dilabench are unavailable, torch's serve instead: %s", error)
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """The library of `flash.cpp`, compiled (for seconds) unless the cache has it for this processor and compiler.

    Raises EnvironmentNotReady if it cannot be compiled, written or loaded.
    """
    compiler = cxx_compiler()
    if compiler is None:
        raise EnvironmentNotReady(f"{SOURCE.name} needs a C++ compiler, none of {', '.join(CXX_COMPILERS)} works here")
    defined = (f"-D{name}={value}" for name, value in CONSTANTS.items())
    command = [compiler, *FLAGS, _for_this_processor(), *defined, str(SOURCE)]
    try:
        name = f"{SOURCE.stem}-{_identity(command)}.so"
        kept = compiled_folder() / name
        # A truncated library would end the process at its first use (SIGBUS).
        return _loaded(kept) if read_checked(kept) else _compile(command, kept)
    except OSError as error:
        raise EnvironmentNotReady(f"{str(compiled_folder())!r}: {error.strerror or error}; {OTHER_CACHE}") from error


def _for_this_processor() -> str:
    # ARM processors are named by another option than x86.
    return "-mcpu=native" if platform.machine().lower() in ("aarch64", "arm64") else "-march=native"


def _compile(command: list[str], kept: Path) -> ctypes.CDLL:
    """Compile and load a library, then keep it in its folder; raises OSError and EnvironmentNotReady."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / kept.name
        # A full disk shows here rather than after seconds of compilation.
        made.write_bytes(bytes(LARGEST_BYTES))
        here, held = os.pipe()
        try:
            ended = subprocess.run(
                ["sh", "-c", _WITH_THIS_PROCESS, "sh", *command, "-o", str(made)],
                stdin=here,
                capture_output=True,
                text=True,
                timeout=LONGEST_COMPILATION_S,
                check=False,
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvironmentNotReady(f"{command[0]} could not compile {command[-1]}: {error}") from error
        finally:
            os.close(held)
            os.close(here)
        if ended.returncode:
            message = next((line for line in ended.stderr.splitlines() if "error" in line), ended.stderr.strip()[-300:])
            why = message or f"it ended with {ended.returncode} and no message"
            raise EnvironmentNotReady(f"{command[0]} does not compile {command[-1]}: {why}")
        # A loader ignores what follows the sections.
        made.write_bytes(with_digest(made.read_bytes()))
        made.chmod(0o755)
        loaded = _loaded(made)
        # Another process may have made it meanwhile: either is as good.
        made.replace(kept)
    return loaded


def _loaded(path: Path) -> ctypes.CDLL:
    """The library of a file. Raises EnvironmentNotReady if it cannot be loaded or lacks a function."""
    try:
        loaded = ctypes.CDLL(str(path))
        for function in FUNCTIONS:
            getattr(loaded, function)
    except (OSError, AttributeError) as error:
        raise EnvironmentNotReady(f"the compiled C++ cannot be loaded: {error}; {OTHER_CACHE}") from error
    return loaded


def _identity(command: list[str]) -> str:
    """A hash of everything that the machine code depends on, and of the form of the file."""
    chosen = Path(command[0]).resolve()
    parts = [*command[1:-1], SOURCE.read_text(), str(chosen), str(chosen.stat().st_mtime_ns), _processor()]
    # Containers with different C libraries may share a cache. "digest": the form of the file.
    parts += [*platform.libc_ver(), "digest"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor with what it can do: a home folder may be shared by several machines."""
    lines = cpuinfo().splitlines()
    if not lines:
        return f"{platform.machine()} {platform.processor()}"
    features: set[str] = set()
    for line in lines:
        if line.partition(":")[0].strip() in ("model name", "flags", "Features", "CPU part"):
            features.add(line)
    return "\n".join([platform.machine(), *sorted(features)])


@cache
def openmp_parallel() -> int:
    """Address of GOMP_parallel in the OpenMP library that torch has loaded; 0 if it has none.

    GNU's and LLVM's have it; every process that imported torch on Linux finds it among its global symbols.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0

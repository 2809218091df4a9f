"""C++ of ours, compiled for this machine's processor at first use and kept in the cache folder (ctypes)."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dilabench.errors import EnvironmentNotReady
from dilabench.machine import CXX_COMPILERS, compiled_folder, cpuinfo, cxx_compiler

SOURCES = Path(__file__).parent
# Products and sums in one instruction; no care for errno and traps. Not -ffast-math, which assumes that no number is
# infinite or NaN.
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


@lru_cache
def library(source: str, **constants: int) -> ctypes.CDLL:
    """The library of `source`, a file beside this one, with these constants defined.

    Compiles for seconds where this processor has not met it. Raises EnvironmentNotReady without a compiler, or where it
    does not take the source.
    """
    path = SOURCES / source
    found = cxx_compiler()
    if found is None:
        raise EnvironmentNotReady(f"{source} needs a C++ compiler, none of {', '.join(CXX_COMPILERS)} works here")
    defined = (f"-D{name}={value}" for name, value in constants.items())
    command = [found, *FLAGS, _for_this_processor(), *defined, str(path)]
    compiled = compiled_folder() / f"{path.stem}-{_identity(command, path)}.so"
    if not compiled.exists():
        _compile(command, compiled)
    return ctypes.CDLL(str(compiled))


def _for_this_processor() -> str:
    # Processors of ARM are named by another option than those of x86.
    return "-mcpu=native" if platform.machine().lower() in ("aarch64", "arm64") else "-march=native"


def _compile(command: list[str], compiled: Path) -> None:
    compiled.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=compiled.parent) as folder:
        made = Path(folder) / compiled.name
        try:
            ended = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, timeout=LONGEST_COMPILATION_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvironmentNotReady(f"{command[0]} could not compile {command[-1]}: {error}") from error
        if ended.returncode:
            told = next((line for line in ended.stderr.splitlines() if "error" in line), ended.stderr.strip()[-300:])
            raise EnvironmentNotReady(f"{command[0]} does not compile {command[-1]}: {told}")
        # Another process may have made it meanwhile: either is as good.
        made.replace(compiled)


def _identity(command: list[str], path: Path) -> str:
    """A hash of everything that the machine code hangs on."""
    chosen = Path(command[0]).resolve()
    parts = [*command[1:-1], path.read_text(), str(chosen), str(chosen.stat().st_mtime_ns), _processor()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor with what it can do: a home folder may be shared by several machines."""
    lines = cpuinfo().splitlines()
    if not lines:
        return f"{platform.machine()} {platform.processor()}"
    told = {line for line in lines if line.partition(":")[0].strip() in ("model name", "flags", "Features", "CPU part")}
    return "\n".join([platform.machine(), *sorted(told)])


@lru_cache
def openmp_parallel() -> int:
    """Address of GOMP_parallel in the OpenMP library that torch has loaded; 0 where it has none by that name.

    GNU's and LLVM's have it; every process that imported torch on Linux finds it among its global symbols.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0

"""What this machine has, found without importing torch: NVML for GPUs, package metadata for torch."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dilabench.errors import EnvironmentNotReady
from dilabench.validation import Model, content_hash
from dilabench.workload.spec import AUTO_TOKENS, DType

DeviceKind = Literal["cpu", "cuda"]
DeviceClass = Literal["cpu", "older", "sm80", "sm90"]

CXX_COMPILERS = ("c++", "g++", "clang++")
GROUP_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")


class GpuInfo(Model):
    """One GPU as NVML shows it; None where the driver does not tell."""

    name: str
    uuid_hash: str | None = None
    compute_capability: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    power_limit_mw: int | None = None
    max_sm_clock_mhz: int | None = None
    ecc: bool | None = None
    mig: bool | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The device kind a run will use, the GPUs, and why CUDA is not used where it is not."""

    device: DeviceKind
    gpus: tuple[GpuInfo, ...] = ()
    no_cuda: str | None = None

    @property
    def compute_capability(self) -> int:
        """Compute capability of the first GPU as 90 for 9.0; 0 on a CPU."""
        if self.device == "cpu" or not self.gpus or self.gpus[0].compute_capability is None:
            return 0
        return int(self.gpus[0].compute_capability.replace(".", ""))

    @property
    def device_class(self) -> DeviceClass:
        """What priorities of backends are stated for: 'sm90' stands for sm_90 and newer, 'older' for below sm_80."""
        if self.device == "cpu":
            return "cpu"
        return "sm90" if self.compute_capability >= 90 else "sm80" if self.compute_capability >= 80 else "older"

    @property
    def auto_dtype(self) -> DType:
        """bfloat16 on sm_80 and newer, float16 on sm_70 and sm_75, float32 below and on a CPU (catalog.md §2)."""
        if self.compute_capability >= 80:
            return "bfloat16"
        return "float16" if self.compute_capability >= 70 else "float32"

    @property
    def auto_tokens(self) -> int:
        """Tokens of a call whose batch is `auto`: enough to fill a GPU; a CPU has one sequence at a time to do."""
        return AUTO_TOKENS if self.device == "cuda" else 1


def detect(device: str = "auto") -> Machine:
    """The machine as a run with `device` ('auto', 'cpu' or 'cuda') sees it.

    Raises EnvironmentNotReady when CUDA is asked for by name and cannot be used.
    """
    installed = _nvml_gpus()
    gpus = _visible(installed)
    no_cuda = _why_no_cuda(installed, gpus)
    if device == "cuda" and no_cuda:
        raise EnvironmentNotReady(f"device 'cuda' cannot be used: {no_cuda}; use --device cpu or auto")
    kind: DeviceKind = "cpu" if device == "cpu" or no_cuda else "cuda"
    return Machine(device=kind, gpus=gpus, no_cuda="device cpu was asked for" if device == "cpu" else no_cuda)


def cxx_compiler() -> str | None:
    """Path of the first of $CXX and CXX_COMPILERS that is there and reads C++17 with its standard library."""
    return _first_working(os.environ.get("CXX"), os.environ.get("PATH"))


@functools.cache
def _first_working(named: str | None, _path: str | None) -> str | None:
    found = map(shutil.which, filter(None, (named, *CXX_COMPILERS)))
    return next((path for path in found if path and _reads_cxx(path)), None)


def _reads_cxx(compiler: str) -> bool:
    """A command of that name may be a stub that says what to install, or a compiler without headers."""
    reading = [compiler, "-std=c++17", "-E", "-x", "c++", "-"]
    try:
        done = subprocess.run(reading, input=b"#include <vector>", capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@functools.cache
def cpuinfo() -> str:
    """/proc/cpuinfo; empty where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def multiplies_bfloat16_tiles() -> bool:
    """Whether the processor has tile registers (AMX), which multiply bfloat16 several times as fast."""
    return "amx_bf16" in cpuinfo()


def _visible(installed: tuple[GpuInfo, ...]) -> tuple[GpuInfo, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; as for CUDA, the list ends at the first unknown entry.

    Entries are numbers in NVML's order (CUDA_DEVICE_ORDER=PCI_BUS_ID; the same for equal GPUs). NVML does not know the
    variable. Lists of UUIDs leave all GPUs: records keep no UUID to compare with.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or chosen.startswith(("GPU-", "MIG-")):
        return installed
    found: list[GpuInfo] = []
    for entry in chosen.split(","):
        if not re.fullmatch(r"\s*[0-9]{1,4}\s*", entry) or int(entry) >= len(installed):
            break
        found.append(installed[int(entry)])
    return tuple(found)


def _why_no_cuda(installed: tuple[GpuInfo, ...], gpus: tuple[GpuInfo, ...]) -> str | None:
    if not installed:
        return "no NVIDIA GPU is visible"
    if not gpus:
        return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r:.80} hides every GPU"
    version = torch_cuda_version()
    return None if version else "the installed torch is a CPU build"


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed torch was built for, read from its version file without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def _nvml_gpus() -> tuple[GpuInfo, ...]:
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        return tuple(_nvml_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index), driver) for index in range(count))
    finally:
        pynvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, handle: Any, driver: str) -> GpuInfo:
    def ask(question: str, *arguments: Any) -> Any:
        # A driver answers only part of the questions, depending on the board.
        try:
            return getattr(nvml, question)(handle, *arguments)
        except nvml.NVMLError:
            return None

    capability = ask("nvmlDeviceGetCudaComputeCapability")
    memory = ask("nvmlDeviceGetMemoryInfo")
    ecc = ask("nvmlDeviceGetEccMode")
    mig = ask("nvmlDeviceGetMigMode")
    uuid = ask("nvmlDeviceGetUUID")
    return GpuInfo(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid_hash=content_hash(_text(uuid)) if uuid else None,
        compute_capability=".".join(map(str, capability)) if capability else None,
        memory_bytes=int(memory.total) if memory else None,
        driver=driver,
        power_limit_mw=ask("nvmlDeviceGetEnforcedPowerLimit"),
        max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        ecc=bool(ecc[0]) if ecc else None,
        mig=bool(mig[0]) if mig else None,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def memory_bytes(machine: Machine) -> int | None:
    """Memory of the device that cases run on: of the first GPU, or of the host within its control group's limit."""
    if machine.device == "cuda":
        return machine.gpus[0].memory_bytes if machine.gpus else None
    import psutil

    total: int = psutil.virtual_memory().total
    try:
        limit = GROUP_LIMIT_FILE.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def rank_memory_bytes(machine: Machine, ranks: int) -> int | None:
    """What each of several ranks has: a GPU of its own, or its part of the host."""
    found = memory_bytes(machine)
    return found if found is None or machine.device == "cuda" else found // ranks

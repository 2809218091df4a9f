"""The hardware of this machine, and the facts on each kind of device, without torch (`engine/device` has the calls).

NVML describes GPUs, package metadata the torch build.
"""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Literal

from dilabench.errors import EnvironmentNotReady
from dilabench.validation import Model, content_hash
from dilabench.workload.spec import AUTO_TOKENS, DType

DeviceClass = Literal["cpu", "older", "sm80", "sm90", "accelerator"]

# To import torch takes seconds, from a cold disk tens.
PROBE_TIMEOUT_S = 120.0
CXX_COMPILERS = ("c++", "g++", "clang++")
# The control groups of this process, and where their files are.
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
NO_LIMIT = 2**60


# The default size of a suite's workloads: for a processor, or large enough to fill a data-centre GPU.
Size = Literal["small", "large"]
# In descriptors (`Capabilities.devices`), any device that torch.accelerator knows besides CUDA.
ACCELERATOR: Final = "accelerator"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A kind of device: `name` as torch spells it, `word` for it in the descriptors of what runs on it.

    `dtypes`: the preferred one from each compute capability on (0 for what has none), highest first. `tuned`: dilabench
    has kernels for it. `own_memory`: its memory is its own, and each rank has such a device for itself.
    `holds_float64`: it computes in float64, so that verification runs on it. `margin`, `precision`: of comparisons, and
    of an interval to stop sampling at, relative. `session_spread`: assumed sd between sessions of identical code, in
    log units. `sampling_s`: longest sampling of a case. `warm_up_s`: shortest and longest warm-up. `min_timeout_s`:
    time for any command. `above_peak`: times its measured peak that a call may seem to reach. `affordable_flops`: of a
    call that verification may add. `matmul_size`, `wide_matmul_size` (of float32 and float64), `copy_bytes`: of the
    measurement of peaks.
    """

    name: str
    word: str
    dtypes: tuple[tuple[int, DType], ...] = ((0, "float32"),)
    tuned: bool = True
    size: Size
    own_memory: bool
    holds_float64: bool = True
    margin: float
    session_spread: float
    precision: float
    sampling_s: float
    warm_up_s: tuple[float, float]
    min_timeout_s: float
    above_peak: float
    affordable_flops: float
    matmul_size: int
    wide_matmul_size: int
    copy_bytes: int

    @property
    def warning(self) -> str | None:
        """The note of a run on a device without dilabench's kernels; None on others."""
        slow = f"no kernel of dilabench is tuned for {self.name}: torch's own kernels run, timed by the host's clock"
        return None if self.tuned else slow

    def preferred_dtype(self, compute_capability: int) -> DType:
        """The dtype that `auto` means on such a device."""
        for least, dtype in self.dtypes:
            if compute_capability >= least:
                return dtype
        raise ValueError(f"compute capability {compute_capability} is below 0")


CPU = DeviceFacts(
    name="cpu",
    word="cpu",
    size="small",
    own_memory=False,
    margin=0.02,
    session_spread=0.05,
    precision=0.02,
    sampling_s=2.0,
    warm_up_s=(0.0, 0.5),
    min_timeout_s=20.0,
    above_peak=1.5,
    affordable_flops=5e10,  # About a second of two cores.
    matmul_size=1024,
    wide_matmul_size=1024,
    copy_bytes=64 << 20,
)
CUDA = DeviceFacts(
    name="cuda",
    word="cuda",
    dtypes=((80, "bfloat16"), (70, "float16"), (0, "float32")),
    size="large",
    own_memory=True,
    margin=0.03,
    session_spread=0.02,
    precision=0.01,
    sampling_s=3.0,
    warm_up_s=(0.3, 5.0),
    # A first call may compile: FlexAttention and CuTe kernels were seen to take up to half a minute.
    min_timeout_s=60.0,
    above_peak=1.1,
    affordable_flops=4e15,  # About ten seconds.
    matmul_size=8192,
    # It multiplies float64, and float32 without tensor cores, far slower; a smaller matrix suffices.
    wide_matmul_size=4096,
    copy_bytes=1 << 30,
)
# Untested devices: times come from the host's clock, with the margins of a processor.
_OTHER = replace(
    CPU,
    name=ACCELERATOR,
    word=ACCELERATOR,
    tuned=False,
    own_memory=True,
    holds_float64=False,
    warm_up_s=CUDA.warm_up_s,
    min_timeout_s=CUDA.min_timeout_s,
    matmul_size=4096,
    wide_matmul_size=4096,
    copy_bytes=256 << 20,
)
TUNED = (CPU, CUDA)
WORDS = frozenset({CPU.word, CUDA.word, ACCELERATOR})


def device_named(name: str) -> DeviceFacts:
    """The facts of 'cpu', 'cuda:1' or 'mps'; an unknown name has the facts of an untuned accelerator."""
    kind = name.partition(":")[0]
    for device in TUNED:
        if device.name == kind:
            return device
    return replace(_OTHER, name=kind)


class GpuInfo(Model):
    """One GPU as NVML shows it; None if the driver does not report it."""

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
    """The device that a run will use by its name in torch, the GPUs, and why CUDA is not used, if so.

    Derived: `facts` of this kind of device; `used_gpus`, the GPUs that a run can use, empty on devices other than CUDA;
    `compute_capability` of the first GPU, 90 for 9.0 (0 without one); `device_class`, the key of the backends'
    priorities ('sm90': sm_90 and newer, 'older': below sm_80); `auto_dtype` (catalog.md §2);
    `auto_tokens` of a call whose batch is `auto`: enough to fill a GPU, while a CPU computes one sequence at a time.
    """

    device: str
    gpus: tuple[GpuInfo, ...] = ()
    no_cuda: str | None = None
    facts: DeviceFacts = field(init=False, repr=False, compare=False)
    used_gpus: tuple[GpuInfo, ...] = field(init=False, repr=False, compare=False)
    compute_capability: int = field(init=False, repr=False, compare=False)
    device_class: DeviceClass = field(init=False, repr=False, compare=False)
    auto_dtype: DType = field(init=False, repr=False, compare=False)
    auto_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the facts."""
        facts = device_named(self.device)
        gpus = self.gpus if facts is CUDA else ()
        capability = int((gpus[0].compute_capability or "0").replace(".", "")) if gpus else 0
        on_cuda = "sm90" if capability >= 90 else "sm80" if capability >= 80 else "older"
        for name, value in (
            ("facts", facts),
            ("used_gpus", gpus),
            ("compute_capability", capability),
            ("device_class", "cpu" if facts is CPU else on_cuda if facts is CUDA else ACCELERATOR),
            ("auto_dtype", facts.preferred_dtype(capability)),
            ("auto_tokens", AUTO_TOKENS if facts.size == "large" else 1),
        ):
            object.__setattr__(self, name, value)


def detect(device: str = "auto") -> Machine:
    """The machine as a run with `device` sees it: 'auto' (CUDA, else the CPU), 'cpu', 'cuda', or the name of another
    device that `torch.accelerator` finds here.

    Raises EnvironmentNotReady for a device that is requested by name and cannot be used.
    """
    if device not in ("auto", *(tuned.name for tuned in TUNED)):
        return _with_accelerator(device)
    installed, gpus = _gpus()
    no_cuda = _why_no_cuda(installed, gpus)
    if device == "cuda" and no_cuda:
        raise EnvironmentNotReady(f"device 'cuda' cannot be used: {no_cuda}; use --device cpu or auto")
    kind = CPU.name if device == CPU.name or no_cuda else CUDA.name
    return Machine(device=kind, gpus=gpus, no_cuda="device cpu was requested" if device == "cpu" else no_cuda)


def _with_accelerator(device: str) -> Machine:
    """The machine with a device that is neither the CPU nor CUDA's."""
    if device != accelerator():
        usable = [CPU.name, *([] if _why_no_cuda(*_gpus()) else [CUDA.name]), *filter(None, [accelerator()])]
        names = ", ".join(dict.fromkeys(usable))
        raise EnvironmentNotReady(f"device {device!r} is not on this machine; use --device auto or one of: {names}")
    return Machine(device=device, no_cuda=f"device {device} was requested")


def accelerator() -> str | None:
    """The name of the device that `torch.accelerator` finds here ('mps', 'xpu', 'cuda'), None without one.

    If torch is not loaded, another process loads it, because this one may have to stay without.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return _accelerator_by_process()
    found = getattr(torch, "accelerator", None)
    return str(found.current_accelerator().type) if found is not None and found.is_available() else None


def python_command(*arguments: str) -> list[str]:
    """A command that runs this Python without the working folder on its path of modules."""
    return [sys.executable, "-P", *arguments]


def child_environment(**changes: str) -> dict[str, str]:
    """Variables for a `python_command`: this process's with `changes`; it finds the same modules."""
    path = dict.fromkeys((*filter(None, sys.path), str(Path(__file__).resolve().parents[1])))
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path), **changes}


@functools.cache
def _accelerator_by_process() -> str | None:
    code = "import torch; from dilabench.machine import accelerator; print('accelerator', accelerator() or '')"
    asked, variables = python_command("-c", code), child_environment()
    try:
        done = subprocess.run(
            asked, env=variables, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    name = re.search(r"^accelerator (\w+)$", done.stdout, re.MULTILINE)
    return name[1] if name else None


def cxx_compiler() -> str | None:
    """Path of the first of $CXX and CXX_COMPILERS that is there and compiles C++17 with its standard library."""
    return _first_working(os.environ.get("CXX"), os.environ.get("PATH"))


@functools.cache
def _first_working(named: str | None, _path: str | None) -> str | None:
    found = map(shutil.which, filter(None, (named, *CXX_COMPILERS)))
    return next((path for path in found if path and _compiles_cxx(path)), None)


def _compiles_cxx(compiler: str) -> bool:
    """A command with this name may be a stub that says what to install, only preprocess, or lack headers."""
    compiling = [compiler, "-std=c++17", "-S", "-o", "-", "-x", "c++", "-"]
    try:
        done = subprocess.run(compiling, input=b"#include <vector>", capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def cpuinfo() -> str:
    """/proc/cpuinfo; empty if there is none."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def multiplies_bfloat16_tiles() -> bool:
    """Whether the processor has tile registers (AMX), which multiply bfloat16 several times as fast."""
    return "amx_bf16" in cpuinfo()


def _gpus() -> tuple[tuple[GpuInfo, ...], tuple[GpuInfo, ...]]:
    """The GPUs that NVML shows, and the subset that CUDA will see."""
    installed = _nvml_gpus()
    return installed, _visible(installed)


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
    if machine.facts.own_memory:
        return machine.gpus[0].memory_bytes if machine.gpus else None
    import psutil

    total: int = psutil.virtual_memory().total
    return min(total, group_limits().memory_bytes or total)


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The limits of control groups on this process: memory, and processors as a share of time; None without a limit."""

    memory_bytes: int | None = None
    cpus: float | None = None


def group_limits(own: Path | None = None, root: Path | None = None) -> GroupLimits:
    """The smallest limits along the path of this process's control groups, of version 1 and 2.

    `own`: a file as /proc/self/cgroup; `root`: a tree as /sys/fs/cgroup. Other values than numbers are no limit.
    """
    memory: list[int] = []
    cpus: list[float] = []
    for folder in group_folders(own, root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            memory += _numbers(folder / name, 1)
        quota_and_period = [*_numbers(folder / "cpu.cfs_quota_us", 1), *_numbers(folder / "cpu.cfs_period_us", 1)]
        for pair in (_numbers(folder / "cpu.max", 2), quota_and_period):
            cpus += [pair[0] / pair[1]] if len(pair) == 2 else []
    return GroupLimits(min(memory, default=None), min(cpus, default=None))


def group_folders(own: Path | None = None, root: Path | None = None) -> Iterator[Path]:
    """The folders of each group and its ancestors, from the root: a container may see its own group there."""
    try:
        lines = (own or OWN_GROUPS).read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in ("::/", ":cpu:/", ":memory:/", *lines):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        parts = [] if ".." in path else [part for part in path.split("/") if part]
        # Version 2 is mounted there, or in `unified`; version 1 in folders named after its controllers.
        for mount in (controllers, *controllers.split(",")) if controllers else (".", "unified"):
            yield from accumulate(parts, Path.joinpath, initial=(root or GROUPS) / mount)


def _numbers(path: Path, count: int) -> list[int]:
    """The positive numbers that a file consists of; none if it holds anything else, as 'max' or -1 for no limit."""
    try:
        words = path.read_bytes()[:100].decode(errors="replace").split()
    except OSError:
        return []
    found = [int(word) for word in words if re.fullmatch("[1-9][0-9]{0,18}", word)]
    # Version 1 has a number of nineteen digits for no limit.
    return found if len(found) == len(words) == count and max(found) < NO_LIMIT else []


def rank_memory_bytes(machine: Machine, ranks: int) -> int | None:
    """The resources of each of several ranks: a separate GPU, or its part of the host."""
    found = memory_bytes(machine)
    return found if found is None or machine.facts.own_memory else found // ranks

"""The state of the machine that bears on times, read from psutil, /sys and NVML. No torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from dilabench.machine import Machine

GOVERNOR_FILE = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
TURBO_OFF_FILE = Path("/sys/devices/system/cpu/intel_pstate/no_turbo")
CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The state of one GPU; None where the driver does not report it."""

    name: str
    processes: int = 0
    utilization_percent: int | None = None
    temperature_c: int | None = None
    persistence: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The state of the machine; None where it does not report a value."""

    cpus: int
    usable_cpus: int
    load_1m: float
    quota_cpus: float | None = None
    governor: str | None = None
    turbo: bool | None = None
    available_bytes: int | None = None
    swap_used_bytes: int = 0
    on_battery: bool = False
    thread_variables: tuple[str, ...] = ()
    gpus: tuple[GpuReading, ...] = ()


def read(machine: Machine) -> Reading:
    """The state of the machine now."""
    import psutil

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    turbo_off = _text(TURBO_OFF_FILE)
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Reading(
        cpus=psutil.cpu_count() or 1,
        usable_cpus=len(affinity),
        load_1m=psutil.getloadavg()[0],
        quota_cpus=_quota(_text(CPU_QUOTA_FILE)),
        governor=_text(GOVERNOR_FILE),
        turbo=None if turbo_off is None else turbo_off == "0",
        available_bytes=psutil.virtual_memory().available,
        swap_used_bytes=psutil.swap_memory().used,
        on_battery=bool(battery and not battery.power_plugged),
        thread_variables=tuple(name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name)),
        gpus=_gpus() if machine.gpus else (),
    )


def _quota(text: str | None) -> float | None:
    """cpu.max of control groups v2: 'max 100000' or '150000 100000'."""
    if text is None or text.startswith("max"):
        return None
    quota, period = text.split()
    return int(quota) / int(period)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _gpus() -> tuple[GpuReading, ...]:
    import pynvml

    pynvml.nvmlInit()
    try:
        return tuple(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> GpuReading:
    import pynvml

    def ask(question: str, *arguments: object) -> object:
        try:
            return getattr(pynvml, question)(handle, *arguments)
        except pynvml.NVMLError:
            return None

    name, processes = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetComputeRunningProcesses")
    utilization, persistence = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPersistenceMode")
    temperature = ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
    return GpuReading(
        name=name.decode() if isinstance(name, bytes) else str(name),
        processes=len(processes) if isinstance(processes, list) else 0,
        utilization_percent=getattr(utilization, "gpu", None),
        temperature_c=temperature if isinstance(temperature, int) else None,
        persistence=None if persistence is None else bool(persistence),
    )

"""The machine state that affects times, read from psutil, /sys and NVML, as notes with advice. No torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dilabench.machine import Machine, group_limits
from dilabench.metadata import (
    AFFINITY,
    BATTERY,
    CPU_QUOTA,
    GOVERNOR,
    GPU_BUSY,
    GPU_HOT,
    GPU_PERSISTENCE_OFF,
    GPU_SHARED,
    LOAD,
    LOW_MEMORY,
    MEMORY_LIMIT,
    NOTES,
    SWAP,
    THREAD_VARIABLES,
    TURBO,
)
from dilabench.record import Note
from dilabench.units import format_bytes

GOVERNOR_FILE = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
TURBO_OFF_FILE = Path("/sys/devices/system/cpu/intel_pstate/no_turbo")
BUSY_SHARE = 0.1
LOW_MEMORY_BYTES = 2 * 2**30
HOT_GPU_C = 80
SWAP_USED_BYTES = 2**28
BUSY_GPU_PERCENT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """The state of one GPU; None if the driver does not report it."""

    name: str
    processes: int = 0
    utilization_percent: int | None = None
    temperature_c: int | None = None
    persistence: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """The state of the machine; None if it does not report a value."""

    cpus: int
    usable_cpus: int
    load_1m: float
    quota_cpus: float | None = None
    group_bytes: int | None = None
    total_bytes: int | None = None
    governor: str | None = None
    turbo: bool | None = None
    available_bytes: int | None = None
    swap_used_bytes: int = 0
    on_battery: bool = False
    thread_variables: tuple[str, ...] = ()
    gpus: tuple[GpuState, ...] = ()


def read(machine: Machine) -> MachineState:
    """The state of the machine now."""
    import psutil

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    turbo_off = _text(TURBO_OFF_FILE)
    limits = group_limits()
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return MachineState(
        cpus=psutil.cpu_count() or 1,
        usable_cpus=len(affinity),
        load_1m=psutil.getloadavg()[0],
        quota_cpus=limits.cpus,
        group_bytes=limits.memory_bytes,
        total_bytes=psutil.virtual_memory().total,
        governor=_text(GOVERNOR_FILE),
        turbo=None if turbo_off is None else turbo_off == "0",
        available_bytes=psutil.virtual_memory().available,
        swap_used_bytes=psutil.swap_memory().used,
        on_battery=bool(battery and not battery.power_plugged),
        thread_variables=tuple(name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name)),
        gpus=_gpus() if machine.gpus else (),
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _gpus() -> tuple[GpuState, ...]:
    import pynvml

    pynvml.nvmlInit()
    try:
        return tuple(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> GpuState:
    import pynvml

    def ask(question: str, *arguments: object) -> object:
        try:
            return getattr(pynvml, question)(handle, *arguments)
        except pynvml.NVMLError:
            return None

    name, processes = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetComputeRunningProcesses")
    utilization, persistence = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPersistenceMode")
    temperature = ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
    return GpuState(
        name=name.decode() if isinstance(name, bytes) else str(name),
        processes=len(processes) if isinstance(processes, list) else 0,
        utilization_percent=getattr(utilization, "gpu", None),
        temperature_c=temperature if isinstance(temperature, int) else None,
        persistence=None if persistence is None else bool(persistence),
    )


def notes_at_start(state: MachineState) -> tuple[Note, ...]:
    """The notes at the start of a run: the load by other processes, and the limits of the control group."""
    return tuple(note for note in notes(state) if NOTES[note.code].at_start)


def notes(state: MachineState) -> tuple[Note, ...]:
    """The causes of unsteady times here, worst first."""
    return (*_gpu_notes(state), *_load_notes(state), *_cpu_notes(state), *_memory_notes(state))


def _gpu_notes(state: MachineState) -> Iterator[Note]:
    for index, gpu in enumerate(state.gpus):
        who = f"GPU {index} ({gpu.name})"
        if gpu.processes:
            yield GPU_SHARED.note(
                f"{who} is used by {gpu.processes} other processes",
                observed=gpu.processes,
                threshold=0,
                hint="end them or choose another GPU with CUDA_VISIBLE_DEVICES",
            )
        elif gpu.utilization_percent is not None and gpu.utilization_percent > BUSY_GPU_PERCENT:
            yield GPU_BUSY.note(
                f"{who} is busy",
                observed=gpu.utilization_percent,
                threshold=BUSY_GPU_PERCENT,
                hint="wait until it is idle; the process may be one that this user cannot see",
            )
        if gpu.temperature_c is not None and gpu.temperature_c >= HOT_GPU_C:
            yield GPU_HOT.note(
                f"{who} is hot before anything has run and may slow down",
                observed=gpu.temperature_c,
                threshold=HOT_GPU_C,
                hint="let it cool down",
            )
        if gpu.persistence is False:
            yield GPU_PERSISTENCE_OFF.note(
                f"{who} has persistence mode off, so the driver may unload between processes",
                hint="nvidia-smi -pm 1 (needs root)",
            )


def _load_notes(state: MachineState) -> Iterator[Note]:
    cores = min(state.usable_cpus, state.quota_cpus or state.usable_cpus)
    limit = max(0.5, BUSY_SHARE * cores)
    if state.load_1m > limit:
        yield LOAD.note(
            "other programs are using the processor",
            # More processes may wait than there are processors.
            observed=min(state.load_1m, float(cores)),
            threshold=limit,
            hint="end them, or expect wide intervals; rounds alternate between implementations, so ratios suffer less",
        )
    if state.on_battery:
        yield BATTERY.note("the machine runs on battery and saves power", hint="plug it in")


def _cpu_notes(state: MachineState) -> Iterator[Note]:
    if state.governor not in (None, "performance"):
        yield GOVERNOR.note(
            f"the frequency governor is {state.governor!r}, so clocks follow the load",
            hint="cpupower frequency-set -g performance (needs root)",
        )
    if state.turbo:
        yield TURBO.note(
            "turbo is on, so clocks depend on temperature",
            hint="for steadiness instead of speed: echo 1 > /sys/devices/system/cpu/intel_pstate/no_turbo (as root)",
        )
    if state.quota_cpus is not None and state.quota_cpus < state.usable_cpus:
        yield CPU_QUOTA.note(
            f"the control group allows {state.quota_cpus:g} of {state.usable_cpus} processors, "
            "so threads are stopped in mid-call when they use more",
            observed=state.quota_cpus,
            threshold=state.usable_cpus,
            hint=f"set OMP_NUM_THREADS={max(1, int(state.quota_cpus))} or raise the limit",
        )
    elif state.usable_cpus == state.cpus > 2:
        yield AFFINITY.note(
            f"the process may move between all {state.cpus} processors",
            hint=f"pin it, for example with taskset -c 0-{state.cpus // 2 - 1}",
        )
    if state.thread_variables:
        yield THREAD_VARIABLES.note(
            f"{', '.join(state.thread_variables)} set the number of threads",
            hint="unset them unless you mean it; records with other thread counts do not compare",
        )


def _memory_notes(state: MachineState) -> Iterator[Note]:
    if state.group_bytes is not None and state.total_bytes and state.group_bytes < state.total_bytes:
        yield MEMORY_LIMIT.note(
            f"the control group allows {format_bytes(state.group_bytes)} of {format_bytes(state.total_bytes)}, "
            "so the system ends a process that takes more",
            observed=state.group_bytes,
            threshold=state.total_bytes,
            hint="keep to lengths that `dilabench plan` says fit, or raise the limit",
        )
    if state.available_bytes is not None and state.available_bytes < LOW_MEMORY_BYTES:
        yield LOW_MEMORY.note(
            "little memory is free",
            observed=state.available_bytes,
            threshold=LOW_MEMORY_BYTES,
            hint="end other programs, or keep to short lengths",
        )
    if state.swap_used_bytes > SWAP_USED_BYTES:
        yield SWAP.note(
            "memory has been swapped out",
            observed=state.swap_used_bytes,
            threshold=SWAP_USED_BYTES,
            hint="end other programs; a call that touches swap is not measured but waited for",
        )

"""What makes a machine's times noisy or wrong, as notes with advice."""

from collections.abc import Iterator

from dilabench.cli.reading import Reading
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
    NOTES,
    SWAP,
    THREAD_VARIABLES,
    TURBO,
)
from dilabench.record import Note

BUSY_SHARE = 0.1
LOW_MEMORY_BYTES = 2 * 2**30
HOT_GPU_C = 80
SWAP_USED_BYTES = 2**28
BUSY_GPU_PERCENT = 5


def busy(reading: Reading) -> tuple[Note, ...]:
    """Those of the notes that something else works on this machine now."""
    return tuple(note for note in notes(reading) if NOTES[note.code].passing)


def notes(reading: Reading) -> tuple[Note, ...]:
    """What makes times unsteady here, worst first."""
    return (*_gpu_notes(reading), *_load_notes(reading), *_cpu_notes(reading), *_memory_notes(reading))


def _gpu_notes(reading: Reading) -> Iterator[Note]:
    for index, gpu in enumerate(reading.gpus):
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


def _load_notes(reading: Reading) -> Iterator[Note]:
    cores = min(reading.usable_cpus, reading.quota_cpus or reading.usable_cpus)
    limit = max(0.5, BUSY_SHARE * cores)
    if reading.load_1m > limit:
        yield LOAD.note(
            "other programs are using the processor",
            observed=reading.load_1m,
            threshold=limit,
            hint="end them, or expect wide intervals; rounds alternate between implementations, so ratios suffer less",
        )
    if reading.on_battery:
        yield BATTERY.note("the machine runs on battery and saves power", hint="plug it in")


def _cpu_notes(reading: Reading) -> Iterator[Note]:
    if reading.governor not in (None, "performance"):
        yield GOVERNOR.note(
            f"the frequency governor is {reading.governor!r}, so clocks follow the load",
            hint="cpupower frequency-set -g performance (needs root)",
        )
    if reading.turbo:
        yield TURBO.note(
            "turbo is on, so clocks depend on temperature",
            hint="for steadiness instead of speed: echo 1 > /sys/devices/system/cpu/intel_pstate/no_turbo (as root)",
        )
    if reading.quota_cpus is not None and reading.quota_cpus < reading.usable_cpus:
        yield CPU_QUOTA.note(
            f"the control group allows {reading.quota_cpus:g} of {reading.usable_cpus} processors, "
            "so threads are stopped in mid-call when they use more",
            observed=reading.quota_cpus,
            threshold=reading.usable_cpus,
            hint=f"set OMP_NUM_THREADS={max(1, int(reading.quota_cpus))} or raise the limit",
        )
    elif reading.usable_cpus == reading.cpus > 2:
        yield AFFINITY.note(
            f"the process may move between all {reading.cpus} processors",
            hint=f"pin it, for example with taskset -c 0-{reading.cpus // 2 - 1}",
        )
    if reading.thread_variables:
        yield THREAD_VARIABLES.note(
            f"{', '.join(reading.thread_variables)} set the number of threads",
            hint="unset them unless you mean it; records with other thread counts do not compare",
        )


def _memory_notes(reading: Reading) -> Iterator[Note]:
    if reading.available_bytes is not None and reading.available_bytes < LOW_MEMORY_BYTES:
        yield LOW_MEMORY.note(
            "little memory is free",
            observed=reading.available_bytes,
            threshold=LOW_MEMORY_BYTES,
            hint="end other programs, or keep to short lengths",
        )
    if reading.swap_used_bytes > SWAP_USED_BYTES:
        yield SWAP.note(
            "memory has been swapped out",
            observed=reading.swap_used_bytes,
            threshold=SWAP_USED_BYTES,
            hint="end other programs; a call that touches swap is not measured but waited for",
        )

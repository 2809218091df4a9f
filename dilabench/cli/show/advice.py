"""Advice for this machine, each with the command to run: shown by `doctor`, and by `plan` if memory is short.

The advice follows from the machine's hardware and packages, without a measurement.
"""

from collections.abc import Iterator

from dilabench.cli.show.availability import reasons_against
from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.units import format_bytes


def advice(machine: Machine, catalogue: Catalogue, memory_bytes: int | None) -> Iterator[str]:
    """Return the first steps on this machine, with commands."""
    if memory_bytes:
        yield f"what fits into {format_bytes(memory_bytes)}, before anything runs: dilabench plan"
    if machine.device == "cuda":
        yield (
            "out of memory though less is in use, when lengths vary: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True dilabench run ..."
        )
        if len(machine.gpus) > 1:
            count = len(machine.gpus)
            yield f"one sequence over all {count} GPUs: dilabench run ring --nproc {count}"
            yield "ranks that do not find each other, or are slow: NCCL_DEBUG=INFO dilabench run ring --nproc 2"
    else:
        yield "half precision is slow on most CPUs: dilabench run range --dtype float32"
        yield "ranks without GPUs, to try a ring: dilabench run ring --config tiny --nproc 2"
    for backend in catalogue.backends:
        if backend.install and reasons_against(backend, machine) and machine.facts.word in backend.supports.devices:
            yield f"{backend.summary}: {backend.install}"


def advice_on_shortage() -> Iterator[str]:
    """Return advice for a case that does not fit."""
    yield "if it does not fit: one sequence at a time (--batch-size 1), or more ranks (--nproc)"
    yield (
        "the longest sequence by real runs, also with recomputation and in chunks: "
        "dilabench run extreme --gradient-checkpointing --chunked --offload"
    )

"""`dilabench doctor`: what the machine is, and what makes its times noisy."""

import json
import os
import tempfile
from pathlib import Path

from dilabench.atomic_file import OTHER_CACHE, OTHER_FOLDER, cache_folder, compiled_folder, why_not_writable
from dilabench.cli.options import AsJson
from dilabench.cli.show.advice import advice
from dilabench.cli.show.availability import reasons_against
from dilabench.cli.terminal import WIDE, say, say_folded, standard_output
from dilabench.engine.device.lock import FOLDER_VARIABLE
from dilabench.kernels.cpu.compiled import why_unavailable
from dilabench.machine import Machine, detect, memory_bytes
from dilabench.metadata import note_text
from dilabench.plugins.manager import Found, discover
from dilabench.record import Environment
from dilabench.runs import DEFAULT_FOLDER
from dilabench.runs.machine_state import notes, read
from dilabench.store.archive import STORE_VARIABLE, store_root
from dilabench.units import format_bytes, output_width


def doctor(as_json: AsJson = False) -> None:
    """Show the machine, the packages, the usable components, and the causes of noisy times, with advice."""
    from dilabench.engine.device.environment import snapshot

    machine, found = detect(), discover()
    environment = snapshot(machine)
    warnings = notes(read(machine))
    tips = list(advice(machine, found.catalogue, memory_bytes(machine)))
    if as_json:
        report = {
            "device": machine.device,
            "no_cuda": machine.no_cuda,
            "environment": environment.model_dump(mode="json"),
            "notes": [note.model_dump(mode="json", exclude_none=True) for note in warnings],
            "advice": tips,
            "cache": {"folder": str(cache_folder()), "why_not": why_not_writable(cache_folder())},
            "folders": {
                name: {"folder": str(folder), "why_not": why_not_writable(folder)}
                for name, (folder, _) in _written().items()
            },
            "compiled_kernels": {"folder": str(compiled_folder()), "why_not": why_unavailable()},
            "broken_plugins": {problem.plugin: problem.why for problem in found.problems},
        }
        say(json.dumps(report, indent=2, ensure_ascii=False))
        return
    for name, value in _facts(machine, environment, found):
        say_folded(f"{name + ':':<12} {value}", " " * 13)
    for problem in found.problems:
        say(f"broken plug-in {problem.plugin}: {problem.why}")
    say(f"\nWhat makes times here noisy ({len(warnings)}):" if warnings else "\nNo source of noise found.")
    for note in warnings:
        say_folded(f"- {note_text(note)}", "  ")
    say("\nWhat to try here:")
    for tip in tips:
        say_folded(f"- {tip}", "  ")


def _written() -> dict[str, tuple[Path, str]]:
    """The folders that a run writes to, with how to choose another."""
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError:
        # No folder takes a file: the first one that Python tries stands for all.
        temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    return {
        "results": (DEFAULT_FOLDER, OTHER_FOLDER),
        "store": (store_root(), f"set {STORE_VARIABLE} to another folder"),
        "locks": (Path(os.environ.get(FOLDER_VARIABLE) or temporary), f"set {FOLDER_VARIABLE} to another folder"),
        "temporary": (temporary, "set TMPDIR to another folder"),
    }


def _facts(machine: Machine, environment: Environment, found: Found) -> list[tuple[str, str]]:
    cpu = environment.cpu
    memory = f", {format_bytes(cpu.memory_bytes)}" if cpu.memory_bytes else ""
    facts = [
        ("runs use", machine.device + (f" ({machine.no_cuda})" if machine.no_cuda else "")),
        ("dtype auto", machine.auto_dtype),
        ("CPU", f"{cpu.model}, {cpu.cores} cores, {cpu.threads} threads{memory}"),
    ]
    for gpu in environment.gpus:
        size = f", {format_bytes(gpu.memory_bytes)}" if gpu.memory_bytes else ""
        facts.append(("GPU", f"{gpu.name}, compute capability {gpu.compute_capability}, driver {gpu.driver}{size}"))
    facts += [
        ("system", environment.os + (", in a container" if environment.container else "")),
        ("Python", environment.python),
        ("packages", ", ".join(f"{name} {version}" for name, version in environment.packages.items())),
    ]
    unwritable, unavailable = why_not_writable(cache_folder()), why_unavailable()
    facts.append(("cache", f"{unwritable}; {OTHER_CACHE}" if unwritable else str(cache_folder())))
    for name, (folder, way_out) in _written().items():
        why_not = why_not_writable(folder)
        facts.append((name, f"{why_not}; {way_out}" if why_not else str(folder)))
    facts.append(("output", f"{standard_output().encoding}, {output_width(standard_output(), WIDE)} columns"))
    facts.append(("C++ kernels", f"unavailable: {unavailable}" if unavailable else f"loaded from {compiled_folder()}"))
    for kind, known in (("impls", found.catalogue.implementations), ("backends", found.catalogue.backends)):
        usable = [descriptor.name for descriptor in known if not reasons_against(descriptor, machine)]
        facts.append(
            (
                kind,
                f"{', '.join(usable)} ({len(usable)} of {len(known)}; `dilabench list {known.kind}s` says why)",
            )
        )
    if environment.git:
        facts.append(("git", environment.git.sha + (" with changes" if environment.git.dirty else "")))
    return facts

"""`dilabench plan`: memory by length, batch and implementation, traced without data, or compared with real runs."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from dilabench.cli import options as shared
from dilabench.cli.options import OldNames, backend_text, discovered, given, names
from dilabench.cli.run import options as own
from dilabench.cli.show.advice import advice_on_shortage
from dilabench.cli.terminal import Lines, print_table, say, say_folded
from dilabench.errors import ConfigError, ExitCode
from dilabench.machine import detect, memory_bytes, rank_memory_bytes
from dilabench.predict.memory import (
    SEVERAL,
    WITHIN,
    MemoryPlan,
    each_traced,
    longest_that_fits,
    plan_ahead,
    plan_memory,
    why_no_plan,
)
from dilabench.predict.time import plan_time
from dilabench.record import Failed, PlannedCase, Skipped
from dilabench.request import run_request
from dilabench.runs.execution import refuse_idle_run
from dilabench.runs.memory import Peak, peaks_of, planned_for_memory, verdict
from dilabench.suites.planner import Planner, expand, refuse_idle_fields
from dilabench.units import format_bytes, format_count, format_seconds, parse_bytes, parse_count, parse_duration

LENGTHS = (4096, 16384, 65536, 262144, 1048576)
# The cases that `--check` really computes.
LENGTHS_CHECKED = {"small": (1024, 4096), "large": (4096, 16384, 65536)}
PEAK_COLUMNS = ("traced", "measured", "traced/measured", "")
HEAD = ("implementation", "backend", "mode", "batch", "length")
COLUMNS = (*HEAD, "memory", "bytes/token", "inputs", "saved", "fits")
LONGEST_COLUMNS = ("implementation", "backend", "mode", "batch", "longest that fits")
TIME_COLUMNS = ("implementation", "backend", "workload", "mode", "memory", "fits", "time")
# A column with the usual value in every row is omitted.
USUAL = {"fits": "yes"}
NO_TRACE = "no trace"
NO = "NO"

Lengths = Annotated[
    list[str] | None,
    typer.Option(
        "--lengths", "--sequence-lengths", "--seq-length", "--seqlen", metavar="N...", help="Lengths: 4K,64K,1M."
    ),
    OldNames(["--seq-len", "--sequence-length"]),
]
BatchSizes = Annotated[
    list[str] | None,
    typer.Option("--batch-size", metavar="B...", help="Sequences per call: 1 or 1,2,4 (default 1)."),
    OldNames(["--batch"]),
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="BYTES", help="Available memory (default: this device's).")
]
Check = Annotated[
    bool, typer.Option("--check", help=f"Run each case that fits; exit code 5 if a peak is off by over {WITHIN:.0%}.")
]
Budget = Annotated[str | None, typer.Option("--budget", metavar="TIME", help="Time that --check may take: 60s, 5m.")]


def plan(
    suite: Annotated[
        str | None, typer.Argument(metavar="SUITE", help="Predict the cases of a suite: as run SUITE --plan.")
    ] = None,
    implementations: own.Implementations = None,
    backends: shared.Backends = None,
    config: shared.Configs = None,
    assignments: shared.Assignments = None,
    lengths: Lengths = None,
    batch_sizes: BatchSizes = None,
    query_len: shared.QueryLength = None,
    num_heads: shared.NumHeads = None,
    num_kv_heads: shared.NumKvHeads = None,
    head_dim: shared.HeadDim = None,
    dtype: shared.DTypeName = None,
    mode: shared.ModeName = None,
    memory: Memory = None,
    processes: own.Processes = None,
    device: shared.Device = None,
    check: Check = False,
    budget: Budget = None,
    as_json: shared.AsJson = False,
    strict_plugins: shared.StrictPlugins = False,
) -> None:
    """Predict the memory of each length, batch size and implementation, and the longest sequence that fits.

    With --nproc the figures are for the rank that needs most, against the memory of one rank. The longest sequence ends
    where a segment ends, if several such lengths fit.
    """
    found = discovered(strict_plugins)
    if budget is not None and not check:
        raise ConfigError(f"--budget {budget} limits what --check runs; add --check, or leave --budget out")
    budget_s = None if budget is None else parse_duration(budget)
    given_bytes = None if memory is None else parse_bytes(memory)
    counts = [parse_count(length, "length") for length in names(lengths)]
    workload = shared.workload_fields(None, None, num_heads, num_kv_heads, head_dim, dtype, mode, query_len)
    if suite is not None and (check or memory or batch_sizes):
        raise ConfigError(f"--check, --memory and --batch-size are for `plan` without a suite; leave {suite!r} out")
    request = run_request(
        found.catalogue,
        suite=suite or "plan",
        configs=config or (),
        assignments=assignments or (),
        workload=workload,
        run=given(
            implementations=names(implementations),
            backends=names(backends),
            device=device,
            lengths=counts,
            nproc=processes,
        ),
    )
    machine = detect(request.device)
    if suite is not None:
        planned = expand(found.catalogue, machine, request)
        show_predictions(planned, Planner(found.catalogue, machine, request), as_json)
        return
    planner = Planner(found.catalogue, machine, request)
    batches = [parse_count(size, "batch_size") for size in names(batch_sizes)] or [1]
    planned = planned_for_memory(planner, batches, LENGTHS_CHECKED[machine.facts.size] if check else LENGTHS)
    refuse_idle_fields(request, planned)
    plan_ahead([case.case for case in planned], machine.device, found.catalogue)
    capacity = rank_memory_bytes(machine, request.nproc) if given_bytes is None else given_bytes
    if check:
        peaks = peaks_of(planned, planner, capacity, budget_s)
        if as_json:
            measured = list(peaks)
            say(json.dumps([_as_data(peak.planned, planner, capacity) | peak.as_data() for peak in measured], indent=1))
        else:
            measured = show_peaks(peaks, HEAD, [_head(case) for case in planned], NO_TRACE)
        raise typer.Exit(verdict(measured))
    if as_json:
        say(json.dumps([_as_data(case, planner, capacity) for case in planned], indent=1))
    else:
        _show(planned, planner, capacity)
    known = any(_memory(case, planner) for case in planned)
    raise typer.Exit(ExitCode.OK if known else ExitCode.NOTHING_MEASURED)


def show_predictions(planned: Sequence[PlannedCase], planner: Planner, as_json: bool = False) -> None:
    """`run --plan`: memory and time of the cases of a suite, as predicted before anything runs.

    Raises NothingToMeasure if no case can run.
    """
    refuse_idle_run(planned, planner)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine = planner.machine
    capacity, total_s = memory_bytes(machine), 0.0
    if as_json:
        predictions = [
            _as_data(case, planner, rank_memory_bytes(machine, case.case.world_size))
            | {"seconds": plan_time(case.case, machine, cores).seconds if case.skip is None else None}
            for case in planned
        ]
        say(json.dumps(predictions, indent=1))
        return
    rows = []
    reasons: dict[str, dict[str, None]] = {}
    runnable = [case for case in planned if case.skip is None]
    for case in planned:
        if case.skip is not None:
            reasons.setdefault(case.skip.why, {}).setdefault(case.case.implementation)
    for case in runnable:
        time = plan_time(case.case, machine, cores)
        total_s += time.seconds
        memory = _memory(case, planner)
        needed = None if memory is None else memory.peak_bytes
        per_rank = f" a rank, {case.case.world_size} ranks" if case.case.world_size > 1 else ""
        rows.append(
            (
                *_names(case),
                case.case.workload.label(),
                case.case.workload.mode,
                NO_TRACE if needed is None else format_bytes(needed) + per_rank,
                _fits(needed, rank_memory_bytes(machine, case.case.world_size)),
                format_seconds(time.seconds),
            )
        )
    by_column = dict(zip(TIME_COLUMNS, zip(*rows, strict=True), strict=False))
    dull = {name for name, usual in USUAL.items() if set(by_column.get(name, ())) == {usual}}
    modes = set(by_column.get("mode", ()))
    dull |= {"mode"} if len(modes) == 1 else set()
    kept = [name for name in TIME_COLUMNS if name not in dull]
    lines = list(zip(*(by_column.get(name, ()) for name in kept), strict=True))
    print_table(f"mode {modes.pop()}" if "mode" in dull else None, kept, lines, right=("memory", "time"))
    for why, implementations in reasons.items():
        say_folded(f"not run: {', '.join(implementations)}: {why}", "  ")
    rates = sorted({plan_time(case.case, machine, cores).assumed_flops_per_s / 1e9 for case in runnable})
    assumed = ", ".join(f"{rate:.4g}" for rate in rates)
    duration = format_seconds(total_s)
    there = "unknown" if capacity is None else format_bytes(capacity)
    fits = f"each fits into {there}" if "fits" in dull else f"this machine has {there}"
    say_folded(
        f"Predicted, not measured; nothing was run. Memory is what tracing the code shows: {fits}. Time: one call of "
        f"each case at an assumed {assumed} GFLOP/s, {duration} in all; a run verifies each and calls "
        "it often."
    )
    say("* chosen by auto")


def show_peaks(
    peaks: Iterable[Peak], columns: Sequence[str], heads: Sequence[Sequence[str]], no_trace: str
) -> list[Peak]:
    """A line per case, as soon as it is known, and what it comes to. `heads` name the cases."""
    lines, shown = Lines((*columns, *PEAK_COLUMNS), heads), []
    for head, peak in zip(heads, peaks, strict=True):
        shown.append(peak)
        traced = no_trace if peak.traced is None else format_bytes(peak.traced)
        if peak.measured is not None:
            ratio = "-" if peak.ratio is None else f"{peak.ratio:.3f}"
            lines.print((*head, traced, format_bytes(peak.measured), ratio, "OFF" if peak.is_off else ""))
        else:
            lines.print((*head, traced, "-", "-", peak.why))
    ratios = [peak.ratio for peak in shown if peak.ratio is not None]
    counts = Counter(type(peak.outcome) for peak in shown)
    say(
        f"{len(ratios)} peaks traced and measured, {sum(peak.is_off for peak in shown)} of them off by more than "
        f"{WITHIN:.0%}, largest deviation {max((abs(ratio - 1) for ratio in ratios), default=0.0):.1%}; "
        f"{counts[Failed]} failed, {counts[Skipped]} skipped"
    )
    return shown


def _show(planned: Sequence[PlannedCase], planner: Planner, capacity: int | None) -> None:
    rows: list[tuple[str, ...]] = []
    skipped: dict[str, list[str]] = {}
    for case in planned:
        found, workload, head = _memory(case, planner), case.case.workload, _head(case)
        if found is None and case.skip is not None:
            skipped.setdefault(case.skip.why, []).append(case.case.implementation)
            continue
        if found is None:
            rows.append((*head, NO_TRACE, "-", "-", "-", "?"))
            why = why_no_plan(case.case, planner.machine.device, planner.catalogue)
            skipped.setdefault(why, []).append(case.case.implementation)
            continue
        parts = (found.inputs_bytes, found.saved_bytes)
        per_token = f"{found.peak_bytes * case.case.world_size / workload.positions:.0f}"
        fits = _fits(found.peak_bytes, capacity)
        rows.append((*head, format_bytes(found.peak_bytes), per_token, *map(format_bytes, parts), fits))
    print_table(None, COLUMNS, rows, right=COLUMNS[3:9])
    if any(row[-1] == NO for row in rows):
        for tip in advice_on_shortage():
            say_folded(f"- {tip}", "  ")
    for why, implementations in skipped.items():
        say_folded(f"no trace of {', '.join(dict.fromkeys(implementations))}: {why}", "  ")
    if capacity is None:
        return
    alike: dict[tuple[str, ...], PlannedCase] = {}
    for case in planned:
        key, traced = _head(case)[:-1], _memory(case, planner) is not None
        # The search starts from a length that has a trace, if there is one.
        if (traced or case.skip is None) and not case.case.workload.has_given_length:
            alike[key] = case if traced else alike.get(key, case)
    if not any(_memory(case, planner) for case in alike.values()):
        return
    device, catalogue = planner.machine.device, planner.catalogue
    lengths = each_traced(lambda case: longest_that_fits(case.case, device, capacity, catalogue), alike.values())
    shown = [
        (*key, f"unknown: {length}" if isinstance(length, str) else f"{length:_}")
        for key, length in zip(alike, lengths, strict=True)
    ]
    say()
    ranks = max(case.case.world_size for case in planned)
    title = f"The longest sequence that fits into {format_bytes(capacity)}" + (
        f" on each of {ranks} ranks" if ranks > 1 else ""
    )
    print_table(title, LONGEST_COLUMNS, shown, right=("batch",))
    say_folded(
        "Traced without data, not measured; `dilabench run extreme` finds the longest sequence by real runs. Lengths "
        f"that cut segments need more memory: if at least {SEVERAL} others fit, the longest of those is shown."
    )


def _as_data(case: PlannedCase, planner: Planner, capacity: int | None) -> dict[str, Any]:
    found, workload = _memory(case, planner), case.case.workload
    return {
        "implementation": case.case.implementation,
        "backend": case.case.backend,
        "mode": workload.mode,
        "dtype": workload.dtype,
        "batch_size": workload.batch_size,
        "seq_len": workload.seq_len,
        "predicted_peak_bytes": found and found.peak_bytes,
        "inputs_bytes": found and found.inputs_bytes,
        "saved_bytes": found and found.saved_bytes,
        "ranks": case.case.world_size,
        "capacity_bytes": capacity,
        "fits": None if found is None or capacity is None else found.peak_bytes <= capacity,
        "skip": case.skip and case.skip.why,
        "skip_code": case.skip and case.skip.code,
    }


def _names(case: PlannedCase) -> tuple[str, str]:
    return case.case.implementation, backend_text(case)


def _head(case: PlannedCase) -> tuple[str, ...]:
    workload = case.case.workload
    return (*_names(case), workload.mode, str(workload.batch_size), format_count(workload.seq_len))


def _memory(case: PlannedCase, planner: Planner) -> MemoryPlan | None:
    """The peak of the rank that needs most; None without a trace."""
    return plan_memory(case.case, planner.machine.device, planner.catalogue)


def _fits(needed: int | None, capacity: int | None) -> str:
    if needed is None or capacity is None:
        return "?"
    return "yes" if needed <= capacity else NO

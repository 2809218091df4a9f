"""`dilabench verify`: check outputs and gradients, without timing."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from dilabench.cli import options as shared
from dilabench.cli.options import backend_text, discovered, given, names
from dilabench.cli.run.options import Implementations, Lengths, Processes
from dilabench.cli.run.progress_bar import CheckedLines
from dilabench.cli.terminal import ROW_INDENT, say, say_folded
from dilabench.cli.verify.everything import SIGNS, Marks
from dilabench.engine.outcomes import Outcome, outcomes_of, said_of
from dilabench.errors import ExitCode, exit_code_for
from dilabench.machine import detect
from dilabench.record import PlannedCase
from dilabench.request import run_request
from dilabench.runs.verification import Trial, trials_of, verified_cases
from dilabench.suites.planner import Planner, refuse_idle_fields
from dilabench.units import parse_count

MODES = {"both": "forward and backward"}
# As wide as 'failed'.
SIGN_WIDTH = 6


def verify(
    implementations: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Implementations; all by default.")
    ] = None,
    named: Implementations = None,
    backends: shared.Backends = None,
    config: shared.Configs = None,
    assignments: shared.Assignments = None,
    lengths: Lengths = None,
    batch_size: shared.BatchSize = None,
    seq_length: shared.SeqLength = None,
    query_len: shared.QueryLength = None,
    num_heads: shared.NumHeads = None,
    num_kv_heads: shared.NumKvHeads = None,
    head_dim: shared.HeadDim = None,
    dtype: shared.DTypeName = None,
    mode: shared.ModeName = None,
    processes: Processes = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of the inputs.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every implementation, backend, dtype and family, as a table of marks.")
    ] = False,
    device: shared.Device = None,
    as_json: shared.AsJson = False,
    strict_plugins: shared.StrictPlugins = False,
) -> None:
    """Check outputs and gradients against the oracle. Exit code 5 when any is wrong, 4 when a check itself fails."""
    found = discovered(strict_plugins)
    workload = shared.workload_fields(batch_size, seq_length, num_heads, num_kv_heads, head_dim, dtype, mode, query_len)
    request = run_request(
        found.catalogue,
        suite="verify",
        configs=config or (),
        assignments=assignments or (),
        workload=workload,
        run=given(
            implementations=names(implementations, named),
            backends=names(backends),
            lengths=[parse_count(length, "length") for length in names(lengths)],
            device=device,
            nproc=processes,
            seed=seed,
        ),
    )
    machine = detect(request.device)
    planner = Planner(found.catalogue, machine, request)
    trials = trials_of(planner) if everything else ()
    planned = tuple(trial.planned for trial in trials) if everything else verified_cases(planner)
    refuse_idle_fields(request, planned)
    outcomes = outcomes_of(planned, found.catalogue, machine, request.seed)
    if as_json:
        code, text = _as_json(planned, outcomes)
        say(text)
    else:
        shown = _marks(trials, outcomes) if everything else _lines(planned, outcomes)
        code, text = _verdict(shown)
        say(text)
    raise typer.Exit(code)


def _lines(planned: Sequence[PlannedCase], outcomes: Iterable[Outcome]) -> list[Outcome]:
    """A line per checked case under its workload, as soon as it is known; at the end what was skipped, by reason."""
    names_of = [_names(plan) for plan in planned]
    widths = [max(map(len, column)) for column in zip(*(names[:2] for names in names_of), strict=True)]
    skipped: dict[str, dict[str, None]] = {}
    shown: list[Outcome] = []
    heading = ""
    for (*columns, workload, mode), outcome in zip(names_of, outcomes, strict=True):
        shown.append(outcome)
        result, details = said_of(outcome)
        if result == "skipped":
            skipped.setdefault(columns[0], {}).update(dict.fromkeys(details.split("; ")))
            continue
        if heading != (heading := f"{workload} · {MODES.get(mode, mode)}"):
            say(heading)
        cells = [cell.ljust(width) for cell, width in zip(columns, widths, strict=True)]
        first, *others = details.split("\n")
        say_folded("  ".join(["", SIGNS[result].ljust(SIGN_WIDTH), *cells, first]), ROW_INDENT)
        for line in others:
            say_folded(f"{ROW_INDENT}{line}", ROW_INDENT + ROW_INDENT)
    alike: dict[str, list[str]] = {}
    for name, reasons in skipped.items():
        alike.setdefault("; ".join(reasons), []).append(name)
    for why, several in alike.items():
        say_folded(f"skipped {', '.join(several)}: {why}", "  ")
    if any(backend.endswith("*") for _, backend, *_ in names_of):
        say("* chosen by auto")
    return shown


def _as_json(planned: Sequence[PlannedCase], outcomes: Iterable[Outcome]) -> tuple[ExitCode, str]:
    """Every case with what its checks found, for programs; on stderr how far it is."""
    outcomes_of_cases, silent = [], CheckedLines(len(planned))
    for plan, outcome in zip(planned, outcomes, strict=True):
        outcomes_of_cases.append((plan.case, outcome))
        silent.checked(len(outcomes_of_cases), " ".join(_names(plan)))
    code, _ = _verdict([outcome for _, outcome in outcomes_of_cases])
    cases = [
        {
            **case.model_dump(mode="json"),
            "case_id": case.case_id,
            "result": said_of(outcome)[0],
            "details": outcome.model_dump(mode="json"),
        }
        for case, outcome in outcomes_of_cases
    ]
    return code, json.dumps({"exit_code": int(code), "cases": cases}, indent=1, ensure_ascii=False)


def _marks(trials: Sequence[Trial], outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The table of `--all`: a line per implementation, backend and dtype, a mark per family."""
    table, silent = Marks(trials), CheckedLines(len(trials))
    shown: list[Outcome] = []
    say(f"{len(trials)} checks; a line appears when all families of an implementation and dtype are known", err=True)
    for trial, outcome in zip(trials, outcomes, strict=True):
        shown.append(outcome)
        if table.add(trial, *said_of(outcome)):
            silent.spoke()
        else:
            silent.checked(len(shown), f"{' '.join(trial.line)}, {trial.family}")
    table.close()
    return shown


def _names(plan: PlannedCase) -> tuple[str, ...]:
    case = plan.case
    return (
        case.implementation,
        backend_text(plan),
        f"{case.workload.label()} · {case.workload.pattern.label()}",
        case.workload.mode,
    )


def _verdict(outcomes: Sequence[Outcome]) -> tuple[ExitCode, str]:
    """How it ended, and the line that says so."""
    # A case that raised or hung has no wrong output.
    counts = Counter(said_of(outcome)[0] for outcome in outcomes)
    crashed = f"{counts['failed']} failed, " if counts["failed"] else ""
    text = f"{counts['right']} right, {counts['wrong']} wrong, {crashed}{counts['skipped']} skipped"
    return exit_code_for(wrong=counts["wrong"] > 0, failed=counts["failed"] > 0, nothing=not counts["right"]), text

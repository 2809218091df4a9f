"""`dilabench tune`: measure what is fastest here, and keep it for `-i auto`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dilabench.cli import options as shared
from dilabench.cli.options import discovered, given, names
from dilabench.cli.run import options as own
from dilabench.cli.terminal import say
from dilabench.request import ALL, read_budget, run_request
from dilabench.runs import DEFAULT_FOLDER
from dilabench.units import counted, parse_count

TunePath = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write this file instead of the one for this machine."),
    shared.OUTPUT_DIR,
]


def tune(
    implementations: own.Implementations = None,
    backends: shared.Backends = None,
    config: shared.Configs = None,
    assignments: shared.Assignments = None,
    lengths: own.Lengths = None,
    batch_size: shared.BatchSize = None,
    seq_length: shared.SeqLength = None,
    num_heads: shared.NumHeads = None,
    num_kv_heads: shared.NumKvHeads = None,
    head_dim: shared.HeadDim = None,
    dtype: shared.DTypeName = None,
    mode: shared.ModeName = None,
    device: shared.Device = None,
    budget: own.Budget = None,
    output: TunePath = None,
    as_json: shared.AsJson = False,
    strict_plugins: shared.StrictPlugins = False,
) -> None:
    """Measure every implementation over every backend on the workloads, and keep the fastest of each for `-i auto`.

    Compiling and warming up are never part of a time. Later runs add to the file; a newer result replaces an older one.
    """
    from dilabench.choice.measured import check_tune_file, tune_path
    from dilabench.cli.run.output import terminal
    from dilabench.runs.execute import execute
    from dilabench.runs.execution import Execution
    from dilabench.suites.planner import plan_run
    from dilabench.suites.tuner import add_to_file

    if output is not None:
        # Else what was measured would take the place of what is no tune file.
        check_tune_file(output)
    found = discovered(strict_plugins)
    request = run_request(
        found.catalogue,
        suite=next(suite.name for suite in found.catalogue.suites if suite.tunes),
        configs=config or (),
        assignments=assignments or (),
        workload=shared.workload_fields(batch_size, seq_length, num_heads, num_kv_heads, head_dim, dtype, mode),
        run=given(
            implementations=names(implementations),
            backends=names(backends) or [ALL],
            lengths=[parse_count(length, "length") for length in names(lengths)],
            device=device,
        )
        | {"budget_s": budget and read_budget(budget)},
    )
    plan = plan_run(found, request)
    methods = tuple(case for case in plan.planned if case.role in ("plain", "method") and case.takes == "heads")
    execution = Execution.begin(replace(plan, planned=methods), DEFAULT_FOLDER, name="tune")
    formats = () if as_json else (found.catalogue.reporters.get("table"),)
    code = execute(execution, terminal(formats, plan.request.budget_s), formats)
    machine = plan.machine
    path = output or tune_path(machine)
    # A run that was interrupted before its first row leaves no folder.
    added = add_to_file(path, execution.folder.path, machine) if execution.folder.path.exists() else 0
    if as_json:
        tuned = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        say(json.dumps({"exit_code": int(code), "added": added, "path": str(path), **tuned}, indent=1))
    else:
        say(f"{counted(added, 'workload')} tuned in {path}")
    raise typer.Exit(code)

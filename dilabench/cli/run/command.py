"""`dilabench run`: measure a suite."""

import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilabench.cli import options as shared
from dilabench.cli.github import GithubSummary, require_github
from dilabench.cli.options import discovered, given, lengths_of, names
from dilabench.cli.run import options as own
from dilabench.cli.terminal import print_table, say, say_folded
from dilabench.errors import ConfigError, ExitCode, gravest
from dilabench.patterns.registry import kind_with_fields
from dilabench.record import PlannedCase
from dilabench.request import read_budget, run_request
from dilabench.runs import DEFAULT_FOLDER
from dilabench.runs.resume import recorded_request
from dilabench.store.run_files import folder_of_run
from dilabench.units import counted, format_bytes, parse_count
from dilabench.workload.spec import flops, tensor_bytes

if TYPE_CHECKING:
    from dilabench.engine.worker.nodes import Nodes

PATTERN_CACHE_ENTRIES = 64
POOL_BYTES = 2**30
TABLE = "table"
RANKS = "ranks"
# Left out first where the terminal is narrow; --json has them.
SPARE = ("tensors", "FLOPs", "pattern")
COLUMNS = ("#", "implementation", "backend", RANKS, "workload", "pattern", "mode", "FLOPs", "tensors", "runs")


def _list_configs(asked: bool) -> None:
    if asked:
        from dilabench.cli.show.list import Kind, list_names

        list_names(Kind.WORKLOADS)
        raise typer.Exit


ListConfigs = Annotated[
    bool,
    typer.Option("--list-configs", callback=_list_configs, is_eager=True, help="Show what --config takes and leave."),
]


def _as_it_was_asked_for(context: typer.Context, run: str | None) -> str | None:
    """A run goes on as it was asked for: the defaults of today are not for it."""
    if run is not None:
        context.default_map = None
    return run


Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        callback=_as_it_was_asked_for,
        is_eager=True,
        help="Go on with a run (its folder, file or id, or latest): cases without a row, and those that the budget "
        "left no time for. Other rows stand, failed ones too.",
    ),
]


def run(
    suite: own.SuiteName,
    implementations: own.Implementations = None,
    backends: shared.Backends = None,
    config: shared.Configs = None,
    assignments: shared.Assignments = None,
    lengths: own.Lengths = None,
    range_name: own.RangeName = None,
    custom_lengths: own.CustomLengths = None,
    batch_size: shared.BatchSize = None,
    seq_length: shared.SeqLength = None,
    num_heads: shared.NumHeads = None,
    num_kv_heads: shared.NumKvHeads = None,
    head_dim: shared.HeadDim = None,
    dtype: shared.DTypeName = None,
    mode: shared.ModeName = None,
    density: own.Density = None,
    sparsity: own.Sparsity = None,
    block_size: own.BlockSize = None,
    mask_file: own.MaskFile = None,
    max_seq_length: own.MaxSeqLength = None,
    memory_limit: own.MemoryLimit = None,
    gradient_checkpointing: own.GradientCheckpointing = None,
    chunked: own.Chunked = None,
    offload: own.Offload = None,
    tokens: own.Tokens = None,
    sharding: own.Sharding = None,
    timing: own.Timing = None,
    warmup_runs: own.WarmupRuns = None,
    timing_runs: own.TimingRuns = None,
    pattern_cache: own.PatternCache = None,
    memory_pool: own.MemoryPool = None,
    cuda_graph: own.CudaGraph = None,
    compile_calls: own.Compile = None,
    nproc: own.Processes = None,
    device: shared.Device = None,
    budget: own.Budget = None,
    seed: own.Seed = None,
    shard: own.ShardOption = None,
    dry_run: own.DryRun = False,
    plan: own.Plan = False,
    resume: Resume = None,
    sessions: own.Sessions = 1,
    output: own.Output = DEFAULT_FOLDER,
    formats: own.Formats = None,
    keep: own.KeepInStore = True,
    columns: shared.Columns = None,
    details: shared.Details = False,
    github_summary: GithubSummary = False,
    as_json: shared.AsJson = False,
    list_configs: ListConfigs = False,  # noqa: ARG001 - its callback has answered
    strict_plugins: shared.StrictPlugins = False,
) -> None:
    """Measure a suite: verify each case, time it, and leave run.json, report.md and report.html in a folder.

    --dry-run, --plan and --json print JSON together, too.
    """
    if sessions > 1 and resume is not None:
        raise ConfigError(f"--resume goes on with one run, --sessions {sessions} begins several; leave one out")
    if sessions > 1 and (as_json or output.suffix == ".json"):
        raise ConfigError(
            f"--sessions {sessions} makes several records, and there is place for one; leave --json or the .json file "
            "out: each run's folder has its run.json"
        )
    if github_summary:
        require_github()
    shared.require_one_format(as_json, names(formats))
    found = discovered(strict_plugins)
    workload = shared.workload_fields(batch_size, seq_length, num_heads, num_kv_heads, head_dim, dtype, mode)
    blocks = given(density=density, sparsity=sparsity, block_size=block_size, mask_file=mask_file and str(mask_file))
    workload |= {"pattern": kind_with_fields(blocks), **blocks} if blocks else {}
    settings = given(
        implementations=names(implementations),
        backends=names(backends),
        lengths=lengths_of(range_name, names(lengths), names(custom_lengths)),
        options=given(
            max_seq_length=max_seq_length and parse_count(max_seq_length, "max_seq_length"),
            memory_limit=memory_limit and parse_count(memory_limit, "memory_limit"),
            gradient_checkpointing=gradient_checkpointing,
            chunked=chunked,
            offload=offload,
            tokens=tokens and parse_count(tokens, "tokens"),
            sharding=sharding,
        ),
        timing=timing,
        warmup_runs=warmup_runs,
        timing_runs=timing_runs,
        pattern_cache_entries=None if pattern_cache is None else PATTERN_CACHE_ENTRIES * pattern_cache,
        buffer_pool_bytes=None if memory_pool is None else POOL_BYTES * memory_pool,
        cuda_graph=cuda_graph,
        compile=compile_calls,
        nproc=nproc,
        device=device,
        seed=seed,
        shard=shard,
    )
    if budget is not None:
        settings["budget_s"] = read_budget(budget)
    look = dry_run or plan
    reporters = names(formats) or ["json" if as_json else TABLE]
    options = {"details": details, "columns": shared.column_names(columns) if columns else []}
    resumed = None if resume is None else folder_of_run(resume, output_base(output))
    elsewhere = None if resume is None else _elsewhere(Path(resume), output)

    def work(nodes: "Nodes | None") -> ExitCode:
        catalogue = found.catalogue
        shown = tuple(catalogue.reporters.get(name) for name in reporters)
        earlier = None
        if resumed is None:
            request = run_request(
                catalogue,
                suite=suite,
                configs=config or (),
                assignments=assignments or (),
                workload=workload,
                run=settings,
            )
        else:
            beside = {"--config": config, "--set": assignments, f"-o {elsewhere}": elsewhere}
            fixed = {**workload, **settings, **given(**beside)}
            request, earlier = recorded_request(resumed, suite, fixed.keys() - {"budget_s"})
            request = request.model_copy(update={name: settings[name] for name in settings if name == "budget_s"})
        if not look:
            from dilabench.engine.worker.process import warm_server

            # The server that workers are forked from loads torch while this process loads and plans the rest.
            warm_server()
        # What times cases needs numpy, which --help should not wait for.
        from dilabench.suites.planner import plan_run

        planned = plan_run(found, request, nodes)
        if plan:
            from dilabench.cli.run.plan import show_predictions

            show_predictions(planned.planned, planned.planner(), as_json)
            return ExitCode.OK
        if dry_run:
            show_cases(planned.planned, as_json)
            if warning := planned.machine.facts.warning:
                say(warning, err=True)
            return ExitCode.OK
        from dilabench.cli.run.shown import show_run, together
        from dilabench.runs.execution import Execution

        _load_plots()
        runs: list[tuple[ExitCode, str]] = []
        for number in range(1, sessions + 1):
            if resumed is not None and earlier is not None:
                execution = Execution.resume(planned, resumed, earlier, lambda text: say(text, err=True), nodes)
            else:
                execution = Execution.begin(planned, output_base(output), nodes)
            if sessions > 1:
                say(f"session {number} of {sessions}", err=True)
            code = show_run(execution, shown, keep=keep, options=options, github_summary=github_summary)
            runs.append((code, str(execution.folder.path)))
            if output.suffix == ".json":
                execution.copy_record(output)
            if code is ExitCode.INTERRUPTED:
                break
        if len(runs) > 1:
            say(together([path for _, path in runs]), err=reporters != [TABLE])
        return gravest(code for code, _ in runs)

    if "RANK" not in os.environ:
        raise typer.Exit(work(None))
    from dilabench.engine.worker.nodes import on_ranks

    raise typer.Exit(on_ranks(work))


def _load_plots() -> None:
    """Load what draws the plots, which takes a while: before the run there is time, for workers load even more."""
    import_module("dilabench.report.plots.drawing")


def _elsewhere(run: Path, output: Path) -> Path | None:
    """Where the rest of a run that goes on should lie instead, if anywhere. Its own place is none, nor is a file that
    the record is copied to besides; of a run by its id, -o says where that is.
    """
    if not run.exists():
        return None
    places = (run, run.parent) if run.is_dir() else (run.parent, run.parent.parent)
    known = output == DEFAULT_FOLDER or output.suffix == ".json"
    return None if known or output.resolve() in [place.resolve() for place in places] else output


def output_base(output: Path) -> Path:
    """The folder that the run's own folder goes into; a path to a .json file stands for the folder it is in."""
    return output.parent if output.suffix == ".json" else output


def show_cases(planned: Sequence[PlannedCase], as_json: bool = False) -> None:
    """One line per case with its FLOPs, the bytes of its tensors, and why it would be skipped."""
    if as_json:
        say(json.dumps([_as_data(one) for one in planned], indent=1))
        return
    columns = [name for name in COLUMNS if name != RANKS or any(plan.case.world_size > 1 for plan in planned)]
    by_name = [dict(zip(COLUMNS, _cells(index, plan), strict=True)) for index, plan in enumerate(planned, 1)]
    cells = [tuple(row[name] for name in columns) for row in by_name]
    print_table(None, columns, cells, right=(RANKS, "FLOPs", "tensors"), spare=SPARE)
    reasons: dict[str, list[str]] = {}
    for index, plan in enumerate(planned, 1):
        if plan.skip is not None:
            reasons.setdefault(plan.skip.why, []).append(str(index))
    for why, rows in reasons.items():
        say_folded(f"not run, {', '.join(rows)}: {why}", "  ")
    skipped = sum(plan.skip is not None for plan in planned)
    total = sum(flops(plan.case.workload) for plan in planned if plan.skip is None)
    work = f"{total:.3g} FLOPs in one call of each"
    say_folded(f"{counted(len(planned), 'case')}, {skipped} of them skipped; {work}. Nothing was run (--dry-run).")


def _as_data(plan: PlannedCase) -> dict[str, Any]:
    case = plan.case
    return {
        **case.model_dump(mode="json"),
        "case_id": case.case_id,
        "role": plan.role,
        "flops": flops(case.workload),
        "tensor_bytes": sum(tensor_bytes(case.workload).values()),
        "skip": plan.skip and plan.skip.why,
        "skip_code": plan.skip and plan.skip.code,
    }


ANOTHER_FUNCTION = " (yardstick: another function)"


def _cells(index: int, plan: PlannedCase) -> tuple[str, ...]:
    from dilabench.report.columns import implementation_text

    case, workload = plan.case, plan.case.workload
    return (
        str(index),
        implementation_text(case),
        (case.backend or "-") + ("*" if plan.requested_backend == "auto" and case.backend else ""),
        str(case.world_size),
        workload.label(),
        workload.pattern.details(workload.shapes)
        + (" (yardstick: another function)" if plan.role == "yardstick" else ""),
        workload.mode,
        f"{flops(workload):.3g}",
        format_bytes(sum(tensor_bytes(workload).values())),
        "yes" if plan.skip is None else "no",
    )

"""`dilabench run`: measure a suite."""

import inspect
import json
import os
import types
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from dilabench.cli import options as shared
from dilabench.cli.app import list_configs
from dilabench.cli.github import GithubSummary, append_summary, require_github
from dilabench.cli.options import OldNames, backend_text, discovered, given, lengths_of, names
from dilabench.cli.run import options as own
from dilabench.cli.terminal import print_table, say, say_folded
from dilabench.errors import ConfigError, ExitCode, gravest
from dilabench.patterns.registry import kind_with_fields
from dilabench.plugins.builtin.suites import SUITES
from dilabench.plugins.descriptors import Suite
from dilabench.record import PlannedCase
from dilabench.request import POOL_BYTES, read_budget, run_request
from dilabench.runs import DEFAULT_FOLDER
from dilabench.runs.resume import recorded_request
from dilabench.store.run_files import folder_of_run
from dilabench.units import counted, format_bytes
from dilabench.workload.spec import flops, tensor_bytes

if TYPE_CHECKING:
    from dilabench.engine.worker.nodes import Nodes

PATTERN_CACHE_ENTRIES = 64
TABLE = "table"
RANKS = "ranks"
# Columns that a narrow terminal drops first; --json has them.
SPARE = ("tensors", "FLOPs", "pattern")
COLUMNS = ("#", "implementation", "backend", RANKS, "workload", "pattern", "mode", "FLOPs", "tensors", "runs")


ListConfigs = Annotated[
    bool,
    typer.Option("--list-configs", callback=list_configs, is_eager=True, help="List the values of --config and exit."),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Continue a run (its folder, file or id, or latest): measure cases without a row and cases that the "
        "budget skipped. Other rows are kept, failed ones too.",
    ),
]


def run(
    suite: own.SuiteName = None,
    implementations: own.Implementations = None,
    backends: shared.Backends = None,
    config: shared.Configs = None,
    assignments: shared.Assignments = None,
    lengths: own.Lengths = None,
    range_name: own.RangeName = None,
    custom_lengths: own.CustomLengths = None,
    batch_size: shared.BatchSize = None,
    seq_length: shared.SeqLength = None,
    query_len: shared.QueryLength = None,
    num_heads: shared.NumHeads = None,
    num_kv_heads: shared.NumKvHeads = None,
    head_dim: shared.HeadDim = None,
    dtype: shared.DTypeName = None,
    mode: shared.ModeName = None,
    density: own.Density = None,
    sparsity: own.Sparsity = None,
    block_size: own.BlockSize = None,
    mask_file: own.MaskFile = None,
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
    allow_incomplete: own.AllowIncomplete = False,
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
    **suite_options: Any,
) -> None:
    """Measure a suite: verify each case, time it, and leave run.json, report.md and report.html in a folder.

    With --json, --dry-run and --plan print JSON.
    """
    if suite is None and resume is None:
        raise ConfigError(
            "SUITE, the question, is missing; write for example `dilabench run quick` (`dilabench list suites` shows "
            "all), or `dilabench run --resume RUN` to continue a run"
        )
    if sessions > 1 and resume is not None:
        raise ConfigError(f"--resume continues one run, --sessions {sessions} begins several; leave one out")
    if sessions > 1 and (as_json or output.suffix == ".json"):
        raise ConfigError(
            f"--sessions {sessions} makes several records, and there is place for one; leave --json or the .json file "
            "out: each run's folder has its run.json"
        )
    if github_summary:
        require_github()
    shared.require_one_format(as_json, names(formats))
    found = discovered(strict_plugins)
    workload = shared.workload_fields(batch_size, seq_length, num_heads, num_kv_heads, head_dim, dtype, mode, query_len)
    blocks = given(density=density, sparsity=sparsity, block_size=block_size, mask_file=mask_file and str(mask_file))
    workload |= {"pattern": kind_with_fields(blocks), **blocks} if blocks else {}
    settings = given(
        implementations=names(implementations),
        backends=names(backends),
        lengths=lengths_of(range_name, names(lengths), names(custom_lengths)),
        options=given(**suite_options),
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
            assert suite is not None
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
            suites: tuple[str, ...] = ()
            if suite is not None:
                named = catalogue.suites.get(suite)
                suites = (suite, named.name, *named.aliases)
            request, earlier = recorded_request(resumed, suites, fixed.keys() - {"budget_s"})
            request = request.model_copy(update={name: settings[name] for name in settings if name == "budget_s"})
        if not look:
            from dilabench.engine.worker.process import warm_server

            # The server that workers are forked from loads torch while this process plans.
            warm_server()
        # Timing cases needs numpy, which --help must not load.
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
        from dilabench.cli.run.output import terminal, together
        from dilabench.report.pull_request import of_run
        from dilabench.runs.execute import execute
        from dilabench.runs.execution import Execution

        # Loading the plot libraries takes a while: it is hidden here, while workers load even more.
        import_module("dilabench.report.plots.drawing")
        runs: list[tuple[ExitCode, str]] = []
        for number in range(1, sessions + 1):
            if resumed is not None and earlier is not None:
                execution = Execution.resume(planned, resumed, earlier, lambda text: say(text, err=True), nodes)
            else:
                execution = Execution.begin(planned, output_base(output), nodes)
            if sessions > 1:
                say(f"session {number} of {sessions}", err=True)
            code = execute(
                execution,
                terminal(shown, planned.request.budget_s),
                shown,
                keep=keep,
                options=options,
                summarise=(
                    (lambda record, sections: append_summary(of_run(record, sections))) if github_summary else None
                ),
                allow_incomplete=allow_incomplete,
            )
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


def signature(arguments: Sequence[str]) -> inspect.Signature:
    """The signature of `run` with an option for each field of the suites' options, in place of `suite_options`.

    Plug-ins are loaded if the arguments name a suite or an option that is not built in. Raises ConfigError for entries
    of DILABENCH_PEERS that are no folders.
    """
    suites: Iterable[Suite] = SUITES
    built_in = {name for suite in suites for name in (suite.name, *suite.aliases)}
    own = list(inspect.signature(run).parameters.values())[:-1]
    added = list(_suite_parameters(own, suites, arguments))
    known = {name for parameter in (*own, *added) for name in _names(parameter)}
    words = [word for word in arguments if not word.startswith("-")]
    unknown = {word.partition("=")[0] for word in arguments if word.startswith("--")} - known
    if unknown - {"--", "--help"} or (words and built_in.isdisjoint(words)):
        from dilabench.plugins.manager import discover

        suites = discover().catalogue.suites
        added = list(_suite_parameters(own, suites, arguments))
    return inspect.Signature([*own, *added])


def _suite_parameters(
    own: Sequence[inspect.Parameter], suites: Iterable[Suite], arguments: Sequence[str]
) -> Iterator[inspect.Parameter]:
    """Return the options of suites that do not clash with an option of the command; --help shows them for the named
    suite.
    """
    offering: dict[str, list[Suite]] = {}
    named = [suite for suite in suites if not {suite.name, *suite.aliases}.isdisjoint(arguments)]
    for suite in (*named, *suites):
        for name in suite.options.model_fields if suite.options else ():
            if suite not in offering.setdefault(name, []):
                offering[name].append(suite)
    shown = [suite for suite in named if suite.options] or list(suites)
    taken = {name for parameter in own for name in (parameter.name, *_names(parameter))}
    for name, having in sorted(offering.items(), key=lambda item: [suite.name for suite in item[1]]):
        flag = f"--{name.replace('_', '-')}"
        if taken.isdisjoint({name, flag}):
            # If suites differ, the named suite defines the option.
            model: Any = having[0].options
            panel = f"Options of {' and '.join(suite.name for suite in having)}"
            hidden = not any(suite in shown for suite in having)
            yield _parameter(name, flag, model.model_fields[name], rich_help_panel=panel, hidden=hidden)


def _parameter(name: str, flag: str, field: FieldInfo, **settings: Any) -> inspect.Parameter:
    kind: Any = field.annotation
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    value: Any = str
    if kind is bool:
        value, flag = bool, f"{flag}/--no-{flag[2:]}" if field.default else flag
    else:
        repeated = get_origin(kind) in (tuple, list, set, frozenset)
        value = list[str] if repeated else str
        chosen = "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
        settings["metavar"] = chosen or ("N" if kind is int else "VALUE")
    choices = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else []
    aliases = [alias for alias in choices if isinstance(alias, str) and alias != name]
    old = OldNames(f"--{alias.replace('_', '-')}" for alias in aliases)
    option = typer.Option(flag, help=field.description, **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[value | None, option, old]
    )


def _names(parameter: inspect.Parameter) -> Iterator[str]:
    """The names of an option as it may be written, old ones included."""
    for part in getattr(parameter.annotation, "__metadata__", ()):
        if isinstance(part, OldNames):
            yield from part
        elif isinstance(part, typer.models.OptionInfo):
            for names in (part.default, *(part.param_decls or ())):
                yield from str(names).split("/")


def _elsewhere(run: Path, output: Path) -> Path | None:
    """Return the folder given for a resumed run if it is another one than the run's, else None. A file, to which the
    record is copied in addition, does not count. For a run given by its id, -o names the folder that holds it.
    """
    if not run.exists():
        return None
    places = (run, run.parent) if run.is_dir() else (run.parent, run.parent.parent)
    known = output == DEFAULT_FOLDER or output.suffix == ".json"
    return None if known or output.resolve() in [place.resolve() for place in places] else output


def output_base(output: Path) -> Path:
    """The directory in which the run's folder is created; for a path to a .json file its directory."""
    return output.parent if output.suffix == ".json" else output


def show_cases(planned: Sequence[PlannedCase], as_json: bool = False) -> None:
    """One line per case with its FLOPs, the bytes of its tensors, and why it would be skipped."""
    if as_json:
        say(json.dumps([_as_data(case) for case in planned], indent=1))
        return
    columns = [name for name in COLUMNS if name != RANKS or any(plan.case.world_size > 1 for plan in planned)]
    by_name = [dict(zip(COLUMNS, _cells(index, plan), strict=True)) for index, plan in enumerate(planned, 1)]
    cells = [tuple(row[name] for name in columns) for row in by_name]
    print_table(None, columns, cells, right=(RANKS, "FLOPs", "tensors"), spare=SPARE)
    reasons: dict[str, list[str]] = {}
    total = 0.0
    for index, plan in enumerate(planned, 1):
        if plan.skip is None:
            total += flops(plan.case.workload)
        else:
            reasons.setdefault(plan.skip.why, []).append(str(index))
    for why, rows in reasons.items():
        say_folded(f"not run, {', '.join(rows)}: {why}", "  ")
    skipped = sum(map(len, reasons.values()))
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


def _cells(index: int, plan: PlannedCase) -> tuple[str, ...]:
    from dilabench.report.columns import implementation_text

    case, workload = plan.case, plan.case.workload
    name, label = implementation_text(case), workload.label()
    tensors = format_bytes(sum(tensor_bytes(workload).values()))
    work = f"{flops(workload):.3g}"
    return (
        str(index),
        name,
        backend_text(plan),
        str(case.world_size),
        label,
        workload.pattern.details(workload.shapes)
        + (" (yardstick: another function)" if plan.role == "yardstick" else ""),
        workload.mode,
        work,
        tensors,
        "yes" if plan.skip is None else "no",
    )

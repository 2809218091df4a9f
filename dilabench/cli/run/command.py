"""`dilabench run`: measure a suite."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dilabench.cli import options as shared
from dilabench.cli.github import GithubSummary
from dilabench.cli.options import given, names, one_or_none
from dilabench.cli.plugins import discovered
from dilabench.cli.run import dry_run as dry
from dilabench.cli.run import options as own
from dilabench.cli.run.plan import show_predictions
from dilabench.cli.run.ranks import asking_all, on_ranks
from dilabench.cli.run.resume import recorded_request, resumed_header
from dilabench.cli.run.way_on import together
from dilabench.cli.terminal import say
from dilabench.errors import ConfigError, ExitCode, gravest
from dilabench.machine import detect
from dilabench.patterns.registry import kind_with_fields
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.manager import Found
from dilabench.record import Row, RunHeader
from dilabench.request import RunRequest, read_budget, run_request
from dilabench.store.run_files import RunFolder, completed_rows, folder_of_run
from dilabench.suites.planner import Planner, expand
from dilabench.units import parse_count
from dilabench.workload.ranges import CUSTOM, range_lengths

if TYPE_CHECKING:
    from dilabench.engine.worker.nodes import Nodes

PATTERN_CACHE_ENTRIES = 64
POOL_BYTES = 2**30
TABLE = "table"


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
    resume: own.Resume = None,
    sessions: own.Sessions = 1,
    output: own.Output = shared.DEFAULT_FOLDER,
    formats: own.Formats = None,
    keep: own.KeepInStore = True,
    columns: shared.Columns = None,
    details: shared.Details = False,
    github_summary: GithubSummary = False,
    as_json: shared.AsJson = False,
    list_configs: own.ListConfigs = False,  # noqa: ARG001 - its callback has answered
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
    shared.require_one_format(as_json, names(formats))
    found = discovered(strict_plugins)
    workload = shared.workload_fields(batch_size, seq_length, num_heads, num_kv_heads, head_dim, dtype, mode)
    blocks = given(density=density, sparsity=sparsity, block_size=block_size, mask_file=mask_file and str(mask_file))
    workload |= {"pattern": kind_with_fields(blocks), **blocks} if blocks else {}
    settings = given(
        implementations=names(implementations),
        backends=names(backends),
        lengths=_lengths(range_name, names(lengths), names(custom_lengths)),
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
    asked = Asked(
        suite=suite,
        configs=config or [],
        assignments=assignments or [],
        workload=workload,
        settings=settings,
        github_summary=github_summary,
        resume=None if resume is None else folder_of_run(resume, output_base(output)),
        sessions=sessions,
        folder=_elsewhere(resume, output),
    )
    reporters = names(formats) or ["json" if as_json else TABLE]
    shown = {"details": details, "columns": shared.column_names(columns)}
    look = _Look(dry_run=dry_run, plan=plan, as_json=as_json)
    raise typer.Exit(on_ranks(lambda nodes: _carry_out(found, asked, reporters, output, look, keep, shown, nodes)))


def _elsewhere(resume: str | None, output: Path) -> Path | None:
    """Where the rest of a run that goes on should lie instead, if anywhere. Its own place is none, nor is a file that
    the record is copied to besides; of a run by its id, -o says where that is.
    """
    if resume is None or not (run := Path(resume)).exists():
        return None
    places = (run, run.parent) if run.is_dir() else (run.parent, run.parent.parent)
    known = output == shared.DEFAULT_FOLDER or output.suffix == ".json"
    return None if known or output.resolve() in [place.resolve() for place in places] else output


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks to be measured, before it is checked."""

    suite: str
    configs: list[str]
    assignments: list[str]
    workload: dict[str, Any]
    settings: dict[str, Any]
    github_summary: bool
    resume: Path | None
    sessions: int
    folder: Path | None

    def request(self, catalogue: Catalogue) -> tuple[RunRequest, RunHeader | None]:
        """The checked request; with `--resume`, that of the earlier run, and its header."""
        if self.resume is None:
            request = run_request(
                catalogue,
                suite=self.suite,
                configs=self.configs,
                assignments=self.assignments,
                workload=self.workload,
                run=self.settings,
            )
            return request, None
        elsewhere = given(**{"--config": self.configs, "--set": self.assignments, f"-o {self.folder}": self.folder})
        fixed = {**self.workload, **self.settings, **elsewhere}
        request, header = recorded_request(self.resume, self.suite, fixed.keys() - {"budget_s"})
        return request.model_copy(
            update={name: value for name, value in self.settings.items() if name == "budget_s"}
        ), header


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A look at what would run instead of a run."""

    dry_run: bool
    plan: bool
    as_json: bool


def _carry_out(
    found: Found,
    asked: Asked,
    formats: list[str],
    output: Path,
    look: _Look,
    keep: bool,
    shown: dict[str, Any],
    nodes: "Nodes | None",
) -> ExitCode:
    catalogue = found.catalogue
    request, earlier = asked.request(catalogue)
    request = asking_all(request, nodes)
    if not look.plan and not look.dry_run:
        from dilabench.engine.worker.process import warm_server

        # The server that workers are forked from loads torch while this process loads and plans the rest.
        warm_server()
    machine = detect(request.device)
    machine = nodes.machine(machine) if nodes else machine
    planned = expand(catalogue, machine, request)
    reporters = tuple(catalogue.reporters.get(name) for name in formats)
    # Its stop rule needs numpy, which --help should not wait for.
    from dilabench.engine.method import choose_method

    choose_method(request.timing, machine.device, catalogue)
    if look.plan:
        show_predictions(planned, Planner(catalogue, machine, request), look.as_json)
        return ExitCode.OK
    if look.dry_run:
        dry.show(planned, look.as_json)
        if warning := machine.facts.warning:
            say(warning, err=True)
        return ExitCode.OK
    from dilabench.cli.run.execution import Execution, copy_record, new_header, ready_to_draw

    ready_to_draw()
    runs: list[tuple[ExitCode, str]] = []
    for number in range(1, asked.sessions + 1):
        header = new_header(found, machine, request)
        completed: tuple[Row, ...] = ()
        if asked.resume is not None and earlier is not None:
            folder = RunFolder.resume(asked.resume, lambda text: say(text, err=True))
            completed = completed_rows(asked.resume, header)
            header = resumed_header(earlier, header, machine)
        else:
            folder = RunFolder.create(output_base(output), request.suite, header.run_id)
        if asked.sessions > 1:
            say(f"session {number} of {asked.sessions}", err=True)
        execution = Execution(
            found=found,
            machine=machine,
            request=request,
            planned=planned,
            header=header,
            folder=folder,
            formats=reporters,
            completed=completed,
            keep=keep,
            options=shown,
            launcher=nodes,
            github_summary=asked.github_summary,
        )
        runs.append((execution.run(), str(folder.path)))
        copy_record(folder, output)
        if runs[-1][0] is ExitCode.INTERRUPTED:
            break
    if len(runs) > 1:
        say(together([path for _, path in runs]), err=reporters != (catalogue.reporters.get(TABLE),))
    return gravest(code for code, _ in runs)


def _lengths(range_name: str | None, lengths: list[str], custom: list[str]) -> list[int] | None:
    chosen = one_or_none(lengths=lengths, custom_lengths=custom) or []
    counts = [parse_count(length, "length") for length in chosen]
    if range_name is None and custom:
        range_name = CUSTOM
    return list(range_lengths(range_name, counts)) if range_name else counts


def output_base(output: Path) -> Path:
    """The folder that the run's own folder goes into; a path to a .json file stands for the folder it is in."""
    return output.parent if output.suffix == ".json" else output

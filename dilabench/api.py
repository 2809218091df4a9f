"""dilabench from scripts and notebooks: `run`, `load` and `compare`, as the commands of these names; data frames."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from multiprocessing import current_process
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilabench.cli.options import discovered, given
from dilabench.cli.run.output import terminal
from dilabench.cli.terminal import note
from dilabench.comparison.across import compare_across, refuse_other_machine
from dilabench.comparison.comparison import Comparison
from dilabench.engine.worker.process import WORKER_NAME
from dilabench.errors import ConfigError, EnvironmentNotReady, ExitCode
from dilabench.plugins.functions import Functions
from dilabench.record import RunRecord
from dilabench.request import run_request
from dilabench.runs import DEFAULT_FOLDER
from dilabench.runs.execute import execute
from dilabench.runs.execution import Execution
from dilabench.store.calibrations import policy_for
from dilabench.store.lookup import Store
from dilabench.store.run_files import read_record
from dilabench.suites.planner import plan_run

if TYPE_CHECKING:
    import pandas

Run = RunRecord | str | PathLike[str]
AttentionFunction = Callable[..., Any]


def run(
    suite: str,
    *,
    config: str | Sequence[str] = (),
    output: str | PathLike[str] = DEFAULT_FOLDER,
    store: bool = True,
    implementations: str | AttentionFunction | Sequence[str | AttentionFunction] = (),
    backends: str | Sequence[str] = (),
    lengths: int | str | Sequence[int | str] = (),
    batch_size: int | str | None = None,
    seq_len: int | str | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    dtype: str | None = None,
    mode: str | None = None,
    causal: bool | None = None,
    window: tuple[int, int] | None = None,
    pattern: str | None = None,
    timing: str | None = None,
    warmup_runs: int | None = None,
    timing_runs: int | None = None,
    nproc: int | None = None,
    device: str | None = None,
    budget: float | str | None = None,
    seed: int | None = None,
    shard: str | tuple[int, int] | None = None,
    cuda_graph: bool | None = None,
    compile: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunRecord:
    """Measure a suite, as `dilabench run` does, and return the record; progress and the verdict go to stderr.

    `config`: presets or TOML files. `implementations`: names, or functions `attention(q, k, v)` on [B, N, H, D] or
    `build(workload, context)`, which returns one; they are defined at the top of a module, or of a script that calls
    this under `if __name__ == "__main__":`. `lengths`: 4096, "4K" or several. `budget`: seconds, "60s" or "none"; else
    the suite's own holds. `shard`: "2/8", the second of eight parts. `options`: fields of the suite. `settings`: any
    other field of a TOML file's [run] and [workload] tables, of a pattern (`segment_lengths=[2048, 4096]`), or of the
    suite. None, the default, means not given. The run leaves its folder under `output`; with `store` the record
    is kept for `history` as well. A case that fails is a row of the record, not an exception.

    Raises ConfigError for a wrong request, NothingToMeasure if none of its rows can run here, EnvironmentNotReady in a
    process that may start no other process, and KeyboardInterrupt if Ctrl-C came before the first row had ended.
    """
    process = current_process()
    if process.name == WORKER_NAME:
        raise ConfigError(
            "dilabench.run was called while a worker process imported the script with the function to measure; put the "
            "call under `if __name__ == '__main__':`"
        )
    if process.daemon:
        raise EnvironmentNotReady(
            f"{process.name} is a daemonic process, which Python lets start no other, and a run starts workers; call "
            "dilabench.run from a process that is not daemonic, such as one of concurrent.futures.ProcessPoolExecutor"
        )
    if isinstance(implementations, str) or callable(implementations):
        implementations = [implementations]
    functions = Functions([function for function in implementations if not isinstance(function, str)])
    found = discovered(extra=[functions] if functions.names else ())
    functions.refuse_left_out(found.catalogue)
    named = iter(functions.names)
    request = run_request(
        found.catalogue,
        suite=suite,
        configs=_listed(config),
        assignments=given(**settings),
        workload=given(
            batch_size=batch_size,
            seq_len=seq_len,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            mode=mode,
            causal=causal,
            window=window,
            pattern=pattern,
        ),
        run=given(
            implementations=[name if isinstance(name, str) else next(named) for name in implementations],
            backends=_listed(backends),
            lengths=lengths,
            timing=timing,
            warmup_runs=warmup_runs,
            timing_runs=timing_runs,
            nproc=nproc,
            device=device,
            budget_s=budget,
            seed=seed,
            shard=shard,
            cuda_graph=cuda_graph,
            compile=compile,
            options=options,
        ),
        keywords=signature(run).parameters,
    )
    plan = plan_run(found, request)
    execution = Execution.begin(plan, Path(output), argv=request.command_line())
    code = execute(execution, terminal((), plan.request.budget_s), keep=store)
    if code is ExitCode.INTERRUPTED and not execution.folder.path.exists():
        raise KeyboardInterrupt
    return read_record(execution.folder.path)


def load(run: str | PathLike[str]) -> RunRecord:
    """The record of a run: its folder, run.json or id, 'latest', or a baseline of one run. Raises ConfigError."""
    records = Store(tell=note).records(str(run))
    if len(records) > 1:
        raise ConfigError(f"{str(run)!r} stands for {len(records)} runs; name one of them by its id")
    return records[0]


def compare(baseline: Run, candidate: Run, *, threshold: float | str | None = None) -> Comparison:
    """Compare two runs, as `dilabench compare` does: a verdict per case that both have, and what was not compared.

    `threshold`: the change that matters, 0.05 or "5%". Raises ConfigError for runs of different machines.
    """
    base, new = (run if isinstance(run, RunRecord) else load(run) for run in (baseline, candidate))
    refuse_other_machine([base], [new], ConfigError)
    calibration = Store(tell=note).calibration_of([base, new])
    margin = None if threshold is None else str(threshold)
    policy = policy_for([base, new], margin, calibration)
    return compare_across([base], [new], policy=policy)


def to_frame(record: RunRecord, samples: bool = False) -> "pandas.DataFrame":
    """One line per case, or with `samples` one per sample, as a pandas frame (extra `data`); times are in ns.

    Raises EnvironmentNotReady without pandas.
    """
    from dilabench.report.tidy import frame

    return frame(record, samples)


def _method_of_record(self: RunRecord, samples: bool = False) -> "pandas.DataFrame":
    """Deprecated: `dilabench.to_frame(record)`."""
    warnings.warn(
        "RunRecord.to_frame() is deprecated; use dilabench.to_frame(record)", DeprecationWarning, stacklevel=2
    )
    return to_frame(self, samples)


def _in_brief(self: RunRecord) -> str:
    """The answer of a record in at most ten lines, as `print` shows it."""
    from dilabench.report.table import in_brief

    return in_brief(self)


# The record is in a lower layer than reports, and must not import them.
RunRecord.to_frame = _method_of_record  # type: ignore[attr-defined]
RunRecord.__str__ = _in_brief  # type: ignore[method-assign, assignment]


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _show_in_notebooks() -> None:
    """Have IPython show records and comparisons as HTML, where it runs this process."""
    # A program that IPython has not started has not loaded it.
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        # Only what is shown needs jinja2.
        formatter.for_type(RunRecord, lambda record: import_module("dilabench.report.html.page").notebook(record))
        formatter.for_type(Comparison, lambda found: import_module("dilabench.report.html.comparison").notebook(found))


_show_in_notebooks()

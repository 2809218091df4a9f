"""dilabench from scripts and notebooks: `run`, `load` and `compare`, as the commands of these names do it."""

import sys
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from dilabench.cli.options import discovered
from dilabench.cli.terminal import note
from dilabench.compare.across import compare_across, policy_for, refuse_other_machine
from dilabench.compare.comparison import Comparison
from dilabench.errors import ConfigError, ExitCode
from dilabench.record import RunRecord
from dilabench.request import RunRequest, measuring_options, run_request
from dilabench.runs import DEFAULT_FOLDER
from dilabench.runs.execution import Execution
from dilabench.store.lookup import Store
from dilabench.store.run_files import read_record
from dilabench.suites.planner import plan_run

Run = RunRecord | str | PathLike[str]
# Fields of a request that are arguments of their own here, or come from others.
NOT_SETTINGS = {"suite", "overrides", "presets"}


def run(
    suite: str,
    *,
    config: str | Sequence[str] = (),
    output: str | PathLike[str] = DEFAULT_FOLDER,
    store: bool = True,
    **settings: Any,
) -> RunRecord:
    """Measure a suite, as `dilabench run` does, and return the record; progress and the verdict go to stderr.

    `config`: presets or TOML files. `settings`: what a TOML file's [run] and [workload] tables may hold:
    `implementations`, `backends`, `lengths`, `budget` ("60s" or "none", else the suite's own), `device`, `seed`;
    `batch_size`, `dtype`, `mode` and so on. The run leaves its folder under `output`; with `store` the record is kept
    for `history` as well. A case that fails is a row of the record, not an exception.

    Raises ConfigError for a wrong request, and KeyboardInterrupt when Ctrl-C came before any row had ended.
    """
    from dilabench.cli.run.shown import show_run

    found = discovered()
    of_run, of_workload = _split(settings)
    request = run_request(found.catalogue, suite=suite, configs=_listed(config), workload=of_workload, run=of_run)
    plan = plan_run(found, request)
    execution = Execution.begin(plan, Path(output), argv=tuple(_command(request)))
    code = show_run(execution, keep=store)
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
    policy = policy_for([base, new], margin, calibration.sigma_aa if calibration else None)
    return compare_across([base], [new], policy=policy)


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _split(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the run, and fields of the workload, which `run_request` checks."""
    given = dict(settings)
    if "budget" in given:
        given["budget_s"] = given.pop("budget")
    for name in ("implementations", "backends"):
        if name in given:
            given[name] = _listed(given[name])
    names = RunRequest.model_fields.keys() - NOT_SETTINGS
    of_run = {name: given.pop(name) for name in names & given.keys()}
    return of_run, given


def _command(request: RunRequest) -> Iterator[str]:
    """A command line that asks for the same, so that reports can say how to repeat the run."""
    yield from ("run", request.suite)
    for option, values in (("-i", request.implementations), ("-b", request.backends), ("--config", request.presets)):
        for value in values:
            yield from (option, value)
    if request.lengths:
        yield from ("--lengths", ",".join(map(str, request.lengths)))
    for name, value in request.overrides.items():
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        yield from ("--set", f"{name}={text.lower() if isinstance(value, bool) else text}")
    if request.device != "auto":
        yield from ("--device", request.device)
    if request.nproc != 1:
        yield from ("--nproc", str(request.nproc))
    if request.shard:
        yield from ("--shard", "{}/{}".format(*request.shard))
    yield from measuring_options(request.model_dump())


def _record_html(record: RunRecord) -> str:
    # Only a notebook needs jinja2.
    from dilabench.report.html.page import notebook

    return notebook(record)


def _comparison_html(comparison: Comparison) -> str:
    from dilabench.report.html.comparison import notebook

    return notebook(comparison)


def _show_in_notebooks() -> None:
    """Have IPython show records and comparisons as HTML, where it runs this process."""
    # A program that IPython has not started has not loaded it.
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        formatter.for_type(RunRecord, _record_html)
        formatter.for_type(Comparison, _comparison_html)


_show_in_notebooks()

"""Descriptors of the other components that plug-ins register: workloads, suites, reporters and timers.

Descriptors of implementations and backends are the library's (`dilabench.choice.descriptors`).
"""

from dataclasses import field
from typing import Annotated, Any

import pydantic.dataclasses

from dilabench.choice.descriptors import (
    ANY_PATTERN,
    DENSE_KERNEL,
    Backend,
    Capabilities,
    Devices,
    Implementation,
    Named,
)
from dilabench.plugins.axis import LENGTH, Axis
from dilabench.validation import CHECKED, Name, Options, Priority, Target, at_least, readable

__all__ = [
    "ANY_PATTERN",
    "DENSE_KERNEL",
    "Backend",
    "Capabilities",
    "Implementation",
    "Named",
    "Reporter",
    "Suite",
    "Timer",
    "WorkloadPreset",
]


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class WorkloadPreset:
    """A named workload: fields of WorkloadRequest. `members` names other presets instead, for a set."""

    name: Name
    summary: str
    fields: dict[str, Any] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    aliases: tuple[Name, ...] = ()


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Suite:
    """A question. `target` is `expand(request, planner) -> Sequence[PlannedCase]`; see docs/reference/hooks.md.

    `follow_up` (optional) is `follow_up(rows, request, planner) -> Sequence[PlannedCase]`: called when all cases have
    ended, it may return more, like a bisection; an empty result ends the run.
    `budget_s`: the time limit of a run if the user sets none; None sets no limit. `timing`: how cases are timed if the
    user does not choose. `sampling_s`: the longest sampling time per case, if the device's default (2 s on a CPU, 3 s
    on a GPU, once the least number of samples is taken) is more than needed; the warm-up is then shorter, and 30 slots
    are enough. `far_slower`: if only the fastest matter, a case is skipped if its call takes more than this many times
    as long as a verified one of its workload, unless it is one that chooses, and no second timer runs.
    `analysis` (optional) is `analyse(record) -> Sequence[Section]` (`dilabench.report.findings`): sections that
    reporters print next to the table, derived from the raw samples at each report. With `reads_catalogue` it is called
    as `analyse(record, catalogue)`. `only_plots`: it returns only plots, so that reporters without plots skip it.
    `projections` (optional) is `project(record) -> Sequence[dict]`: extrapolations beyond the measurements. They are
    stored in the record separately from the rows, and no table of measurements shows them.
    `options`: a pydantic model of the request's `options`, each field with a default; with None the suite must refuse
    unknown ones. A field `pace` is the option `--pace` of `dilabench run`, with its description as help; a name that
    every suite has as an option is set by `--set` only. The model validates the values before the suite reads
    `request.options`, which holds only given ones.
    `priority`: suite `all` runs the highest first, and last those that use all remaining time (`takes_the_rest`).
    `tunes`: `dilabench tune` chooses among its cases. `axis`: the quantity of its answer, with a line for each value.
    `by_name`: suite `all` omits it. `deals`: it plans, and follows up, only the cases of `request.shard`; without it,
    workloads are assigned to shards, and a suite with a follow-up has no shards.
    """

    name: Name
    summary: str
    target: Target
    follow_up: Target | None = None
    analysis: Target | None = None
    projections: Target | None = None
    budget_s: Annotated[float, at_least(0)] | None = 120.0
    timing: str = "warmup"
    sampling_s: float | None = None
    far_slower: float | None = None
    aliases: tuple[Name, ...] = ()
    reads_catalogue: bool = False
    only_plots: bool = False
    options: Options = None
    priority: Priority = 0
    takes_the_rest: bool = False
    tunes: bool = False
    axis: Axis = LENGTH
    by_name: bool = False
    deals: bool = False


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Reporter:
    """A rendering of a RunRecord. `target` is `render(record, folder) -> str | None`.

    It returns the text to print; it may also write `filename` (and accompanying files) into `folder` if not None. With
    `shows_sections` it is called as `render(record, folder, sections)`, with the sections of the suite's analysis;
    `shows_plots=False`: it shows only their sentences and figures. One with `prints=False` only writes files: `report`
    passes the run's folder if none is named. `samples` names the reporter that shows single samples instead of cases
    (`--samples`). `options`: the keywords that it takes from the command line: `details=True` (nothing is folded),
    `columns` (names in that order).
    """

    name: Name
    summary: str
    target: Target
    filename: str | None = None
    shows_sections: bool = False
    shows_plots: bool = True
    prints: bool = True
    samples: str | None = None
    options: tuple[str, ...] = ()
    aliases: tuple[Name, ...] = ()


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Timer:
    """A method of timing. `target` is a class as described in `dilabench.engine.timers`; `proves` states its claim.

    `default_on`: the devices on which it is the default; the first registered wins. `for_launch_bound`: it times a case
    again if the default timer notes that launches dominate. `fresh_process`: each sample is the first call in a new
    process, so that there is no warm-up and few samples are taken.
    """

    name: Name
    summary: str
    target: Target
    proves: str
    devices: Devices = frozenset({"cpu", "cuda"})
    aliases: tuple[Name, ...] = ()
    default_on: Devices = frozenset()
    for_launch_bound: bool = False
    fresh_process: bool = False

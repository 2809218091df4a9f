"""Descriptors of everything else that plug-ins register: workloads, suites, reporters and timers.

Those of implementations and backends are the library's (`dilabench.choice.descriptors`).
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
    ended, it may ask for more, as a bisection does; an empty answer ends the run.
    `budget_s` is the time that a run takes at most when the user sets no budget; None sets no limit. `timing` is how
    cases are timed when the user does not say; `sampling_s` the longest time in samples per case, where the device's
    own (2 s on a CPU, 3 s on a GPU, once the least number of samples is taken) is more than the question needs; the
    warm-up is shorter then, and 30 turns are enough. `far_slower`: where only the fastest matter, a case whose call
    takes more than so many times as long as that of a verified one of its workload is left out, unless it is one that
    chooses, and no second timer is asked.
    `analysis` (optional) is `analyse(record) -> Sequence[Section]` (`dilabench.report.findings`): what the reporters
    print beside the table, derived from the raw samples whenever the record is looked at. With `reads_catalogue` it is
    called as `analyse(record, catalogue)`. `only_plots`: it finds plots alone, so that reporters without plots skip it.
    `projections` (optional) is `project(record) -> Sequence[dict]`: what would be beyond what was measured. It is kept
    in the record apart from the rows, and no table of measurements shows it.
    `options`: a pydantic model of what a request may set in `options`, each field with a default; None leaves it to the
    suite to refuse others. A field `pace` is the option `--pace` of `dilabench run`, and its description the help of
    that; the name of an option that every suite has is set by `--set` alone. The values are checked by the model
    before the suite sees `request.options`, which holds those that were given.
    `priority`: suite `all` asks the highest first, and last of all those that take what time is left
    (`takes_the_rest`). `tunes`: its cases are those that `dilabench tune` chooses among. `axis`: what its answer is
    given by, a line for each value. `by_name`: suite `all` leaves it out. `deals`: what it plans, and follows up with,
    are the cases of `request.shard` alone; without it, workloads are dealt out to shards, and a suite with a follow-up
    has none.
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

    It returns the text to print; it may also write `filename` (and what belongs to it) into `folder` when not None.
    With `shows_sections` it is called as `render(record, folder, sections)`, with what the suite's analysis found;
    `shows_plots=False`: of these it shows sentences and figures alone. One with `prints=False` has files only: `report`
    gives it the run's own folder when none is named. `samples` names the reporter that shows single samples where this
    one shows cases (`--samples`). `options`: the keywords that it takes from the command line: `details=True` (nothing
    folded), `columns` (names in that order).
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
    """A way to take samples. `target` is a class as described in `dilabench.engine.timers`; `proves` is its claim.

    `default_on`: the devices on which it is taken where the user names none; the first registered wins.
    `for_launch_bound`: it times a case once more when the default timer notes that launches dominate. `fresh_process`:
    each sample is the first call in a new process, so that nothing is warmed up and few samples are taken.
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

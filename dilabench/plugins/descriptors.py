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
)
from dilabench.choice.ways import Named
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
    """A named workload, or a set of them."""

    name: Name
    """As `--config` takes it."""
    summary: str
    """One line for lists."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of WorkloadRequest."""
    members: tuple[str, ...] = ()
    """Names of other presets, for a set; `fields` is then empty."""
    aliases: tuple[Name, ...] = ()
    """Other names."""


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Suite:
    """A question: from a request to cases, and from a record to findings."""

    name: Name
    """As `dilabench run` takes it."""
    summary: str
    """One line for lists."""
    target: Target
    """`expand(request, planner) -> Sequence[PlannedCase]`: the cases of a request."""
    follow_up: Target | None = None
    """`follow_up(rows, request, planner) -> Sequence[PlannedCase]`: called when all cases have ended, it may return
    more, as a bisection does. An empty result ends the run."""
    analysis: Target | None = None
    """`analyse(record) -> Sequence[Section]` (`dilabench.report.findings`): sections that reporters print next to the
    table, derived from the raw samples at each report."""
    projections: Target | None = None
    """`project(record) -> Sequence[dict]`: extrapolations beyond the measurements. The record holds them separately
    from the rows, and no table of measurements shows them."""
    budget_s: Annotated[float, at_least(0)] | None = 120.0
    """The time limit of a run, in seconds, if the user sets none; None sets no limit."""
    timing: str = "warmup"
    """How cases are timed if the user does not choose."""
    sampling_s: float | None = None
    """The longest sampling time per case, in seconds, if the device's default (2 on a CPU, 3 on a GPU) is more than
    needed. The warm-up is then shorter, and 30 slots are enough."""
    far_slower: float | None = None
    """If only the fastest matter: a case is skipped if its call takes more than this many times as long as a verified
    one of its workload. One that `chooses` is kept, and no second timer runs."""
    aliases: tuple[Name, ...] = ()
    """Other names."""
    reads_catalogue: bool = False
    """`analysis` is called as `analyse(record, catalogue)`."""
    only_plots: bool = False
    """`analysis` returns only plots, so that reporters without plots skip it."""
    options: Options = None
    """A pydantic model of the request's `options`, each field with a default; it validates them before the suite reads
    `request.options`, which holds only given ones. A field `pace` is the option `--pace` of `dilabench run`, with its
    description as help. A name that every suite has as an option is set by `--set` only. Without a model the suite must
    refuse unknown options."""
    priority: Priority = 0
    """Suite `all` runs the highest first."""
    takes_the_rest: bool = False
    """It uses all remaining time, so that suite `all` runs it last."""
    tunes: bool = False
    """`dilabench tune` chooses among its cases."""
    axis: Axis = LENGTH
    """The quantity of its answer, with a line for each value."""
    by_name: bool = False
    """Suite `all` omits it."""
    deals: bool = False
    """It plans, and follows up, only the cases of `request.shard`. Without it, workloads are assigned to shards, and a
    suite with a follow-up has no shards."""


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Reporter:
    """A rendering of a RunRecord."""

    name: Name
    """As `-f` takes it."""
    summary: str
    """One line for lists."""
    target: Target
    """`render(record, folder) -> str | None`: returns the text to print. It may also write `filename`, and files beside
    it, into `folder` if that is not None."""
    filename: str | None = None
    """The file that it writes, if any."""
    shows_sections: bool = False
    """It is called as `render(record, folder, sections)`, with the sections of the suite's analysis."""
    shows_plots: bool = True
    """Whether it shows the plots of sections, or only their sentences and figures."""
    prints: bool = True
    """Whether it returns a text. One that only writes files gets the run's folder from `report` if none is named."""
    samples: str | None = None
    """The reporter that shows single samples instead of cases (`--samples`)."""
    options: tuple[str, ...] = ()
    """The keywords that it takes from the command line: `details=True` (nothing is folded), `columns` (names in that
    order)."""
    aliases: tuple[Name, ...] = ()
    """Other names."""


@readable
@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=CHECKED)
class Timer:
    """A method of timing."""

    name: Name
    """As `--timing` takes it."""
    summary: str
    """One line for lists."""
    target: Target
    """A class as described in `dilabench.engine.timers`."""
    proves: str
    """The statement that its times support."""
    devices: Devices = frozenset({"cpu", "cuda"})
    """Kinds of device on which it works."""
    aliases: tuple[Name, ...] = ()
    """Other names."""
    default_on: Devices = frozenset()
    """The devices on which it is the default; the first registered wins."""
    for_launch_bound: bool = False
    """It times a case again if the default timer notes that launches dominate."""
    fresh_process: bool = False
    """Each sample is the first call in a new process: no warm-up, and few samples."""

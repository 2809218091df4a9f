"""Suite `model`: the step of a whole model by its attention, and the share of the step that is attention."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from dilabench.comparison.view import PairView, RowView, measured_view, pair_views
from dilabench.errors import ConfigError, EnvironmentNotReady, listed
from dilabench.patterns.dense import DENSE
from dilabench.plugins.builtin.workloads import document_length, drawn_bounds, drawn_lengths
from dilabench.plugins.descriptors import Implementation
from dilabench.record import Measured, PlannedCase, RunRecord
from dilabench.report.columns import ABSENT, COLUMNS, row_name
from dilabench.report.findings import BarPlot, Bars, Section
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner, as_dense
from dilabench.units import format_count, format_latency, format_ratio, percent_text, significant
from dilabench.workload.model import GENERATE, ITSELF
from dilabench.workload.spec import UNBOUNDED, Workload, WorkloadRequest

NS_PER_MS = 1e6
# What runs without --config: its preset and lengths.
ON_GPU, ON_CPU = ("llama_400m", (2**13, 2**15)), ("llama_tiny", (2**9,))
# Sequences of a padded batch.
PADDED = 4
# What a step is called over its table, and what a row does in the answer.
PREFILL = "prefill"
STEPS = {"both": "training step", "forward": "forward pass", PREFILL: "first token", GENERATE: "next token"}
DOES = {
    "both": "makes a step",
    "forward": "makes a forward pass",
    PREFILL: "gives the first token",
    GENERATE: "gives a token",
}
COLUMNS_OF_ANSWER = ("workload", "attention", "step", "tok/s", "peak mem.", "of it attention", "host", "speed-up")
NUMERIC = frozenset(COLUMNS_OF_ANSWER[2:])


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """The step with each attention that can run here, without attention, and with a requested pattern.

    The pattern is another function, so that its rows are unranked; so are those without attention, each token of which
    sees itself alone. What compiles for long is planned only if it is named. If transformers refuses SDPA for a model,
    eager attention is planned instead, as transformers does. Raises EnvironmentNotReady without transformers.
    """
    named = {planner.catalogue.implementations.get(name).name for name in request.implementations}
    cases: list[PlannedCase] = []
    for asked in _workloads(request, planner):
        before, project = len(cases), asked.model and asked.model.project
        steps = [model for model in planner.catalogue.implementations if model.takes == "model"]
        models = [model for model in steps if model.project == project]
        if not models:
            known = listed(sorted({model.project for model in steps if model.project}), "or")
            raise ConfigError(f"project {project!r} builds no models here; use {known}, or none for transformers")
        if project is None and planner.catalogue.find_module("transformers") is None:
            raise EnvironmentNotReady(
                "suite 'model' builds models of transformers, which is not installed: "
                "pip install 'dilabench[transformers]'"
            )
        # LongNet's models have no dense form.
        is_dense = any(model.supports.computes(DENSE.kind) for model in models)
        dense = as_dense(asked) if is_dense else asked
        for model in models:
            is_usual = model.role in ("plain", "method") and not model.compiles
            if model.role == "yardstick":
                cases += planner.plan(model, dense.model_copy(update={"window": ITSELF}))
            elif model.name in named if named else is_usual:
                cases += planner.plan(model, dense)
                if is_dense and asked.pattern != DENSE.kind and model.supports.computes(asked.pattern):
                    cases += planner.plan(model, asked, role="yardstick")
        if not named and not any(case.role == "plain" and case.skip is None for case in cases[before:]):
            eager = next(model for model in models if model.role == "oracle")
            cases += (case for case in planner.plan(eager, dense, role="plain") if case.skip is None)
        cases[before:] = [_with_install(case, models, planner) for case in cases[before:]]
    return tuple(cases)


def _with_install(planned: PlannedCase, models: Sequence[Implementation], planner: Planner) -> PlannedCase:
    """The case; if its project is missing, the reason says how to get it."""
    model = next(model for model in models if model.name == planned.case.implementation)
    if planned.skip is None or model.project is None or planner.catalogue.find_module(model.project) is not None:
        return planned
    skip = planned.skip.model_copy(update={"why": f"{planned.skip.why}: {model.install}"})
    return planned.model_copy(update={"skip": skip})


def _workloads(request: RunRequest, planner: Planner) -> Iterator[WorkloadRequest]:
    name, lengths = ON_GPU if planner.machine.facts.own_memory else ON_CPU
    if not request.presets and "model" not in request.overrides:
        planner = planner.asking(presets=(name,), lengths=request.lengths or lengths)
    packed, padded = (request.options.get(name) for name in ("packed", "padded"))
    for asked in planner.workload_requests([{}]):
        if packed and (padded or asked.mode == GENERATE):
            other, why = ("--padded", "have no padding") if padded else ("mode generate", "fill no cache")
            raise ConfigError(f"{other} and --packed: packed documents {why}; leave out one of them")
        if packed:
            bounds = drawn_bounds(asked.seq_len, document_length)
            yield asked.model_copy(update={"layout": "packed", "cu_seqlens": bounds, "batch_size": 1})
        else:
            yield from _steps_of(_padded(asked, request) if padded else asked)


def _padded(asked: WorkloadRequest, request: RunRequest) -> WorkloadRequest:
    """The request with sequences of other lengths in a batch."""
    count = int(request.overrides.get("batch_size", PADDED))
    if asked.model is None:
        return asked
    model = asked.model.model_copy(update={"lengths": drawn_lengths(asked.seq_len, count)})
    return asked.model_copy(update={"model": model, "batch_size": count})


def _steps_of(asked: WorkloadRequest) -> Iterator[WorkloadRequest]:
    """The request itself, or the prefill and the token after it that are generated."""
    if asked.mode != GENERATE:
        yield asked
    else:
        prefill = asked.model_copy(update={"mode": "forward", "query_len": None})
        yield from (prefill, prefill.model_copy(update={"query_len": asked.query_len or 1}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The measured rows of one model and shape: with attention, and without."""

    heading: str
    shape: Workload
    rows: tuple[RowView, ...]
    without: RowView | None

    def share(self, view: RowView) -> float | None:
        """The share of a step that is attention; None if no row without attention is faster: launches are the limit."""
        without = self.without.median_ns if self.without else view.median_ns
        return None if without >= view.median_ns else 1 - without / view.median_ns

    @property
    def step(self) -> str:
        """The kind of step, as in `STEPS`."""
        return _kind(self.shape)

    @property
    def plain(self) -> RowView | None:
        """The row that speed-ups refer to."""
        return next((view for view in self.rows if view.row.planned.role == "plain"), None)


Versus = Callable[[Steps, RowView], PairView | None]


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """How many times as fast as the plain row, SDPA, each row makes the step, and how much of it is attention."""
    found = tuple(_steps(record))
    if not found:
        return ()
    pairs = [(steps.plain.row, view.row) for steps in found if steps.plain for view in steps.rows]
    views = {(id(old), id(new)): view for (old, new), view in zip(pairs, pair_views(pairs, record.device), strict=True)}

    def versus(steps: Steps, view: RowView) -> PairView | None:
        return views.get((id(steps.plain.row), id(view.row))) if steps.plain else None

    lines = [_sentence(steps, versus) for steps in found]
    section = Section(
        title="Answer",
        sentence="\n".join(lines),
        columns=COLUMNS_OF_ANSWER,
        rows=tuple(line for steps in found for line in _lines(steps, versus)),
        numeric=NUMERIC,
        plots=tuple(_bars(found)),
        answers=True,
        headed=True,
        spare=("host", "peak mem."),
    )
    return (section,)


def _steps(record: RunRecord) -> Iterator[Steps]:
    """The models and shapes that have a time, in the order of the record."""
    groups: dict[Workload, list[RowView]] = {}
    for row in record.rows:
        if isinstance(row.outcome, Measured) and row.outcome.timings:
            shape = row.case.workload.replace(pattern=DENSE, window=UNBOUNDED)
            groups.setdefault(shape, []).append(measured_view(row))
    for shape, views in groups.items():
        without = [view for view in views if view.row.case.workload.window == ITSELF]
        rows = tuple(view for view in views if view not in without)
        heading = f"{shape.label()} · {STEPS[_kind(shape)]}"
        if rows:
            yield Steps(heading=heading, shape=shape, rows=rows, without=next(iter(without), None))


def _kind(shape: Workload) -> str:
    if shape.query_len is not None:
        return GENERATE
    # Packed documents, and models of a project, fill no cache.
    fills_cache = shape.layout == "padded" and shape.model is not None and shape.model.project is None
    return PREFILL if shape.mode == "forward" and fills_cache else shape.mode


def _dense(steps: Steps) -> tuple[RowView, ...]:
    return tuple(view for view in steps.rows if view.row.planned.role != "yardstick")


def _sentence(steps: Steps, versus: Versus) -> str:
    """'At 32K packed `dilabench-model` makes a step 4.4 times as fast as `sdpa-model`; attention is ...'."""
    shape, plain, rivals = steps.shape, steps.plain, _dense(steps)
    assert shape.model is not None
    packed = " packed" if shape.layout == "packed" else " padded" if shape.model.lengths else ""
    place = f"{shape.model.name} at {format_count(shape.seq_len)}{packed}"
    does, step = DOES[steps.step], STEPS[steps.step]
    if not rivals:
        return f"{place}: no row with dense attention has a time."
    best, *others = sorted(rivals, key=lambda view: view.median_ns)
    name, share = row_name(best.row), steps.share(best)
    other = plain if plain is not best else next(iter(others), None)
    if plain is None or other is None:
        own = "" if share is None else f", {percent_text(share)} of it attention"
        return f"{place}: `{name}` {does} in {format_latency(best.median_ns)}{own}."
    compared, theirs = versus(steps, other if best is plain else best), steps.share(other)
    if compared is not None and compared.faster is not None:
        times = significant(other.median_ns / best.median_ns, 2)
        text = f"{place}: `{name}` {does} {times} times as fast as `{row_name(other.row)}`"
    else:
        both = f"{format_latency(best.median_ns)} and {format_latency(other.median_ns)}"
        text = f"{place}, {step}: `{name}` and `{row_name(other.row)}` take {both}, too close to decide"
    if share is None or theirs is None:
        return f"{text}."
    shares = f"{percent_text(theirs)} of `{row_name(other.row)}`'s time, {percent_text(share)} of `{name}`'s"
    return f"{text}; attention is {shares}."


def _lines(steps: Steps, versus: Versus) -> Iterator[tuple[str, ...]]:
    """Ranked rows by time, then what computes another function."""
    ranked = sorted(_dense(steps), key=lambda view: view.median_ns)
    others = [view for view in steps.rows if view not in ranked]
    for view in (*ranked, *others, *([steps.without] if steps.without else [])):
        compared, share, enqueued = versus(steps, view), steps.share(view), view.timing.columns.column("enqueue_ns")
        host = [time_ns for slot in enqueued for time_ns in slot]
        pattern = view.row.case.workload.pattern
        name = row_name(view.row) + (f", {pattern.label()}" if view in others else "")
        yield (
            steps.heading,
            name,
            format_latency(view.median_ns),
            COLUMNS["tok/s"].value_text(view),
            COLUMNS["peak mem."].value_text(view),
            ABSENT if share is None or view is steps.without else percent_text(share),
            format_latency(median(host)) if host else ABSENT,
            ABSENT if compared is None or view in others else format_ratio(1 / compared.ratio),
        )


def _bars(found: Sequence[Steps]) -> Iterator[BarPlot]:
    """A bar for each row, of the time without attention and of what attention adds."""
    shown = [(steps, view) for steps in found if steps.without for view in steps.rows]
    if not shown:
        return
    rest = [steps.without.median_ns / NS_PER_MS for steps, _ in shown if steps.without]
    steps_ms = [view.median_ns / NS_PER_MS for _, view in shown]
    added = tuple(max(0.0, whole - part) for whole, part in zip(steps_ms, rest, strict=True))
    yield BarPlot(
        name="step",
        title="A step: attention, and the rest of the model",
        value_label="time (ms)",
        categories=tuple(f"{row_name(view.row)}\n{steps.heading}" for steps, view in shown),
        bars=(Bars(label="the rest", values=tuple(rest)), Bars(label="attention", values=added)),
        stacked=True,
    )

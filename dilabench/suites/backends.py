"""Suite `backends`: the fastest dense kernel and dtype on this device, for full and for dilated attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dilabench.comparison.view import measured_view, pair_views, rank, view_of
from dilabench.errors import listed
from dilabench.machine import Machine
from dilabench.plugins.axis import LENGTH as LENGTH_AXIS
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Implementation
from dilabench.record import KernelUse, Measured, PlannedCase, Row, RunRecord
from dilabench.report.columns import ABSENT
from dilabench.report.content import device_text
from dilabench.report.findings import BarPlot, Section, answer_section
from dilabench.request import ALL, RunRequest
from dilabench.suites.findings.series import latency_bars
from dilabench.suites.planner import Planner
from dilabench.units import format_count, format_latency, format_ratio

DTYPES = {"small": ("float32", "bfloat16"), "large": ("bfloat16", "float16", "float32")}
# Plain PyTorch over all pairs is one of the backends, which must not take minutes on a CPU.
LENGTH = {"small": 2048, "large": 8192}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Plan full and dilated attention of one shape over every backend, in the usual dtypes of this device.

    A named dtype, backend or implementation is the only one.
    """
    planner = planner.asking(backends=request.backends or (ALL,))
    size = planner.machine.facts.size
    defaults = [{"seq_len": LENGTH[size], "dtype": dtype} for dtype in DTYPES[size]]
    workloads = planner.workload_requests(defaults)

    def is_shown(implementation: Implementation) -> bool:
        fits = implementation.supports.only_dense or any(
            implementation.supports.computes(workload.pattern) for workload in workloads
        )
        on_one = implementation.takes == "heads" and implementation.supports.max_world_size == 1
        return implementation.uses_backend and implementation.role == "method" and on_one and fits

    default = planner.where(is_shown)
    return planner.compare(workloads, planner.implementations(default))


# If another dtype is hardly faster, bfloat16 is preferred for its range (no loss scaling).
WIDE_RANGE = "bfloat16"
HARDLY = 1.03
MAX_KERNEL_NAME = 60
OPERATOR = "aten::"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The backends of one implementation on one workload, fastest first.

    `ratios`: time of each row / time of the fastest. `tied`: backends that are not proven slower.
    """

    rows: tuple[Row, ...]
    ratios: tuple[float, ...]
    tied: frozenset[str]

    @property
    def best(self) -> Row:
        """The fastest row."""
        return self.rows[0]

    @property
    def best_ns(self) -> float:
        """Its median."""
        return measured_view(self.best).median_ns

    def among(self, names: Sequence[str]) -> Iterator[str]:
        """'flash4', 'flash3 (1.31x)': the named backends that were measured, with times relative to the first."""
        known = [(row, ratio) for row, ratio in zip(self.rows, self.ratios, strict=True) if row.case.backend in names]
        for row, ratio in known:
            times = ratio / known[0][1]
            yield f"{row.case.backend}" + ("" if row is known[0][0] else f" ({format_ratio(times)})")

    def order_text(self) -> str:
        """'flash3, sdpa-cudnn (1.02x, tied), math (31x)': times as multiples of the fastest one's."""
        texts = [str(self.best.case.backend)]
        for row, ratio in zip(self.rows[1:], self.ratios[1:], strict=True):
            tied = ", tied" if row.case.backend in self.tied else ""
            texts.append(f"{row.case.backend} ({format_ratio(ratio)}{tied})")
        return ", ".join(texts)


def analyse(record: RunRecord, catalogue: Catalogue) -> tuple[Section, ...]:
    """The recommendation, then the kernels that ran; empty if no row with a backend was measured."""
    standings = standings_of(record)
    if not standings:
        return ()
    families = _families(record, standings, catalogue)
    recommendation, answer = _recommendation(record, standings, catalogue), _answer(record, standings, catalogue)
    return (recommendation, *families, _kernels(standings), answer)


def _answer(record: RunRecord, standings: Sequence[Standing], catalogue: Catalogue) -> Section:
    """The answer of every suite, with the implementations that it is about, and what `auto` prefers to them here."""
    found, measured = answer_section(record, LENGTH_AXIS), {row.case.implementation for row in record.rows}
    machine = Machine(device=record.device.partition(":")[0], gpus=record.environment.gpus)
    preferred: dict[str, None] = {}
    for case in (standing.best.case for standing in standings):
        least = catalogue.implementations.get(case.implementation).priority
        for other in catalogue.implementations:
            on_one = other.supports.max_world_size == 1 and other.takes == "heads"
            if other.uses_backend or not on_one or other.priority <= least or other.name in measured:
                continue
            way = case.model_copy(update={"implementation": other.name, "backend": None})
            if not (catalogue.reasons_against(way, machine) or catalogue.reasons_unasked(way, machine)):
                preferred.setdefault(other.name)
    names = listed(sorted({standing.best.case.implementation for standing in standings}), "and")
    more = f"; {listed(list(preferred), 'and')} needs no backend: `-i auto` prefers it here" if preferred else ""
    return replace(found, sentence=f"{found.sentence}\nAmong backends of {names}{more}.")


def _families(record: RunRecord, standings: Sequence[Standing], catalogue: Catalogue) -> Iterator[Section]:
    """Compare the generations of one kernel (FlashAttention 2, 3 and 4, say); why others did not run."""
    members: dict[str, list[str]] = {}
    for backend in catalogue.backends:
        if backend.family:
            members.setdefault(backend.family, []).append(backend.name)
    for family, names in members.items():
        orders = [(standing, tuple(standing.among(names))) for standing in standings]
        table = [
            (_subject(standing.best), standing.best.case.workload.dtype, order[0], ", ".join(order[1:]) or ABSENT)
            for standing, order in orders
            if order
        ]
        if not table:
            continue
        ran = {row.case.backend for standing in standings for row in standing.rows}
        whys = {
            row.case.backend: row.outcome.why
            for row in reversed(record.rows)
            if row.case.backend in names and row.case.backend not in ran and not isinstance(row.outcome, Measured)
        }
        first = dict.fromkeys(order[0] for _, order in orders if order)
        missing = "".join(f" {name} did not run: {why}." for name, why in whys.items())
        yield Section(
            title=f"{family}: {', '.join(names)}",
            sentence=f"Fastest of the backends that ran: {', '.join(first)}.{missing}",
            columns=("attention", "dtype", "fastest", "the others"),
            rows=tuple(table),
        )


def standings_of(record: RunRecord) -> tuple[Standing, ...]:
    """One standing per workload and implementation that ran over backends, in the order of the record."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in record.rows:
        if row.case.backend is not None and isinstance(row.outcome, Measured) and view_of(row):
            key = (row.case.group_id, row.case.implementation, row.case.optimizations.model_dump_json())
            groups.setdefault(key, []).append(row)
    standings = (_standing(rows, record.device) for rows in groups.values())
    return tuple(standing for standing in standings if standing is not None)


def _standing(rows: Sequence[Row], device: str) -> Standing | None:
    ranking = rank(rows, device)
    if ranking is None:
        return None
    ordered = sorted(
        (row for row in rows if row.case.case_id in ranking.speedups),
        key=lambda row: (row is not ranking.fastest, measured_view(row).median_ns),
    )
    views = pair_views([(ranking.fastest, row) for row in ordered], device)
    return Standing(
        rows=tuple(ordered),
        ratios=tuple(view.ratio for view in views),
        tied=frozenset(str(row.case.backend) for row in ranking.unproven),
    )


def _recommendation(record: RunRecord, standings: Sequence[Standing], catalogue: Catalogue) -> Section:
    subjects: dict[str, list[Standing]] = {}
    for standing in standings:
        subjects.setdefault(_subject(standing.best), []).append(standing)
    claims, table = [], []
    for subject, of_subject in subjects.items():
        chosen = recommended(of_subject)
        claims.append(f"{subject}: {chosen.best.case.backend} in {chosen.best.case.workload.dtype}")
        for standing in of_subject:
            mark = "*" if standing is chosen and len(of_subject) > 1 else ""
            dtype = f"{standing.best.case.workload.dtype}{mark}"
            best = format_latency(standing.best_ns)
            table.append((subject, dtype, best, standing.order_text(), _auto_text(record, standing, catalogue)))
    several = any(len(several_dtypes) > 1 for several_dtypes in subjects.values())
    star = f" (* the dtype to use: the fastest, or {WIDE_RANGE} within 3 % of it)" if several else ""
    return Section(
        title="Recommendation for this device",
        sentence=f"Measured on {device_text(record)}: {'; '.join(claims)}{star}.",
        columns=("attention", "dtype", "best", "backends, fastest first", "auto"),
        rows=tuple(table),
        numeric=frozenset({"best"}),
        plots=(_plot(standings),),
    )


def recommended(standings: Sequence[Standing]) -> Standing:
    """Choose among dtypes of one subject: the fastest, or bfloat16 if it is hardly slower."""
    fastest = min(standings, key=lambda standing: standing.best_ns)
    wide = [
        standing
        for standing in standings
        if standing.best.case.workload.dtype == WIDE_RANGE and standing.best_ns <= HARDLY * fastest.best_ns
    ]
    return next(iter(wide), fastest)


def _subject(row: Row) -> str:
    """The computation without its dtype: 'dense, 4x8K, both'."""
    workload = row.case.workload
    mode = "" if workload.mode == "forward" else f", {workload.mode}"
    shape = f"{workload.batch_size}x{format_count(workload.seq_len)}"
    name = row.case.implementation
    pattern = "" if name == workload.pattern.kind else f" on {workload.pattern.label()}"
    return f"{name}{pattern}, {shape}{mode}"


def _auto_text(record: RunRecord, standing: Standing, catalogue: Catalogue) -> str:
    """The backend that `auto` selects among these, and its time relative to the fastest."""
    machine = Machine(device=record.device.partition(":")[0], gpus=record.environment.gpus)
    preference = catalogue.preferred_backends(machine)
    names = [str(row.case.backend) for row in standing.rows]
    choice = next((name for name in preference if name in names), None)
    if choice is None:
        return "none of these"
    if choice == names[0] or choice in standing.tied:
        return f"{choice}: right"
    return f"{choice}: {format_ratio(standing.ratios[names.index(choice)])} the time of {names[0]}"


def _kernels(standings: Sequence[Standing]) -> Section:
    rows = [row for standing in standings for row in standing.rows]
    columns = ("implementation", "backend", "dtype", "longest kernel", "share of time", "launches", "kernels in all")
    return Section(
        title="Kernels that really ran",
        sentence="From the profile of one call per row: the kernels that each backend launched on this device.",
        columns=columns,
        rows=tuple(tuple(_kernel_row(row)) for row in rows),
        numeric=frozenset(columns[4:]),
    )


def _kernel_row(row: Row) -> Iterator[str]:
    assert isinstance(row.outcome, Measured)
    kernels = row.outcome.kernels
    yield row.case.implementation
    yield str(row.case.backend)
    yield row.case.workload.dtype
    if not kernels:
        yield from (ABSENT,) * 4
        return
    # On a CPU the profile also lists wrappers of operators.
    operators = [use for use in kernels if use.name.startswith(OPERATOR)] or list(kernels)
    longest = max(operators, key=lambda use: use.duration_ns)
    total = sum(use.duration_ns for use in kernels)
    yield short_name(longest)
    yield f"{longest.duration_ns / total:.0%}" if total else ABSENT
    yield str(longest.count)
    yield str(sum(use.count for use in kernels))


def short_name(kernel: KernelUse) -> str:
    """A kernel's name without its arguments, truncated for tables."""
    name = kernel.name.removeprefix("void ").removeprefix(OPERATOR).partition("(")[0]
    return name if len(name) <= MAX_KERNEL_NAME else f"{name[: MAX_KERNEL_NAME - 1]}…"


def _plot(standings: Sequence[Standing]) -> BarPlot:
    """Latency by backend; a group of bars per workload and implementation."""
    names = list(dict.fromkeys(str(row.case.backend) for standing in standings for row in standing.rows))
    categories: list[str] = []
    for best in (standing.best for standing in standings):
        dense = best.planned.role == "yardstick"
        subject = best.case.workload.pattern.kind if dense else best.case.implementation
        categories.append(f"{subject} {best.case.workload.dtype}")
    bars = []
    for name in names:
        views = [
            next((view_of(row) for row in standing.rows if row.case.backend == name), None) for standing in standings
        ]
        bars.append(latency_bars(name, views))
    return BarPlot(
        name="backends",
        title="Latency of one call by backend",
        value_label="latency (ms)",
        categories=tuple(categories),
        bars=tuple(bars),
    )

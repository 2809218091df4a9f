"""Suite `decode`: queries that are the last rows of a cache: one token, a few, a chunk; by its length and batch."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from dilabench.comparison.bounds import nearer_bound
from dilabench.comparison.view import RowView, measured_view
from dilabench.errors import ConfigError
from dilabench.metadata import COPY_KEY
from dilabench.patterns.dense import DENSE
from dilabench.plugins.axis import LENGTH
from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase, Row, RunRecord
from dilabench.report.answer import AnswerRow, answer
from dilabench.report.columns import ABSENT, COLUMNS
from dilabench.report.findings import Section
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner, preset_names, workload_request
from dilabench.units import counted, format_count, format_latency, percent_text, significant
from dilabench.workload.spec import AUTO, Workload, WorkloadRequest

# Keys and batch of the workloads of each preset: on a GPU caches of servers, on a CPU what is read in tens of
# milliseconds.
Sizes = tuple[tuple[int, int], ...]
ON_GPU: dict[str, Sizes] = {
    "llama3_8b_decode": ((2**12, 1), (2**12, 16), (2**15, 1), (2**15, 64), (2**17, 1)),
    "llama3_70b_tp8_decode": ((2**15, 1), (2**15, 64)),
    "gpt_oss_decode": ((2**15, 1), (2**15, 64)),
    "longnet_decode": ((2**16, 1), (2**18, 1), (2**20, 1)),
    "speculative_4": ((2**15, 1), (2**15, 8)),
    "chunked_prefill_2k": ((2**17, 1),),
    "mla_decode": ((2**15, 1),),
}
ON_CPU: dict[str, Sizes] = {
    "llama3_8b_decode": ((2**11, 1), (2**13, 1)),
    "longnet_decode": ((2**16, 1),),
    "speculative_4": ((2**11, 1), (2**11, 4)),
}
COLUMNS_OF_ANSWER = (
    "workload",
    "keys",
    "batch",
    "queries",
    "fastest",
    "call",
    "per token",
    "GB/s",
    "of a copy",
    "bound",
)
NUMERIC = frozenset({"keys", "batch", "queries", "call", "per token", "GB/s", "of a copy"})


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every implementation that takes fewer queries than keys, for each preset, number of keys and batch.

    A preset without `query_len` gets one query. Dense attention is planned over the backend that `auto` takes and every
    other that can run here, that a choice by measurement tries and that does not compile for long. Other patterns are
    planned over the former, with dense attention as an unranked reference. Implementations that compute every row are
    planned only if they are named; their rows say why they are skipped. Raises ConfigError if the batch is set twice.
    """
    implementations = planner.implementations(planner.where(_takes_last_rows))
    kernels = (AUTO, *(backend.name for backend in planner.catalogue.backends if not backend.compiles))
    cases: list[PlannedCase] = []
    for asked in _workloads(request, planner):
        if request.implementations or request.backends:
            cases += planner.compare([asked], implementations)
            continue
        computing = [way for way in implementations if way.supports.only_dense or way.supports.computes(asked.pattern)]
        every = planner.asking(backends=kernels) if asked.pattern == DENSE.kind else planner
        running = [
            planned
            for planned in every.compare([asked], computing)
            if planned.skip is None and not planner.catalogue.reasons_untried(planned.case, planner.machine)
        ]
        cases += running or planner.compare([asked], computing)
    by_id = {planned.case.case_id: planned for planned in reversed(cases)}
    return tuple(reversed(by_id.values()))


def _takes_last_rows(implementation: Implementation) -> bool:
    supports = implementation.supports
    on_one_device = supports.max_world_size == 1 and implementation.takes == "heads"
    return supports.last_rows and on_one_device and not implementation.compiles


def _workloads(request: RunRequest, planner: Planner) -> Iterator[WorkloadRequest]:
    """The requests of each preset, in ascending order of keys."""
    batches, overrides = request.options.get("batches", ()), request.overrides
    if batches and "batch_size" in overrides:
        given = ",".join(map(str, batches))
        raise ConfigError(
            f"--batches {given} and batch_size={overrides['batch_size']} both set the batch; leave one out"
        )
    on_gpu = planner.machine.facts.own_memory
    usual = {} if request.presets else ON_GPU if on_gpu else ON_CPU
    found: dict[WorkloadRequest, None] = {}
    for name in preset_names(planner.catalogue, request.presets or usual):
        preset = workload_request(planner.catalogue, name, overrides)
        fields = {"query_len": 1, **preset.model_dump(exclude_unset=True)}
        if usual and not on_gpu:
            # Caches of servers are in half precision, which few CPUs compute.
            fields["dtype"] = overrides.get("dtype", AUTO)
        sizes = usual.get(name, ((preset.seq_len, preset.batch_size),))
        if request.lengths or batches or {"seq_len", "batch_size"} & overrides.keys():
            lengths, of_batch = (tuple(dict.fromkeys(numbers)) for numbers in zip(*sizes, strict=True))
            lengths = request.lengths or ((preset.seq_len,) if "seq_len" in overrides else lengths)
            of_batch = batches or ((preset.batch_size,) if "batch_size" in overrides else of_batch)
            sizes = tuple(product(lengths, of_batch))
        for length, size in sizes:
            found.setdefault(
                workload_request(planner.catalogue, None, {**fields, "seq_len": length, "batch_size": size})
            )
    yield from sorted(found, key=lambda asked: asked.seq_len)


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """The time of a call and of a token of the fastest row of each workload, and how close it is to a copy."""
    found = answer(record, LENGTH)
    timed = [(line, line.fastest) for line in found.rows if line.fastest is not None]
    if not timed:
        return ()
    texts = [found.counts, _reached([measured_view(row) for _, row in timed], record.ceilings)]
    without = Counter(line.why_none for line in found.rows if line.fastest is None)
    texts += [f"Without a time: {counted(count, 'workload')}, {why}." for why, count in without.items()]
    section = Section(
        title="Answer",
        sentence="\n".join(texts),
        columns=COLUMNS_OF_ANSWER,
        rows=tuple(_line(line, row, record.ceilings) for line, row in timed),
        numeric=NUMERIC,
        answers=True,
        headed=True,
        spare=("GB/s", "queries"),
    )
    return (section,)


def _reached(views: Sequence[RowView], ceilings: Mapping[str, float]) -> str:
    """The range of GB/s of the rows that memory bounds, and of their shares of a copy."""
    copy = ceilings.get(COPY_KEY)
    if copy is None:
        rates = sorted(view.bytes_per_s for view in views)
        return f"The fastest rows move the bytes that they need at {_range(rates, _gb_per_s)} GB/s."
    bounds = [nearer_bound(view, ceilings) for view in views]
    rates = sorted(
        view.bytes_per_s for view, bound in zip(views, bounds, strict=True) if bound and bound.name == "memory"
    )
    if not rates:
        return "Computing bounds every workload, not memory."
    share = _range([rate / copy for rate in rates], percent_text)
    return (
        f"Where memory bounds them, the fastest rows move the bytes that they need at {_range(rates, _gb_per_s)} GB/s, "
        f"{share} of the {_gb_per_s(copy)} GB/s that a copy reaches here."
    )


def _range(values: Sequence[float], text: Callable[[float], str]) -> str:
    ends = dict.fromkeys((text(values[0]), text(values[-1])))
    return " to ".join(ends)


def _gb_per_s(rate: float) -> str:
    return significant(rate / 1e9, 3)


def _line(line: AnswerRow, row: Row, ceilings: Mapping[str, float]) -> tuple[str, ...]:
    workload, view = row.case.workload, measured_view(row)
    copy, bound = ceilings.get(COPY_KEY), nearer_bound(view, ceilings)
    return (
        _heading(workload),
        format_count(workload.seq_len),
        str(workload.batch_size),
        format_count(workload.rows),
        line.winner,
        COLUMNS["median"].value_text(view),
        format_latency(view.median_ns / workload.tokens),
        COLUMNS["GB/s"].value_text(view),
        ABSENT if copy is None else percent_text(view.bytes_per_s / copy),
        ABSENT if bound is None else bound.name,
    )


def _heading(workload: Workload) -> str:
    """The parts of the label that do not vary with keys, queries and batch."""
    _, _, rest = workload.label().partition(f" of {format_count(workload.seq_len)} ")
    return f"{rest or workload.label()} · {workload.pattern.label()} · {workload.mode}"

"""Suite `field`: the time of each public project and the fastest of dilabench, differing functions, and how to install
missing projects.
"""

from collections.abc import Iterable, Iterator, Sequence

from dilabench.comparison.view import measured_view, pair_views, view_of
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Implementation
from dilabench.record import Failed, Measured, Row, RunRecord
from dilabench.report.columns import ABSENT, row_name
from dilabench.report.findings import Section
from dilabench.suites import overview
from dilabench.suites.ring import findings as over_ranks
from dilabench.units import format_latency
from dilabench.workload.spec import Workload

TITLE = "The field"
COLUMNS = ("workload", "peer", "ranks", "median", "fastest of ours", "median of ours", "theirs / ours")
MEANING = (
    "Public projects' own code on the workloads that it computes, verified and timed in the same rounds as dilabench. "
    "theirs / ours above 1 means that dilabench is faster; the 95 % interval is over common rounds."
)
NONE = "No public project was measured."
ELSEWHERE = "Without a time"
WHY = ("peer", "workload", "why")
TO_GET = ("project", "why", "how to get it")


def analyse(record: RunRecord, catalogue: Catalogue) -> tuple[Section, ...]:
    """Peers against dilabench, peers on workloads that they do not compute, missing peers, and suite `ring`."""
    registry = catalogue.implementations
    peers = {peer.name: peer for peer in registry if peer.project is not None and peer.takes != "model"}
    rows = [row for row in record.rows if row.case.implementation in peers]
    ours = [row for row in record.rows if row.case.implementation in registry and row.case.implementation not in peers]
    measured = [row for row in rows if isinstance(row.outcome, Measured)]
    ran = {row.case.implementation for row in rows if isinstance(row.outcome, Measured | Failed)}
    return (
        Section(
            title=TITLE,
            sentence=MEANING if measured else NONE,
            columns=COLUMNS if measured else (),
            rows=tuple(_against_ours(row, ours, record.device) for row in measured),
            numeric=frozenset(COLUMNS[2:]) - {"fastest of ours"},
            headed=bool(measured),
        ),
        *_elsewhere([row for row in rows if row.case.implementation in ran and row not in measured]),
        *_missing([peer for peer in peers.values() if peer.name not in ran], record),
        *over_ranks.analyse(record, catalogue),
        *overview.analyse(record),
    )


def _against_ours(row: Row, ours: Sequence[Row], device: str) -> tuple[str, ...]:
    """A peer's row and dilabench's fastest row of the same workload and number of ranks."""
    case, theirs = row.case, measured_view(row)
    rivals = [
        view
        for rival in ours
        if (rival.case.workload, rival.case.world_size, rival.planned.takes)
        == (case.workload, case.world_size, row.planned.takes)
        and (view := view_of(rival)) is not None
    ]
    best = min(rivals, key=lambda view: view.median_ns, default=None)
    return (
        _workload_text(row),
        row_name(row),
        str(case.world_size),
        format_latency(theirs.median_ns),
        ABSENT if best is None else row_name(best.row),
        ABSENT if best is None else format_latency(best.median_ns),
        ABSENT if best is None else pair_views([(best.row, row)], device)[0].text,
    )


def _elsewhere(rows: Sequence[Row]) -> Iterator[Section]:
    if rows:
        lines = tuple((row.case.implementation, _workload_text(row), _why(row)) for row in rows)
        sentence = "Workloads that a project does not compute, or cannot run here; they have no time."
        yield Section(title=ELSEWHERE, sentence=sentence, columns=WHY, rows=lines)


def _missing(peers: Sequence[Implementation], record: RunRecord) -> Iterator[Section]:
    """A line for each project and reason, even if several of its implementations share it."""
    if peers:
        whys = {row.case.implementation: _why(row) for row in record.rows}
        workloads = [(row.case.workload, row.case.world_size > 1) for row in record.rows]
        lines = dict.fromkeys(
            (str(peer.project), whys.get(peer.name) or _unasked(peer, workloads), peer.install or ABSENT)
            for peer in peers
        )
        sentence = "Public projects that have an adapter in dilabench and no measured row."
        yield Section(title="Not in this run", sentence=sentence, columns=TO_GET, rows=tuple(lines))


def _unasked(peer: Implementation, workloads: Iterable[tuple[Workload, bool]]) -> str:
    """Why it has no row in a run of these workloads, each on one device or over ranks."""
    supports = peer.supports
    over_ranks = supports.max_world_size != 1
    layouts = {one.layout for one, ranks in workloads if supports.computes(one.pattern.kind) and ranks == over_ranks}
    if layouts & supports.layouts:
        return f"was not requested (-i {peer.name})"
    if layouts:
        return f"computes {' or '.join(sorted(supports.layouts))} sequences"
    if over_ranks and not any(ranks for _, ranks in workloads):
        return "computes over ranks, and this run has none (--nproc 2)"
    return f"computes other patterns (--set pattern={min(supports.patterns)})"


def _why(row: Row) -> str:
    """The diagnosed mistake of a wrong output, or the reason for the missing time."""
    outcome = row.outcome
    if isinstance(outcome, Measured):
        return ABSENT
    if isinstance(outcome, Failed) and outcome.verification and outcome.verification.diagnosis:
        return f"wrong output: {outcome.verification.diagnosis}"
    return outcome.why


def _workload_text(row: Row) -> str:
    workload = row.case.workload
    return f"{workload.label()}, {workload.pattern.label()}, {workload.mode}"

"""The answer of a run: the fastest implementation at each length (or density, rank count), and one sentence on it.

One rule decides on rivals, full attention and one device (`comparison.view`). "Faster" means proven: the 95 % interval of
the ratio over common rounds is beyond the margin of `compare`; the interval is in the row. "Probably" means that the
two shared too few rounds or none, and that the intervals of their medians do not overlap. Otherwise rows are tied.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

from dilabench.comparison.view import PairView, Ranking, is_quotable, measured_view, pair_views, rank, view_of
from dilabench.plugins.axis import Axis
from dilabench.record import Failed, Measured, Row, RunRecord, SkipCode, Skipped
from dilabench.report.columns import ABSENT, COLUMNS, Column, row_name
from dilabench.report.content import WorkloadTable, is_unranked, shape_of, workload_tables
from dilabench.stats.decisions.paired import MIN_ROUNDS
from dilabench.units import counted
from dilabench.workload.spec import Workload

TITLE = "Answer"
# Before a ratio that is not proven to be another than 1.
ABOUT = "≈"
ONE_DEVICE = "vs one device"
NEXT = "next, 95 % CI"
PROBABLY = "probably"
HOW_TO_PROVE = f"fewer than {MIN_ROUNDS} rounds in common; a longer --budget decides it"
SEPARATELY = "measured separately"
# A sentence on each of more workloads than this would be no sentence any more.
MAX_WORKLOADS = 3
# A longer reason is left to the list of skipped rows.
MAX_WHY, UNSUPPORTED = 40, "is not supported"
# As many reasons why nothing has a time are named.
MOST_NAMED = 2
WHY_NONE: dict[SkipCode, str] = {"budget": "time ran out", "does_not_fit": "does not fit into memory"}
SAYS_NOTHING = {"", ABSENT}
# Omitted if a terminal is too narrow, the first one first.
SPARE = ("memory", "verified")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """The fastest implementation of one workload.

    `value`: its place on the axis, `at` as a text; `workload`: what else distinguishes it from other workloads.
    `ranking` is None if no row has a time to quote, and `why_none` says why. The three views compare the fastest row
    (the baseline) with the nearest rival, with `dense` (full attention), and with the fastest row on one device if this
    workload is over ranks. Each is None without such a row.
    """

    value: float
    at: str
    batch: int
    workload: str
    ranking: Ranking | None
    why_none: str = ""
    nearest: PairView | None = None
    dense: Row | None = None
    versus_dense: PairView | None = None
    versus_one: PairView | None = None

    @property
    def winner(self) -> str:
        """As `winner_text`, or 'not measured: time ran out'."""
        return f"not measured: {self.why_none}" if self.ranking is None else winner_text(self.ranking)

    @property
    def fastest(self) -> Row | None:
        """The row that is proven to be fastest, or the one with the smallest median if none is proven."""
        return None if self.ranking is None else self.ranking.fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All lines of an answer, by workload and then along the axis."""

    axis: str
    rows: tuple[AnswerRow, ...]

    @property
    def sentence(self) -> str:
        """The answer as text: the winners along the axis, and the places at which full attention is faster."""
        if not self.rows:
            return "Nothing was measured."
        by_workload = [list(rows) for _, rows in groupby(self.rows, key=lambda row: row.workload)]
        if len(by_workload) > MAX_WORKLOADS:
            counts = Counter(row.winner.partition(":")[0] for row in self.rows).most_common()
            won = f"Fastest in {len(self.rows)} workloads: {', '.join(f'{name} {count}' for name, count in counts)}."
            return " ".join([won, *_dense_counts(self.rows)])
        parts = [
            part
            for rows in by_workload
            for part in _sentences(rows, rows[0].workload if len(by_workload) > 1 else "", self.axis)
        ]
        if any(_is_undecided(row.versus_one) for row in self.rows):
            parts.append(f"{ABOUT}: no difference from one device is proven or probable.")
        return " ".join(parts)

    def table(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], frozenset[str]]:
        """Column names, cells, and the columns of numbers; columns without information are omitted."""
        columns = (Column(name=self.axis, cell=lambda row: row.at, spare=None), *ANSWER_COLUMNS)
        texts = {column.name: [column.value_text(row) for row in self.rows] for column in columns}
        shown = [column for column in columns if column.spare is None or not set(texts[column.name]) <= SAYS_NOTHING]
        if set(texts["batch"]) == {"1"}:
            shown = [column for column in shown if column.name != "batch"]
        cells = zip(*(texts[column.name] for column in shown), strict=True)
        return (
            tuple(column.name for column in shown),
            tuple(cells),
            frozenset(column.name for column in shown if column.right),
        )


# Columns with `spare` are omitted if no row has a value.
ANSWER_COLUMNS = (
    Column(name="batch", cell=lambda row: row.batch, spare=None),
    Column(name="workload", cell=lambda row: row.workload, right=False),
    Column(name="fastest", cell=lambda row: row.winner, right=False, spare=None),
    Column(name="time", cell=lambda row: _of_fastest("median", row), spare=None),
    Column(name=NEXT, cell=lambda row: row.nearest and row.nearest.text),
    Column(name="vs dense", cell=lambda row: _versus(row.versus_dense)),
    Column(name=ONE_DEVICE, cell=lambda row: _versus(row.versus_one)),
    Column(name="memory", cell=lambda row: _of_fastest("peak mem.", row)),
    Column(name="verified", cell=lambda row: _of_fastest("verified", row), right=False, spare=None),
)


def winner_text(ranking: Ranking) -> str:
    """'fused', 'probably fused', 'only fused' or 'tie: fused, strided'."""
    name = row_name(ranking.fastest)
    if len(ranking.speedups) == 1:
        return f"only {name}"
    if ranking.probable:
        return f"{PROBABLY} {name}"
    return name if ranking.proven else f"tie: {', '.join(map(row_name, (ranking.fastest, *ranking.tied)))}"


def answer(record: RunRecord, axis: Axis) -> Answer:
    """The answer of a record along an axis; if all rows of a workload are unranked references, these are ranked."""
    tables = [table for table in workload_tables(record) if table.members]
    firsts = [table.members[0] for table in tables]
    values = [axis.value(row.planned) for row in firsts]
    texts = _labels(firsts, values, axis)
    full: dict[tuple[Workload, int], list[Row]] = {}
    for row in record.rows:
        if row.planned.role == "yardstick" and row.case.workload.is_dense:
            full.setdefault(shape_of(row.case), []).append(row)
    lines = [
        _answer_row(table, record, value, axis.text(value), text)
        for table, value, text in zip(tables, values, texts, strict=True)
    ]
    alone = {
        first.case.workload: line.fastest
        for first, line in zip(firsts, lines, strict=True)
        if line.fastest and first.case.world_size == 1
    }
    dense = [_dense_rival(table, full) for table in tables]
    rows = _against_rivals(lines, tables, dense, [alone.get(first.case.workload) for first in firsts], record.device)
    order = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    return Answer(axis=axis.name, rows=tuple(sorted(rows, key=lambda row: (order[row.workload], row.value))))


def _labels(firsts: Sequence[Row], values: Sequence[float], axis: Axis) -> list[str]:
    """For each workload the text that distinguishes it from others at the same place on the axis."""
    parts = [
        {
            "pattern": row.case.workload.pattern.label(),
            "mode": row.case.workload.mode,
            "dtype": row.case.workload.dtype,
            "heads": f"H{row.case.workload.num_heads}/{row.case.workload.num_kv_heads} D{row.case.workload.head_dim}",
            "mask": "causal" if row.case.workload.causal else "not causal",
            "window": f"window {row.case.workload.window[0]},{row.case.workload.window[1]}",
            "length": f"{row.case.workload.batch_size}x{row.case.workload.seq_len}",
            "ranks": f"{row.case.world_size} ranks",
        }
        for row in firsts
    ]
    telling: list[str] = []
    for name in parts[0] if parts else ():
        seen: dict[float, set[str]] = {}
        for value, part in zip(values, parts, strict=True):
            seen.setdefault(value, set()).add(part[name])
        if name != axis.name and any(len(values_seen) > 1 for values_seen in seen.values()):
            telling.append(name)
    return [" ".join(part[name] for name in telling) for part in parts]


def _answer_row(table: WorkloadTable, record: RunRecord, value: float, at: str, workload: str) -> AnswerRow:
    """The line of a table, without comparisons."""
    own = next((section.ranking for section in table.sections if section.ranking is not None), None)
    if is_unranked(table.members):
        own = rank([row for row in table.members if row.case.workload.is_dense], record.device)
    batch = table.members[0].case.workload.batch_size
    why = _why_none(table.members, record.status) if own is None else ""
    return AnswerRow(value=value, at=at, batch=batch, workload=workload, ranking=own, why_none=why)


def _dense_rival(table: WorkloadTable, full: Mapping[tuple[Workload, int], Sequence[Row]]) -> Row | None:
    """The fastest row of full attention with the table's shape; None without a time or if such rows are ranked."""
    rows = () if is_unranked(table.members) else full.get(shape_of(table.members[0].case), ())
    return min(filter(is_quotable, rows), key=lambda row: measured_view(row).median_ns, default=None)


def _against_rivals(
    lines: Sequence[AnswerRow],
    tables: Sequence[WorkloadTable],
    dense: Sequence[Row | None],
    alone: Sequence[Row | None],
    device: str,
) -> list[AnswerRow]:
    """The lines with their comparisons, whose statistics are computed together."""
    rivals = [
        ([], None, None)
        if line.ranking is None
        else (_other_ranked(table.members, line.ranking), full, None if single is line.fastest else single)
        for line, table, full, single in zip(lines, tables, dense, alone, strict=True)
    ]
    pairs = [
        (line.fastest, rival)
        for line, (others, *further) in zip(lines, rivals, strict=True)
        for rival in (*others, *further)
        if line.fastest is not None and rival is not None
    ]
    views = iter(pair_views(pairs, device))
    return [
        replace(
            line,
            nearest=min(islice(views, len(others)), key=lambda view: view.ratio, default=None),
            dense=full,
            versus_dense=None if full is None else next(views),
            versus_one=None if single is None else next(views),
        )
        for line, (others, full, single) in zip(lines, rivals, strict=True)
    ]


def _other_ranked(rows: Sequence[Row], ranking: Ranking) -> list[Row]:
    """The ranked rows but the fastest."""
    others = (row for row in rows if row is not ranking.fastest and isinstance(row.outcome, Measured))
    return [row for row in others if row.case.case_id in ranking.speedups]


def _why_none(rows: Sequence[Row], status: str) -> str:
    """What kept rows from a time; what rows do not support only if no other reason kept any.

    Cases to which an interrupted run did not come have no row.
    """
    codes: dict[str, None] = {}
    unsupported: dict[str, None] = {}
    for row in rows:
        outcome = row.outcome
        if isinstance(outcome, Failed):
            codes.setdefault("FAILED")
        elif isinstance(outcome, Skipped) and outcome.code == "unsupported":
            # The list of skipped rows has the cause, in brackets.
            why = outcome.why.partition(" (")[0]
            unsupported.setdefault(f"{row.case.implementation} {why if len(why) <= MAX_WHY else UNSUPPORTED}")
        elif isinstance(outcome, Skipped):
            codes.setdefault(WHY_NONE.get(outcome.code, outcome.code.replace("_", " ")))
    if not codes and status == "interrupted":
        return "the run was interrupted"
    if not codes and unsupported:
        named = list(unsupported)[:MOST_NAMED]
        others = len(unsupported) - len(named)
        return ", ".join(named) + (f" and {counted(others, 'other reason')}" if others else "")
    return ", ".join(codes) or "every time is impossible"


def _sentences(rows: Sequence[AnswerRow], workload: str, axis: str) -> Iterator[str]:
    """The sentences on the lines of one workload, in the order of the axis."""
    texts = []
    for (name, claim), places in _gathered(rows).items():
        where = f"{axis} {_runs(places, rows)}"
        if not claim and rows[places[0]].ranking is None:
            texts.append(f"{where} {name}")
            continue
        timed = f" ({_of_fastest('median', rows[0])})" if len(rows) == 1 and rows[0].fastest else ""
        probable = [place for place in places if _is_probable(rows[place])]
        doubt = ""
        if len(probable) == len(places):
            claim, doubt = claim and f"is {PROBABLY} fastest", f" ({HOW_TO_PROVE})"
        elif probable:
            doubt = f", {PROBABLY} at {_runs(probable, rows)} ({HOW_TO_PROVE})"
        texts.append(f"{' '.join(filter(None, (name, claim)))} at {where}{timed}{doubt if probable else ''}")
    yield f"{workload}: {'; '.join(texts)}." if workload else f"{'; '.join(texts)}."
    dense = next((row.dense for row in rows if row.dense), None)
    sides = [
        f"{side} at {axis} {_runs(places, rows)}"
        for side, faster in (("faster", "candidate"), ("slower", "baseline"))
        if (places := [at for at, row in enumerate(rows) if row.versus_dense and row.versus_dense.faster == faster])
    ]
    if dense and sides:
        separately = any(row.versus_dense.faster and not row.versus_dense.proven for row in rows if row.versus_dense)
        is_, why = (f"is {PROBABLY}", f" ({SEPARATELY})") if separately else ("is", "")
        yield f"Full attention ({row_name(dense)}), another function, {is_} {' and '.join(sides)}{why}."
    if short := _in_short(rows, axis):
        yield short
    if any(_is_undecided(row.versus_dense) for row in rows):
        yield f"{ABOUT}: no difference from full attention is proven or probable."


def _dense_counts(rows: Sequence[AnswerRow]) -> Iterator[str]:
    """In how many workloads full attention is slower than the fastest, and in how many faster."""
    views = [row.versus_dense for row in rows if row.versus_dense]
    counts = Counter("slower" if view.faster == "baseline" else "faster" for view in views if view.faster)
    if counts:
        sides = " and ".join(f"{side} in {counts[side]}" for side in ("slower", "faster") if counts[side])
        doubt = f"{PROBABLY} " if any(view.faster and not view.proven for view in views) else ""
        yield f"Full attention, another function, is {doubt}{sides} of the {len(views)} where it was measured."


def _in_short(rows: Sequence[AnswerRow], axis: str) -> str | None:
    """Return the recommendation per place, full attention included: 'In short: dense up to length 4K, fused from length
    8K on.'

    None unless every place has a choice, the choices differ, and each covers one range. The text says "probably" if
    full attention was measured separately.
    """
    names = [row_name(choice) if choice else None for choice in map(_choice, rows)]
    runs = [
        (name, [place for place, _ in group]) for name, group in groupby(enumerate(names), key=lambda entry: entry[1])
    ]
    if None in names or len(runs) < 2 or len(runs) != len(set(names)):
        return None
    texts = [f"{name} at {axis} {_runs(places, rows)}" for name, places in runs]
    texts[0] = f"{runs[0][0]} up to {axis} {rows[runs[0][1][-1]].at}"
    texts[-1] = f"{runs[-1][0]} from {axis} {rows[runs[-1][1][0]].at} on"
    separately = any(row.versus_dense and not row.versus_dense.proven for row in rows)
    return f"In short{f', {PROBABLY}' if separately else ''}: {', '.join(texts)}."


def _choice(row: AnswerRow) -> Row | None:
    """The fastest row, full attention included; None if it is neither proven nor, for full attention, probable."""
    if row.ranking is None or _is_undecided(row.versus_dense):
        return None
    if row.versus_dense is not None and row.versus_dense.faster == "candidate":
        return row.dense
    return row.fastest if row.ranking.proven or len(row.ranking.speedups) == 1 else None


def _gathered(rows: Sequence[AnswerRow]) -> dict[tuple[str, str], list[int]]:
    """The places on the axis by name and claim; tied or single rows have an empty claim."""
    found: dict[tuple[str, str], list[int]] = {}
    for place, row in enumerate(rows):
        claimed = row.ranking and (row.ranking.proven or _is_probable(row))
        key = (row_name(row.ranking.fastest), "is fastest") if row.ranking and claimed else (row.winner, "")
        found.setdefault(key, []).append(place)
    return found


def _is_probable(row: AnswerRow) -> bool:
    return row.ranking is not None and row.ranking.probable


def _runs(places: Sequence[int], rows: Sequence[AnswerRow]) -> str:
    """Places on the axis, neighbours together: '512 to 4K, 16K'."""
    texts = []
    for _, group in groupby(enumerate(places), key=lambda entry: entry[1] - entry[0]):
        run = [place for _, place in group]
        ends = rows[run[0]].at, rows[run[-1]].at
        texts.append(ends[0] if len(run) == 1 else ", ".join(ends) if len(run) == 2 else " to ".join(ends))
    return ", ".join(texts)


def _of_fastest(name: str, row: AnswerRow) -> str | None:
    """The cell of a table's column for the fastest row."""
    view = row.fastest and view_of(row.fastest)
    return COLUMNS[name].value_text(view) if view else None


def _is_undecided(view: PairView | None) -> bool:
    return view is not None and view.faster is None


def _versus(view: PairView | None) -> str | None:
    """The ratio, after '≈' if neither side is faster."""
    return None if view is None else (ABOUT if _is_undecided(view) else "") + view.text

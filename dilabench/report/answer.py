"""The answer of a run: the decision in one line, full attention in a second, and the fastest at each length in a table.

One rule decides on rivals, full attention and one device (`comparison.view`). "Faster" means proven: the 95 % interval
of the ratio over common rounds is beyond the margin of `compare`; the interval is in the row. "Probably" means that the
two shared too few rounds or none, and differ by more than sessions of identical code do. Otherwise rows are tied.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from itertools import groupby, islice

from dilabench.comparison.view import PairView, Ranking, is_quotable, measured_view, pair_views, rank, view_of
from dilabench.errors import listed
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
HOW_TO_PROVE = f"fewer than {MIN_ROUNDS} rounds in common; a new run with a longer --budget decides it"
SEPARATELY = "measured separately"
PROBABLY = "probably"
# More neighbouring places become a range.
MOST_PLACES = 3
# A sentence on each of more workloads than this would be no sentence any more.
MAX_WORKLOADS = 3
# A longer reason is left to the list of skipped rows.
MAX_WHY, UNSUPPORTED = 40, "is not supported"
# As many reasons why nothing has a time are named.
MOST_NAMED = 2
WHY_NONE: dict[SkipCode, str] = {"does_not_fit": "does not fit into memory"}
SAYS_NOTHING = {"", ABSENT}
# Omitted if a terminal is too narrow, the first one first.
SPARE = ("memory", "verified")


class Decided(IntEnum):
    """The kind of result of one place, in the order of an answer. ALONE: one row, so no comparison."""

    WON = auto()
    TIE = auto()
    ALONE = auto()
    NOTHING = auto()


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
        """As `winner_text`, or 'not measured': the sentence has the reason."""
        return "not measured" if self.ranking is None else winner_text(self.ranking)

    @property
    def fastest(self) -> Row | None:
        """The row that is proven to be fastest, or the one with the smallest median if none is proven."""
        return None if self.ranking is None else self.ranking.fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All lines of an answer, by workload and then along the axis."""

    axis: Axis
    rows: tuple[AnswerRow, ...]

    @property
    def sentence(self) -> str:
        """The answer as text: in the first line who is fastest where, then in one line where full attention is faster.

        Several workloads have such lines each, and only counts if they are more than MAX_WORKLOADS.
        """
        if not self.rows:
            return "Nothing was measured."
        by_workload = [list(rows) for _, rows in groupby(self.rows, key=lambda row: row.workload)]
        if len(by_workload) > MAX_WORKLOADS:
            return self.counts
        return "\n".join(
            line
            for rows in by_workload
            for line in _lines(rows, rows[0].workload if len(by_workload) > 1 else "", self.axis)
        )

    @property
    def counts(self) -> str:
        """How many workloads each implementation is fastest in, and in a further line full attention, if measured."""
        return "\n".join(_counts(self.rows))

    def table(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], frozenset[str]]:
        """Column names, cells, and the columns of numbers; columns without information are omitted.

        Only rows that were measured: the sentence says why others were not.
        """
        rows = [row for row in self.rows if row.ranking]
        if not rows:
            return (), (), frozenset()
        columns = (Column(name=self.axis.name, cell=lambda row: row.at, spare=None), *ANSWER_COLUMNS)
        texts = {column.name: [column.value_text(row) for row in rows] for column in columns}
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


def decided(ranking: Ranking | None) -> Decided:
    """The kind of result of a ranking; WON is proven or probable."""
    if ranking is None:
        return Decided.NOTHING
    if len(ranking.speedups) == 1:
        return Decided.ALONE
    return Decided.WON if ranking.proven or ranking.probable else Decided.TIE


def winner_text(ranking: Ranking) -> str:
    """'fused', 'probably fused', 'tie: fused, strided', or 'alone: fused' (no comparison)."""
    name, kind = row_name(ranking.fastest), decided(ranking)
    if kind is Decided.ALONE:
        return f"alone: {name}"
    if kind is Decided.TIE:
        return f"tie: {', '.join(map(row_name, (ranking.fastest, *ranking.tied)))}"
    return f"{PROBABLY} {name}" if ranking.probable else name


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
    return Answer(axis=axis, rows=tuple(sorted(rows, key=lambda row: (order[row.workload], row.value))))


def _labels(firsts: Sequence[Row], values: Sequence[float], axis: Axis) -> list[str]:
    """For each workload the text that distinguishes it from others at the same place on the axis."""
    parts = [
        {
            "pattern": row.case.workload.pattern.label(),
            "mode": row.case.workload.mode,
            "dtype": row.case.workload.dtype,
            "heads": f"H{row.case.workload.num_heads}/{row.case.workload.num_kv_heads} {row.case.workload.dim_label()}",
            "mask": "causal" if row.case.workload.causal else "not causal",
            "softcap": f"softcap {row.case.workload.softcap or 'none'}",
            "window": f"window {row.case.workload.window[0]},{row.case.workload.window[1]}",
            "queries": row.case.workload.queries_label(),
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
    """Why rows have no time; a missing support is named only without any other reason.

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
        elif isinstance(outcome, Skipped) and outcome.code == "budget":
            # The reason names the budget; its end says at what stage it was used up.
            codes.setdefault(f"{outcome.why.partition(' used up')[0]} used up")
        elif isinstance(outcome, Skipped):
            codes.setdefault(WHY_NONE.get(outcome.code, outcome.code.replace("_", " ")))
    if not codes and status == "interrupted":
        return "the run was interrupted"
    if not codes and unsupported:
        named = list(unsupported)[:MOST_NAMED]
        others = len(unsupported) - len(named)
        return ", ".join(named) + (f" and {counted(others, 'other reason')}" if others else "")
    return ", ".join(codes) or "every time is impossible"


def _lines(rows: Sequence[AnswerRow], workload: str, axis: Axis) -> Iterator[str]:
    """The lines on one workload: the decision, and full attention if it was measured. `rows`: along the axis."""
    parts = list(_decisions(rows, axis))
    text = "; ".join(parts)
    yield f"{workload}: {text}." if workload else f"{text[0].upper()}{text[1:]}."
    if line := _versus_line(rows, axis, [row.versus_dense for row in rows]):
        dense = next(row_name(row.dense) for row in rows if row.dense)
        yield f"Full attention ({dense}), another function: {line}."
    if line := _versus_line(rows, axis, [row.versus_one for row in rows]):
        yield f"One device: {line}."


def _decisions(rows: Sequence[AnswerRow], axis: Axis) -> Iterator[str]:
    """For each group of places with one result: who is fastest there, or why that is not known.

    One device alone is left to the line that compares it with ranks.
    """
    fastest = "fastest "
    over_ranks = any(row.versus_one for row in rows)
    timed = f" ({_of_fastest('median', rows[0])})" if len(rows) == 1 and rows[0].fastest else ""
    for (kind, name), places in sorted(_gathered(rows).items(), key=lambda entry: entry[0][0]):
        where = axis.where(_places(places, rows))
        if kind is Decided.WON:
            probable = [place for place in places if (ranking := rows[place].ranking) and ranking.probable]
            doubt = _doubt(probable, places, rows, axis, PROBABLY)
            yield f"{fastest}{where}: {name}{timed}{doubt}"
            fastest = ""
        elif kind is Decided.TIE:
            few = [place for place in places if (ranking := rows[place].ranking) and ranking.too_few_rounds]
            yield f"no difference proven {where} between {name}{timed}{_doubt(few, places, rows, axis)}"
        elif kind is Decided.ALONE and over_ranks and all(_is_one_device(rows[place]) for place in places):
            continue
        elif kind is Decided.ALONE:
            yield f"only {name} was measured {where}{timed}: no comparison"
        else:
            yield f"not measured {where}: {name}"


def _doubt(
    doubtful: Sequence[int], places: Sequence[int], rows: Sequence[AnswerRow], axis: Axis, word: str = ""
) -> str:
    """In brackets what would prove a difference at those of the places that are doubtful; empty without any."""
    at = "" if len(doubtful) == len(places) else axis.where(_places(doubtful, rows))
    where = " ".join(filter(None, (word, at)))
    return f" ({': '.join(filter(None, (where, HOW_TO_PROVE)))})" if doubtful else ""


def _is_one_device(row: AnswerRow) -> bool:
    return row.fastest is not None and row.fastest.case.world_size == 1


def _gathered(rows: Sequence[AnswerRow]) -> dict[tuple[Decided, str], list[int]]:
    """The places on the axis by what is decided and by name."""
    groups: dict[tuple[Decided, str], list[int]] = {}
    for place, row in enumerate(rows):
        kind, name = decided(row.ranking), row.why_none
        if row.ranking is not None:
            tied = row.ranking.tied if kind is Decided.TIE else ()
            name = listed([row_name(row.ranking.fastest), *map(row_name, tied)], "and")
        groups.setdefault((kind, name), []).append(place)
    return groups


def _versus_line(rows: Sequence[AnswerRow], axis: Axis, views: Sequence[PairView | None]) -> str | None:
    """Where the rivals of the views are faster and slower than the fastest row; None without a view."""
    sides = {"faster": "candidate", "slower": "baseline", "no difference proven": None}
    parts = []
    for word, side in sides.items():
        places = [place for place, view in enumerate(views) if view is not None and view.faster == side]
        if places:
            parts.append(f"{word} {axis.where(_places(places, rows))}")
    if not parts:
        return None
    separately = any(view is not None and view.faster and not view.proven for view in views)
    return "; ".join(parts) + (f" ({SEPARATELY})" if separately else "")


def _counts(rows: Sequence[AnswerRow]) -> Iterator[str]:
    """How many workloads each implementation is fastest in; in how many full attention is faster and slower."""
    kinds = [decided(row.ranking) for row in rows]
    won_by = (row.fastest for row, kind in zip(rows, kinds, strict=True) if kind is Decided.WON)
    names = Counter(map(row_name, filter(None, won_by)))
    won = ", ".join(f"{name} in {count}" for name, count in names.most_common())
    undecided = {
        Decided.TIE: "no difference proven in {}",
        Decided.ALONE: "no comparison in {}, where one row was measured",
        Decided.NOTHING: "none measured in {}",
    }
    parts = [words.format(kinds.count(kind)) for kind, words in undecided.items() if kind in kinds]
    yield f"{counted(len(rows), 'workload')}: {'; '.join([f'fastest {won}'] * bool(won) + parts)}."
    views = [row.versus_dense for row in rows if row.versus_dense]
    counts = Counter("slower" if view.faster == "baseline" else "faster" for view in views if view.faster)
    if counts:
        sides = " and ".join(f"{side} in {counts[side]}" for side in ("slower", "faster") if counts[side])
        doubt = f" ({SEPARATELY})" if any(view.faster and not view.proven for view in views) else ""
        yield f"Full attention, another function: {sides} of the {len(views)} where it was measured{doubt}."


def _places(places: Sequence[int], rows: Sequence[AnswerRow]) -> str:
    """Places on the axis, more than three neighbours as a range: '1K, 4K and 16K', '512 to 4K and 16K'."""
    texts: list[str] = []
    for _, group in groupby(enumerate(places), key=lambda entry: entry[1] - entry[0]):
        at = [rows[place].at for _, place in group]
        texts += at if len(at) <= MOST_PLACES else [f"{at[0]} to {at[-1]}"]
    return listed(texts, "and")


def _of_fastest(name: str, row: AnswerRow) -> str | None:
    """The cell of a table's column for the fastest row."""
    view = row.fastest and view_of(row.fastest)
    return COLUMNS[name].value_text(view) if view else None


def _is_undecided(view: PairView | None) -> bool:
    return view is not None and view.faster is None


def _versus(view: PairView | None) -> str | None:
    """The ratio, after '≈' if neither side is faster."""
    return None if view is None else (ABOUT if _is_undecided(view) else "") + view.text

"""The shards of a request as one record. No torch.

Measured values do not change. Rows of one workload come from one shard, because only interleaved rows may be compared.
Records that cannot be joined are refused, with the reason.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain, zip_longest

from dilabench.comparison.fingerprint import hard_mismatches
from dilabench.engine.plausibility import suspicions
from dilabench.errors import ConfigError, listed
from dilabench.record import Measured, Row, RunRecord, moment_of
from dilabench.request import Shard, resume_command, shard_of
from dilabench.store.lookup import Store
from dilabench.store.run_files import refuse_other_rows
from dilabench.validation import content_hash

SHARD = "shard"


def shared_records(store: Store, runs: Sequence[str]) -> tuple[list[RunRecord], list[str]]:
    """Return the records of the named runs, and a name of each for messages.

    Raises ConfigError for a run whose files contradict each other.
    """
    records: list[RunRecord] = []
    names: list[str] = []
    for run in runs:
        path = store.path_of(run)
        run_records = store.records(run)
        if path is not None:
            refuse_other_rows(path, run_records[0])
        records += run_records
        names += [run] if len(run_records) == 1 else [f"{run} ({record.run_id})" for record in run_records]
    return records, names


def refuse_unsound(records: Sequence[RunRecord], names: Sequence[str]) -> None:
    """Raise ConfigError for one run under two names, times without a passed verification, and times that no note
    explains.
    """
    known: dict[str, str] = {}
    for record, name in zip(records, names, strict=True):
        if record.run_id in known:
            raise ConfigError(f"{known[record.run_id]} and {name} are the same run, {record.run_id}; name it once")
        known[record.run_id] = name
        _refuse_unsound_rows(record, name)


def merged(records: Sequence[RunRecord], names: Sequence[str]) -> RunRecord:
    """Merge the shards of one request into one record. `names`: of the records, for messages.

    Raises ConfigError for one record, records that are no shards or do not belong together, shards that overlap or
    miss, and what `refuse_unsound` refuses.
    """
    if len(records) < 2 and not any(shard_of(record.config) for record in records):
        raise ConfigError("one run is given; name all shards of a run (`run --shard 1/2`)")
    refuse_unsound(records, names)
    for record, name in zip(records, names, strict=True):
        if record.status != "complete":
            way_out = f"continue with `{resume_command(record.suite, name)}`, then merge"
            raise ConfigError(f"run {name} did not end (it is {record.status}); {way_out}")
    shards = _whole_set(records, names)
    for record, name in zip(records[1:], names[1:], strict=True):
        _check_mergeable(records[0], record, names[0], name)
    _refuse_shared_workloads(records, names)
    in_order = [record for _, record in sorted(zip(shards, records, strict=True), key=lambda pair: pair[0])]
    return _joined(in_order)


def _refuse_unsound_rows(record: RunRecord, name: str) -> None:
    """Raise ConfigError for a time without a passed verification, or an impossible time without its note."""
    for row in record.rows:
        if not isinstance(row.outcome, Measured):
            continue
        where = f"run {name}: {row.case.implementation} on {row.case.workload.label()}"
        if not row.outcome.verification.passed:
            raise ConfigError(f"{where} has a time but no passed verification; it was edited, or measure it again")
        timed = chain.from_iterable(
            (*timing.samples_ns, *chain.from_iterable(chain.from_iterable(timing.columns.column("rank_samples_ns"))))
            for timing in row.outcome.timings
        )
        if (shortest := min(timed, default=1)) < 1:
            raise ConfigError(f"{where} has a sample of {shortest} ns, which no call takes; the record was edited")
        noted = {note.code for note in row.outcome.notes}
        missing = [note for note in suspicions(row, record.ceilings, record.device) if note.code not in noted]
        if missing:
            raise ConfigError(f"{where}: {missing[0].message}, and no note says so; the record was edited")


def _check_mergeable(first: RunRecord, record: RunRecord, first_name: str, name: str) -> None:
    """Raise ConfigError for another machine or version of dilabench."""
    differing = [str(mismatch) for mismatch in hard_mismatches(first, record)]
    if record.tool_version != first.tool_version:
        differing.append(f"dilabench: {first.tool_version} against {record.tool_version}")
    if differing:
        raise ConfigError(f"{first_name} and {name} were not measured alike: {'; '.join(differing)}")


def _whole_set(records: Sequence[RunRecord], names: Sequence[str]) -> list[Shard]:
    """Return the shard of each record. Raises ConfigError unless they are all shards of one request, each once."""
    present: list[Shard] = []
    for record, name in zip(records, names, strict=True):
        shard = shard_of(record.config)
        if shard is None:
            raise ConfigError(
                f"{name} is no shard (`run --shard 1/2`); `dilabench report RUN...` ranks several runs together"
            )
        present.append(shard)
    counts = sorted({count for _, count in present})
    if len(counts) > 1:
        raise ConfigError(
            f"these are shards of {listed(list(map(str, counts)), 'and')}; merge shards of the same number"
        )
    requests = {
        content_hash({**record.config, "suite": record.suite, SHARD: None}): name
        for record, name in zip(records, names, strict=True)
    }
    if len(requests) > 1:
        raise ConfigError(f"{listed(list(requests.values()), 'and')} are shards of different requests")
    twice = [index for index, times in Counter(index for index, _ in present).items() if times > 1]
    if twice:
        same = [name for shard, name in zip(present, names, strict=True) if shard[0] == twice[0]]
        raise ConfigError(f"{listed(same, 'and')} are both shard {twice[0]}/{counts[0]}; leave one of them out")
    missing = sorted(set(range(1, counts[0] + 1)) - {index for index, _ in present})
    if missing:
        wanted = f"{listed(list(map(str, missing)), 'and')} of {counts[0]}"
        lacking = f"shard {wanted} is missing" if len(missing) == 1 else f"shards {wanted} are missing"
        raise ConfigError(f"{lacking}: run it with --shard {missing[0]}/{counts[0]}, then merge all")
    return present


def _refuse_shared_workloads(records: Sequence[RunRecord], names: Sequence[str]) -> None:
    """Raise ConfigError for a workload in two shards, which come from different plans (other plug-ins) or edits."""
    owners: dict[str, str] = {}
    for record, name in zip(records, names, strict=True):
        for group, row in {row.case.group_id: row for row in record.rows}.items():
            if group in owners:
                raise ConfigError(
                    f"{row.case.workload.label()} is in {owners[group]} and in {name}; only interleaved rows are "
                    "compared, so a workload belongs to one shard: run the shards again with the same plug-ins"
                )
            owners[group] = name


def _joined(records: Sequence[RunRecord]) -> RunRecord:
    """The record of shards in the order of their numbers."""
    first = records[0]
    config = {field: value for field, value in first.config.items() if field != SHARD}
    ids = [record.run_id for record in records]
    # A time that cannot be read comes last.
    begun = sorted(records, key=lambda record: record.started or datetime.max.replace(tzinfo=UTC))
    ended = [moment for record in records if (moment := moment_of(record.finished_at))]
    together = first.model_copy(
        update={
            "run_id": content_hash(sorted(ids))[:8],
            "argv": ("merge", *ids),
            "config": config,
            "started_at": begun[0].started_at,
            "finished_at": max(ended).isoformat(timespec="seconds") if ended else None,
            "rows": _in_planned_order([record.rows for record in records]),
            "projections": tuple(chain.from_iterable(record.projections for record in records)),
            "plugins": tuple(dict.fromkeys(chain.from_iterable(record.plugins for record in records))),
        }
    )
    return RunRecord.model_validate(together.model_dump())


def _in_planned_order(shards: Sequence[Sequence[Row]]) -> tuple[Row, ...]:
    """The rows of all shards in the order planned: `in_shard` assigned the workloads in alternating direction."""
    groups = []
    for rows in shards:
        by_group: dict[str, list[Row]] = {}
        for row in rows:
            by_group.setdefault(row.case.group_id, []).append(row)
        groups.append(list(by_group.values()))
    rounds = enumerate(zip_longest(*groups, fillvalue=[]))
    return tuple(row for index, dealt in rounds for group in dealt[:: -1 if index % 2 else 1] for row in group)

"""Several records of one machine as one: shards of a request, or runs of different workloads. No torch.

Measured values do not change. Rows of one workload come from one record, because only interleaved rows may be compared.
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

# Fields that must be equal: how cases were measured, and on which inputs.
MEASURING = ("device", "timing", "warmup_runs", "timing_runs", "seed")
SHARD = "shard"
# Fields that may differ between runs of different workloads.
ASKING = ("implementations", "backends", "presets", "overrides", "lengths", "budget_s", "options", SHARD)


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
    """Merge the rows of all records into one record. `names`: of the records, for messages.

    Raises ConfigError for one record, records that do not belong together, shards that overlap or miss, rows of one
    workload in two records, and what `refuse_unsound` refuses.
    """
    if len(records) < 2:
        raise ConfigError("one run is given; name two or more to merge")
    refuse_unsound(records, names)
    for record, name in zip(records, names, strict=True):
        if record.status != "complete":
            way_out = f"continue with `{resume_command(record.suite, name)}`, then merge"
            raise ConfigError(f"run {name} did not end (it is {record.status}); {way_out}")
    for record, name in zip(records[1:], names[1:], strict=True):
        _check_mergeable(records[0], record, names[0], name)
    shards = [shard_of(record.config) for record in records]
    if any(shards):
        _refuse_broken_set(records, shards, names)
        records = [records[index] for index in sorted(range(len(records)), key=lambda index: shards[index] or (0, 0))]
    _refuse_shared_workloads(records, names)
    parts = [record.rows for record in records]
    return _joined(records, _in_planned_order(parts) if any(shards) else tuple(chain.from_iterable(parts)))


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
    """Raise ConfigError for another suite, machine or version of dilabench, or another way of measuring."""
    if record.suite != first.suite:
        raise ConfigError(
            f"{first_name} is of suite {first.suite!r}, {name} of {record.suite!r}; merge runs of one suite"
        )
    differing = [str(mismatch) for mismatch in hard_mismatches(first, record)]
    if record.tool_version != first.tool_version:
        differing.append(f"dilabench: {first.tool_version} against {record.tool_version}")
    for field in MEASURING:
        value, expected = first.config.get(field), record.config.get(field)
        if value != expected:
            differing.append(f"{field}: {value} against {expected}")
    if differing:
        raise ConfigError(f"{first_name} and {name} were not measured alike: {'; '.join(differing)}")


def _refuse_broken_set(records: Sequence[RunRecord], shards: Sequence[Shard | None], names: Sequence[str]) -> None:
    """Raise ConfigError unless the shards are all shards of one request, each once."""
    whole = [name for shard, name in zip(shards, names, strict=True) if shard is None]
    if whole:
        raise ConfigError(f"{whole[0]} is no shard, and others are; merge only the shards of one run")
    present = [shard for shard in shards if shard]
    counts = sorted({count for _, count in present})
    if len(counts) > 1:
        raise ConfigError(
            f"these are shards of {listed(list(map(str, counts)), 'and')}; merge shards of the same number"
        )
    requests = {content_hash({**record.config, SHARD: None}): name for record, name in zip(records, names, strict=True)}
    if len(requests) > 1:
        raise ConfigError(f"{listed(list(requests.values()), 'and')} are shards of different requests")
    twice = [index for index, times in Counter(index for index, _ in present).items() if times > 1]
    if twice:
        same = [name for shard, name in zip(shards, names, strict=True) if shard and shard[0] == twice[0]]
        raise ConfigError(f"{listed(same, 'and')} are both shard {twice[0]}/{counts[0]}; leave one of them out")
    missing = sorted(set(range(1, counts[0] + 1)) - {index for index, _ in present})
    if missing:
        wanted = listed([f"{index}/{counts[0]}" for index in missing], "and")
        raise ConfigError(f"shard {wanted} missing: run it with --shard {missing[0]}/{counts[0]}, then merge all")


def _refuse_shared_workloads(records: Sequence[RunRecord], names: Sequence[str]) -> None:
    owners: dict[str, str] = {}
    for record, name in zip(records, names, strict=True):
        for group, row in {row.case.group_id: row for row in record.rows}.items():
            if group in owners:
                raise ConfigError(
                    f"{row.case.workload.label()} is in {owners[group]} and in {name}; rows of one workload are "
                    "compared only if they were interleaved, so omit one of the two, or measure them in one run"
                )
            owners[group] = name


def _joined(records: Sequence[RunRecord], rows: tuple[Row, ...]) -> RunRecord:
    first = records[0]
    config = {
        field: value
        for field, value in first.config.items()
        if field not in ASKING or all(record.config.get(field) == value for record in records)
    }
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
            "rows": rows,
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

"""`dilabench merge`: shards of a run, or runs of different workloads, as one record."""

from pathlib import Path
from typing import Annotated

import typer

from dilabench.cli.options import OUTPUT_DIR, AsJson
from dilabench.cli.terminal import note, say
from dilabench.runs import DEFAULT_FOLDER
from dilabench.units import counted


def merge(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Folders, run.json files or ids (`dilabench history`) of runs.")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Folder that gets a folder for the record."),
        OUTPUT_DIR,
    ] = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Join records of one machine into one record, which every other command accepts as a run.

    All shards of a run (`run --shard 2/8`), or runs of different workloads, measured in the same way. Refused:
    unfinished runs, overlapping or missing shards, rows of one workload from two runs, times without a passed
    verification, edited records. The runs themselves are not changed.
    """
    from dilabench.comparison.fingerprint import soft_warnings
    from dilabench.store.lookup import Store
    from dilabench.store.merging import merged, shared_records
    from dilabench.store.run_files import RunFolder

    records, names = shared_records(Store(tell=note), runs)
    record = merged(records, names)
    for warning in soft_warnings(records[:1], records[1:]):
        note(warning)
    folder = RunFolder.create(output, record.suite, record.run_id)
    folder.keep_masks(row.case.workload for row in record.rows)
    folder.finish(record)
    say(record.model_dump_json(indent=1) if as_json else str(folder.path))
    measured = sum(row.outcome.status == "measured" for row in record.rows)
    say(
        f"{counted(len(record.rows), 'row')} of {counted(len(records), 'run')} ({measured} measured); "
        f"see `dilabench report {folder.path}`",
        err=as_json,
    )

"""`dilabench calibrate`: what this machine's noise does to verdicts."""

from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.cli import options as shared
from dilabench.cli.terminal import print_items, say
from dilabench.units import percent_text

if TYPE_CHECKING:
    from dilabench.store.calibrations import Calibration

DEFAULT_SESSIONS = 10


def calibrate(
    sessions: Annotated[
        int, typer.Option("--sessions", metavar="N", min=3, help="Sessions, each in fresh processes.")
    ] = DEFAULT_SESSIONS,
    batch_size: shared.BatchSize = None,
    seq_length: shared.SeqLength = None,
    num_heads: shared.NumHeads = None,
    num_kv_heads: shared.NumKvHeads = None,
    head_dim: shared.HeadDim = None,
    dtype: shared.DTypeName = None,
    device: shared.Device = None,
    as_json: shared.AsJson = False,
) -> None:
    """Time one implementation against itself and against itself slowed down by 2, 5 and 10 %.

    Stores how far sessions spread on this machine, for `compare` and `check`. Prints how often one session detects a
    slow-down of each size.
    """
    from dilabench.cli.run.progress_bar import progress_shown
    from dilabench.runs.calibration import CalibrationRun
    from dilabench.store.lookup import Store

    fields = shared.workload_fields(batch_size, seq_length, num_heads, num_kv_heads, head_dim, dtype, None)
    run = CalibrationRun.on(device or "auto", fields)
    say(f"{sessions} sessions of {run.workload} on {run.plan.machine.device}", err=as_json)
    result = run.measure(sessions, progress_shown())
    path = Store().calibrations.save(result)
    if as_json:
        say(result.model_dump_json(indent=1))
    else:
        _show(result)
    say(f"kept in {path}", err=as_json)


def _show(result: "Calibration") -> None:
    from dilabench.report.columns import Column

    if result.sigma_sessions is not None:
        say(f"times of identical code spread between sessions by {percent_text(result.sigma_sessions)}")
    say(f"noise between sessions of two rows in common rounds: {percent_text(result.sigma_aa)}")
    if result.mde is not None:
        say(f"smallest slow-down that one session finds four times in five: about {result.mde:.1%}")
    columns = (
        Column(name="slower by", cell=lambda row: f"{row.effect:.0%}" if row.effect else "identical", right=False),
        Column(name="called SLOWER", cell=lambda row: f"{row.hits} of {row.trials}", right=False),
        Column(name="95 % interval of the rate", cell=lambda row: f"{row.low:.0%} to {row.high:.0%}", right=False),
    )
    print_items(None, columns, result.power)

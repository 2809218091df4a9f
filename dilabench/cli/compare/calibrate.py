"""`dilabench calibrate`: what this machine's noise does to verdicts."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.cli import options as shared
from dilabench.cli.terminal import print_table, say
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import detect
from dilabench.plugins.manager import discover
from dilabench.record import PlannedCase, RunRecord, Timing
from dilabench.request import run_request
from dilabench.store.calibrations import Calibration, Detection
from dilabench.suites.planner import Planner

if TYPE_CHECKING:
    from dilabench.stats.decisions.policy import Policy
    from dilabench.stats.decisions.verdicts import Verdict

Sessions = Sequence[Mapping[str, Timing]]

DEFAULT_SESSIONS = 10
LENGTHS = {"small": 1024, "large": 32768}


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

    Keeps this machine's noise between sessions, which `compare` and `check` then use, and shows how often a slow-down
    of each size is found in one session.
    """
    from dilabench.cli.run.execution import new_header
    from dilabench.cli.run.progress_bar import progress_shown
    from dilabench.engine import calibration
    from dilabench.engine.device.environment import with_torch
    from dilabench.engine.device.lock import device_lock
    from dilabench.engine.method import choose_method
    from dilabench.store.lookup import Store

    found = discover(extra=[calibration])
    machine = detect(device or "auto")
    request = run_request(
        found.catalogue,
        suite="calibrate",
        workload={"seq_len": LENGTHS[machine.facts.size], "batch_size": 1, "num_heads": 4}
        | shared.workload_fields(batch_size, seq_length, num_heads, num_kv_heads, head_dim, dtype, None),
        run={"implementations": [calibration.BASELINE, *calibration.EFFECTS], "device": machine.device},
    )
    planner = Planner(found.catalogue, machine, request)
    planned = _runnable(planner.compare(planner.workload_requests([{}]), planner.implementations(())))
    method = choose_method(request.timing, machine.device, found.catalogue)
    header = new_header(found, machine, request)
    say(f"{sessions} sessions of {planned[0].case.workload.label()} on {machine.device}", err=as_json)
    with progress_shown() as progress, device_lock(machine, header.run_id, progress):
        measured = [
            calibration.measure_session(planned, found.catalogue, machine, method, progress, seed)
            for seed in range(sessions)
        ]
    environment = with_torch(header.environment, machine, measured[-1].torch)
    here = RunRecord.model_validate({**header.model_dump(), "environment": environment.model_dump()})
    result = summary([session.timings for session in measured], here, planned[0].case.workload.label())
    path = Store().calibrations.save(result)
    if as_json:
        say(result.model_dump_json(indent=1))
    else:
        _show(result)
    say(f"kept in {path}", err=as_json)


def summary(sessions: Sessions, here: RunRecord, workload: str) -> Calibration:
    """Noise floor, power curve and detectable change of some sessions.

    The rates are those of single sessions, judged with the noise floor that all of them together have.
    """
    from dilabench.compare.fingerprint import hard_fields, machine_key
    from dilabench.engine.calibration import EFFECTS
    from dilabench.stats.decisions.calibration import detection_rate, noise_floor
    from dilabench.stats.decisions.policy import Policy

    unknown = Policy.for_device(here.device)
    alike = _verdicts(sessions, "same-2", unknown)
    sigma = noise_floor([verdict.numbers.log_ratio for verdict in alike])
    policy = Policy.for_device(here.device, sigma_aa=sigma)
    power, mde = [], None
    for name, effect in EFFECTS.items():
        verdicts = _verdicts(sessions, name, policy)
        rate = detection_rate(verdicts)
        low, high = rate.interval.low, rate.interval.high
        power.append(Detection(effect=effect, hits=rate.hits, trials=rate.trials, low=low, high=high))
        if effect == 0:
            known = [verdict.numbers.mde for verdict in verdicts if verdict.numbers.mde is not None]
            mde = median(known) if known else None
    return Calibration(
        machine=machine_key(here),
        fields=hard_fields(here),
        device=here.device,
        sigma_aa=sigma,
        sessions=len(sessions),
        mde=mde,
        power=tuple(power),
        workload=workload,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=here.tool_version,
    )


def _verdicts(sessions: Sessions, candidate: str, policy: "Policy") -> "list[Verdict]":
    """The verdict of every session on its own."""
    from dilabench.compare.view import pair
    from dilabench.engine.calibration import BASELINE
    from dilabench.stats.decisions.decide import judge_many

    cells = [pair([(session[BASELINE], session[candidate])]).rounds for session in sessions]
    return judge_many([cell for cell in cells if cell is not None], policy)


def _runnable(planned: Sequence[PlannedCase]) -> Sequence[PlannedCase]:
    for one in planned:
        if one.skip:
            raise EnvironmentNotReady(f"the calibration cannot run here: {one.skip.why}")
    return planned


def _show(result: Calibration) -> None:
    say(f"noise between sessions (sigma of identical code): {result.sigma_aa:.2%}")
    if result.mde is not None:
        say(f"smallest slow-down that one session finds four times in five: about {result.mde:.1%}")
    rows = [
        (
            f"{one.effect:.0%}" if one.effect else "identical",
            f"{one.hits} of {one.trials}",
            f"{one.low:.0%} to {one.high:.0%}",
        )
        for one in result.power
    ]
    print_table(None, ("slower by", "called SLOWER", "95 % interval of the rate"), rows)

"""Noise of a machine between sessions: one implementation against itself, and against a slowed-down copy."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from dilabench.comparison.fingerprint import hard_fields, machine_key
from dilabench.comparison.pairing import pair_many
from dilabench.engine import calibration
from dilabench.engine.calibration import BASELINE, EFFECTS
from dilabench.engine.device.environment import with_torch
from dilabench.engine.device.lock import device_lock
from dilabench.engine.method import method_for
from dilabench.engine.progress import Progress
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import detect
from dilabench.plugins.manager import discover
from dilabench.record import PlannedCase, RunRecord, Timing
from dilabench.request import run_request
from dilabench.runs.execution import new_header
from dilabench.stats.decisions.decide import Policy, detection_rate, judge_many
from dilabench.stats.decisions.history import noise_floor
from dilabench.stats.decisions.verdicts import Verdict
from dilabench.store.calibrations import Calibration, Detection
from dilabench.suites.planner import Planner, RunPlan

Sessions = Sequence[Mapping[str, Timing]]

LENGTHS = {"small": 1024, "large": 32768}


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """Sessions of the implementations that calibrate a machine, on one workload."""

    plan: RunPlan

    @classmethod
    def on(cls, device: str, workload: Mapping[str, Any]) -> "CalibrationRun":
        """A calibration on this device; `workload` holds fields that differ from the defaults.

        Raises EnvironmentNotReady if it cannot run.
        """
        found, machine = discover(extra=[calibration]), detect(device)
        request = run_request(
            found.catalogue,
            suite="calibrate",
            workload={"seq_len": LENGTHS[machine.facts.size], "batch_size": 1, "num_heads": 4, **workload},
            run={"implementations": [BASELINE, *EFFECTS], "device": machine.device},
        )
        planner = Planner(found.catalogue, machine, request)
        planned = _runnable(planner.compare(planner.workload_requests([{}]), planner.implementations(())))
        method = method_for(request, machine.device, found.catalogue)
        return cls(RunPlan(found=found, machine=machine, request=request, planned=planned, method=method))

    @property
    def workload(self) -> str:
        """Its label."""
        return self.plan.planned[0].case.workload.label()

    def measure(self, sessions: int, progress: AbstractContextManager[Progress]) -> Calibration:
        """Measure `sessions` sessions, each in fresh processes, and return their calibration."""
        plan = self.plan
        header = new_header(plan.found, plan.machine, plan.request)
        with progress as shown, device_lock(plan.machine, header.run_id, shown):
            measured = [
                calibration.measure_session(plan.planned, plan.catalogue, plan.machine, plan.method, shown, seed)
                for seed in range(sessions)
            ]
        environment = with_torch(header.environment, plan.machine, measured[-1].torch)
        here = RunRecord.model_validate({**header.model_dump(), "environment": environment.model_dump()})
        return summary([session.timings for session in measured], here, self.workload)


def summary(sessions: Sessions, here: RunRecord, workload: str) -> Calibration:
    """Noise floor, power curve and detectable change of some sessions.

    The rates are of single sessions, judged with the noise floor of all sessions together.
    """
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


def _verdicts(sessions: Sessions, candidate: str, policy: Policy) -> list[Verdict]:
    """The verdict of every single session."""
    pairings = pair_many([(session[BASELINE], session[candidate])] for session in sessions)
    return judge_many([pairing.rounds for pairing in pairings if pairing.rounds is not None], policy)


def _runnable(planned: tuple[PlannedCase, ...]) -> tuple[PlannedCase, ...]:
    for case in planned:
        if case.skip:
            raise EnvironmentNotReady(f"the calibration cannot run here: {case.skip.why}")
    return planned

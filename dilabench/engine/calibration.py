"""One implementation against itself, plain and slowed down on purpose, by the engine's own rounds. No torch."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dilabench.engine.budget import Budget
from dilabench.engine.case_executor import CaseExecutor
from dilabench.engine.case_spec import case_spec, worker_key
from dilabench.engine.case_state import CaseState
from dilabench.engine.method import Method
from dilabench.engine.progress import Progress
from dilabench.engine.rounds import Rounds
from dilabench.engine.worker.client import WorkerPool
from dilabench.engine.worker.protocol import WorkerSettings
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import Machine
from dilabench.plugins import Implementation, hookimpl
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import PlannedCase, Timing

BASELINE = "same-1"
# The slow-down of each candidate relative to the baseline.
EFFECTS: Mapping[str, float] = MappingProxyType({"same-2": 0.0, "slower-2": 0.02, "slower-5": 0.05, "slower-10": 0.10})


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    """The same implementation under several names; `discover(extra=[this module])` puts them into a catalogue."""
    targets = {BASELINE: "build_same", "same-2": "build_same"}
    targets |= {name: f"build_{name.replace('-', '_')}" for name in EFFECTS if name not in targets}
    return [
        Implementation(
            name,
            f"one implementation, slower by {EFFECTS.get(name, 0.0):.0%}",
            f"dilabench.engine.synthetic_slowdown:{target}",
            uses_backend=True,
        )
        for name, target in targets.items()
    ]


@dataclass(frozen=True, slots=True)
class CalibrationSession:
    """The result of one session: the timing of each implementation by name, and the facts of its torch."""

    timings: dict[str, Timing]
    torch: dict[str, str]


def measure_session(
    planned: Sequence[PlannedCase],
    catalogue: Catalogue,
    machine: Machine,
    method: Method,
    progress: Progress,
    seed: int,
) -> CalibrationSession:
    """One session in fresh processes: the cases are warmed up and timed in interleaved rounds, without verification.

    Raises EnvironmentNotReady when a case cannot be measured here.
    """
    executor = CaseExecutor(
        catalogue=catalogue,
        pool=WorkerPool(WorkerSettings(device=machine.device)),
        method=method,
        budget=Budget(None, [case.case for case in planned], time.monotonic),
        progress=progress,
        seed=seed,
    )
    states = [
        CaseState(planned=case, spec=case_spec(case.case, catalogue, seed), key=worker_key(case.case, catalogue))
        for case in planned
    ]
    try:
        Rounds(executor, states, random.Random(seed)).take(method.timer, method.sampling_s * len(states))
        torch_facts = next((state.home.hello.torch for state in states if state.home), {})
    finally:
        executor.pool.close()
    for state in states:
        if state.outcome is not None or not state.runs:
            why = state.outcome.why if state.outcome else "its timer took no sample"
            raise EnvironmentNotReady(f"calibration case {state.case.implementation!r} was not measured: {why}")
    timings = {state.case.implementation: state.run_of(method.timer).timing() for state in states}
    return CalibrationSession(timings, torch_facts)

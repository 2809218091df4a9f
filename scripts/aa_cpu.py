"""How often the engine cries wolf on this CPU, and how often it finds 5 and 10 %: writes docs/results/cpu-aa.{json,md}.

Every repeat is a session of its own (fresh worker process, warm-up, interleaved rounds, `wall` timer: the code of
`dilabench run`, with 30 rounds of five samples). It holds one implementation twice and copies that wait 5 and
10 % longer. A second process keeps the machine busy half of the time, besides whatever else runs.

    python scripts/aa_cpu.py --repeats 200
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from dilabench.compare.pairing import pair
from dilabench.engine import calibration
from dilabench.engine.device.environment import snapshot
from dilabench.engine.method import choose_method
from dilabench.engine.progress import Silent
from dilabench.engine.warmup import WarmUpLimits
from dilabench.machine import Machine, detect
from dilabench.plugins.manager import discover
from dilabench.record import Timing
from dilabench.request import run_request
from dilabench.stats.decisions.calibration import detection_rate, noise_floor
from dilabench.stats.decisions.decide import judge_many
from dilabench.stats.decisions.policy import Policy
from dilabench.stats.decisions.verdicts import Code
from dilabench.suites.planner import expand

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CANDIDATES = ("same-2", "slower-5", "slower-10")
CALIBRATED_ON = 20
# Slots of five samples and 30 rounds: the time of a session goes into rounds, which is what a paired verdict rests on.
ROUNDS = 30
SHORT_SLOTS_NS = 1
WARM_UP = WarmUpLimits(min_s=0.0, max_s=0.15)
BURST_S = 0.05


def burn() -> None:
    """Half of one core, in bursts."""
    while True:
        until = time.perf_counter() + BURST_S
        while time.perf_counter() < until:
            pass
        time.sleep(BURST_S)


def measure(repeats: int, seq_len: int, machine: Machine) -> tuple[list[Mapping[str, Timing]], str]:
    """The timings of every session, and the workload."""
    catalogue = discover(extra=[calibration]).catalogue
    request = run_request(
        catalogue,
        suite="implementations",
        workload={
            "seq_len": seq_len,
            "batch_size": 1,
            "num_heads": 4,
            "segment_lengths": "128,256",
            "dilation_rates": "1,2",
        },
        run={"implementations": [calibration.BASELINE, *CANDIDATES], "device": "cpu"},
    )
    planned = expand(catalogue, machine, request)
    method = choose_method("warmup", "cpu", catalogue)
    method = method.model_copy(
        update={"min_rounds": ROUNDS, "max_rounds": ROUNDS, "slot_ns": SHORT_SLOTS_NS, "warm_up": WARM_UP}
    )
    sessions = []
    for seed in range(repeats):
        session = calibration.measure_session(planned, catalogue, machine, method, Silent(), seed)
        sessions.append(session.timings)
        if seed % 20 == 19:
            print(f"{seed + 1} of {repeats}", flush=True)
    return sessions, planned[0].case.workload.label()


def rates(sessions: Sequence[Mapping[str, Timing]], policy: Policy) -> list[dict[str, Any]]:
    """Verdicts of single sessions, by injected slow-down."""
    found = []
    for name in CANDIDATES:
        cells = [pair([(session[calibration.BASELINE], session[name])]).rounds for session in sessions]
        verdicts = judge_many([cell for cell in cells if cell is not None], policy)
        rate = detection_rate(verdicts)
        counts = {code.value: sum(verdict.code is code for verdict in verdicts) for code in Code}
        mdes = [verdict.numbers.mde for verdict in verdicts if verdict.numbers.mde is not None]
        entry = {"effect": calibration.EFFECTS[name], "trials": rate.trials, "slower": rate.hits, "rate": rate.rate}
        entry |= {"interval": [rate.interval.low, rate.interval.high], "verdicts": counts, "median_mde": median(mdes)}
        entry["median_ratio"] = median(verdict.numbers.ratio for verdict in verdicts)
        found.append(entry)
    return found


def main() -> None:
    """Measure, judge, write."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=200)
    arguments.add_argument("--seq-len", type=int, default=256)
    arguments.add_argument("--output", type=Path, default=RESULTS)
    options = arguments.parse_args()
    machine = detect("cpu")
    neighbour = multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
    neighbour.start()
    started, loads = time.monotonic(), [psutil.getloadavg()[0]]
    try:
        sessions, workload = measure(options.repeats, options.seq_len, machine)
    finally:
        neighbour.terminate()
    loads.append(psutil.getloadavg()[0])
    plain = Policy.for_device("cpu")
    first = [pair([(one[calibration.BASELINE], one["same-2"])]).rounds for one in sessions[:CALIBRATED_ON]]
    sigma = noise_floor([one.numbers.log_ratio for one in judge_many([cell for cell in first if cell], plain)])
    environment = snapshot(machine)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": environment.cpu.model,
        "cores": environment.cpu.cores,
        "torch": environment.packages.get("torch"),
        "load_1m": loads,
        "wall_s": time.monotonic() - started,
        "workload": workload,
        "repeats": len(sessions),
        "typical_ns": median(median(one[calibration.BASELINE].samples_ns) for one in sessions),
        "rounds": median(len(one[calibration.BASELINE].slots) for one in sessions),
        "margin": plain.user_margin,
        "uncalibrated": rates(sessions, plain),
        "sigma_aa_of_first": [CALIBRATED_ON, sigma],
        "calibrated": rates(sessions[CALIBRATED_ON:] or sessions, Policy.for_device("cpu", sigma_aa=sigma)),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "cpu-aa.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "cpu-aa.md").write_text(page(result))
    print(page(result))


def page(result: Mapping[str, Any]) -> str:
    """The figures as a short page."""
    low, high = result["load_1m"]
    lines = [
        "# False alarms and power on a busy CPU",
        "",
        f"`python scripts/aa_cpu.py --repeats {result['repeats']}` on {result['date'][:10]}: {result['cpu']}, "
        f"{result['cores']} cores, torch {result['torch']}, load {low:.1f} to {high:.1f} (a neighbour that is busy "
        f"half of the time included), {result['wall_s'] / 60:.1f} min.",
        "",
        f"Each repeat is one session of `strided` ({result['workload']}, {result['typical_ns'] / 1e6:.2f} ms, "
        f"{result['rounds']:.0f} rounds) in a fresh process against itself and against copies slowed down by a busy "
        f"wait. A verdict rests on that one session alone; the margin is {result['margin']:.0%}.",
        "",
        f"These are not the defaults of `dilabench run`: the session is held to {ROUNDS} rounds of five samples with a "
        "short warm-up, where `run` takes up to 20 samples a turn and may stop after five rounds. The figures hold for "
        "this protocol and this workload only.",
        "",
    ]
    sigma = result["sigma_aa_of_first"]
    titles = {
        "uncalibrated": "Without calibration",
        "calibrated": f"With the noise floor of the first {sigma[0]} sessions ({sigma[1]:.2%}), on the others",
    }
    for key, title in titles.items():
        lines += [
            f"## {title}",
            "",
            "| slower by | called SLOWER | rate | 95 % interval | FASTER | SAME | INCONCLUSIVE | MDE |",
        ]
        lines.append("|" + "---|" * 8)
        for one in result[key]:
            counts, (low, high) = one["verdicts"], one["interval"]
            figures = [f"{one['effect']:.0%}", f"{one['slower']} of {one['trials']}", f"{one['rate']:.1%}"]
            figures += [f"{low:.1%} to {high:.1%}", counts["FASTER"], counts["SAME"], counts["INCONCLUSIVE"]]
            lines.append("| " + " | ".join(map(str, [*figures, f"{one['median_mde']:.1%}"])) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

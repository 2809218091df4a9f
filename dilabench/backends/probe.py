"""Test whether a backend works here: tiny forwards and backwards against float64, in a separate process.

Requirements check what is installed; only a call shows whether it loads, fits the driver and computes the right
numbers. A crash or a hang of a foreign library affects only the probe's process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dilabench.machine import child_environment, python_command

TIMEOUT_S = 120.0


def probe(target: str, backward_target: str | None, device: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Return why the backend with these targets fails on this device ('cpu', 'cuda', 'mps'), or None if it works.

    Takes seconds: it imports torch and the library in a new process. Nothing is imported here.
    """
    trial = {"head_dim": 64, "dtype": "bfloat16" if device == "cuda" else "float32"}
    return probe_trials(target, backward_target, device, [trial], timeout_s)[0]


def probe_trials(
    target: str,
    backward_target: str | None,
    device: str,
    trials: Sequence[Mapping[str, Any]],
    timeout_s: float = TIMEOUT_S,
) -> list[str | None]:
    """Like `probe`, with an answer per trial: fields of `dilabench.backends.trial.Trial`, the dtype by its name."""
    answer = _answer([target, backward_target, device, list(trials)], timeout_s)
    return [answer] * len(trials) if isinstance(answer, str) else answer


def _answer(question: list[Any], timeout_s: float) -> list[str | None] | str:
    """A reason per trial; a single text if the process did not finish."""
    arguments = json.dumps(question)
    process = subprocess.Popen(
        python_command("-m", "dilabench.backends.probe", arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        start_new_session=True,
    )
    try:
        answer, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # The library may have started compilers, so the whole session of the probe is killed.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"the probe did not end within {timeout_s:g} s"
    if process.returncode < 0:
        return f"the probe was killed by signal {signal.Signals(-process.returncode).name}"
    lines = answer.strip().splitlines()
    if process.returncode or not lines:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        return f"the probe ended with code {process.returncode}: {last[0]}"
    reasons: list[str | None] = json.loads(lines[-1])["reasons"]
    return reasons


def _reason(target: str, backward_target: str | None, device: str, fields: Mapping[str, Any]) -> str | None:
    """Run one trial, in the probe's process."""
    from pkgutil import resolve_name

    import torch

    from dilabench.backends import math
    from dilabench.backends.trial import Trial, findings

    trial = Trial(**{**fields, "dtype": getattr(torch, fields["dtype"])})
    try:
        attend = resolve_name(target)
        attend_backward = math.attend_backward if backward_target is None else resolve_name(backward_target)
        wrong = [f for f in findings(attend, attend_backward, trial, torch.device(device)) if not f.passed]
    # Any exception of a foreign library is the answer.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "; ".join(f"{f.name} is off by {f.error:.2e}, allowed {f.tolerance:.2e}" for f in wrong) or None


def main() -> None:
    """Answer one probe on standard output; only the last line counts, because libraries may print before it."""
    target, backward_target, device, trials = json.loads(sys.argv[1])
    reasons = [_reason(target, backward_target, device, trial) for trial in trials]
    sys.stdout.write("\n" + json.dumps({"reasons": reasons}) + "\n")


if __name__ == "__main__":
    main()

"""Check a dense kernel: its contract call by call, then as the backend of an implementation."""

from collections.abc import Iterator
from typing import Any, get_args

from dilabench.backends.probe import probe_trials
from dilabench.choice.descriptors import unmet, wrong_device
from dilabench.conformance.implementation import check_implementation
from dilabench.conformance.scorecard import Findings
from dilabench.machine import Machine
from dilabench.patterns.dense import DENSE
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Backend
from dilabench.workload.spec import DType, Workload

TIMEOUT_S = 600.0
# Features that callers of `Attend` may use (dilabench.contracts), each in addition to a first trial that uses none.
TRIALS: dict[str, dict[str, Any]] = {
    "not causal": {"causal": False},
    "window": {"causal": False, "window": (7, 3)},
    "causal window": {"window": (5, -1)},
    "fewer key/value heads (GQA)": {"kv_heads": 2},
    "one query and one key": {"length": 1, "more_keys": 0},
    "strides of dilated branches": {"layout": "diagonal"},
    "every other row and head": {"layout": "every_other"},
    "larger heads": {"head_dim": 80},
}


def check_backend(backend: Backend, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Check `attend` and `attend_backward` against their contract in every dtype; then the plain method over them."""
    if lacking := unmet(backend.requires, machine) or wrong_device(backend.supports.devices, machine):
        findings.add("contract", "skipped", "; ".join(lacking))
        return
    trials = dict(_trials(backend))
    reasons = {name: _reasons(trial, backend, catalogue, machine) for name, trial in trials.items()}
    able = {name: trial for name, trial in trials.items() if not reasons[name]}
    answers = probe_trials(backend.target, backend.backward_target, machine.device, list(able.values()), TIMEOUT_S)
    wrong = dict(zip(able, answers, strict=True))
    for name in trials:
        if reasons[name]:
            findings.add(name, "skipped", reasons[name])
        else:
            checked = "out, lse, dq, dk, dv of a union of key sets" if backend.backward_target else "out and lse"
            findings.add(name, "wrong" if wrong[name] else "right", wrong[name] or checked)
    over = (
        implementation
        for implementation in catalogue.implementations
        if implementation.uses_backend and implementation.role == "plain" and not implementation.backends
    )
    if (plain := next(over, None)) is not None:
        findings.add(
            "below: the plain method", "right", f"{plain.name} over {backend.name}, checked against the oracle"
        )
        check_implementation(plain, catalogue, machine, findings, backend=backend.name)


def _trials(backend: Backend) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fields of `dilabench.backends.trial.Trial` by name: each dtype, then each feature in the first dtype."""
    multiple = backend.supports.head_dim_multiple
    base = {"heads": 4, "kv_heads": 4, "head_dim": -(-24 // multiple) * multiple}
    dtypes = [dtype for dtype in get_args(DType) if dtype in backend.supports.dtypes]
    for dtype in dtypes:
        yield f"dtype {dtype}", {**base, "dtype": dtype}
    for name, fields in TRIALS.items():
        yield name, {**base, "dtype": dtypes[-1] if "float32" not in dtypes else "float32", **fields}


def _reasons(trial: dict[str, Any], backend: Backend, catalogue: Catalogue, machine: Machine) -> str:
    """Return why the backend does not support a trial; empty if it does."""
    workload = Workload(
        pattern=DENSE,
        batch_size=2,
        seq_len=trial.get("length", 37),
        num_heads=trial["heads"],
        num_kv_heads=trial["kv_heads"],
        head_dim=trial["head_dim"],
        dtype=trial["dtype"],
        causal=trial.get("causal", True),
        window=trial.get("window", (-1, -1)),
    )
    return "; ".join(catalogue.unsupported(backend, workload, machine.device))

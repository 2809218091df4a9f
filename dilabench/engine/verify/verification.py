"""`verify`: is a built function right? And `summary`: why not, in a line."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dilabench.engine.verify.confirmed import Confirmed
from dilabench.engine.verify.embeddings import embeddings_checks
from dilabench.engine.verify.heads import Seen, heads_checks
from dilabench.engine.verify.near_misses import diagnose
from dilabench.engine.verify.oracle.blocks import blocks_cached
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.record import Check, Verification
from dilabench.workload.spec import Workload


@blocks_cached()
def verify(
    function: Callable[..., Tensor],
    workload: Workload,
    *,
    takes: str = "heads",
    device: torch.device | str = "cpu",
    seed: int = 0,
    deterministic: bool = False,
    module: nn.Module | None = None,
    oracle: Oracle | None = None,
    confirmed: Confirmed | None = None,
) -> Verification:
    """Check a function that was built for `workload` against the oracle, at the workload's own size (semantics.md §4).

    takes: as in the implementation's descriptor. module: for takes = "embeddings", the module behind `function` when
    that is a wrapper of it (a compiled one, say). oracle: pass the same one for all implementations of a workload; it
    must have been made for this workload, takes and device, and then `seed` and `device` are its own. deterministic:
    two identical calls must then agree bitwise. confirmed: a second implementation that every row is compared with if
    the oracle can afford only a sample; it is used only if the oracle confirms it.

    Exceptions of the function pass through. A wrong result does not raise: see `Verification.passed` and `summary`.
    Raises ValueError for an oracle of another workload, or a module without an `attention` attribute.
    """
    started = time.perf_counter_ns()
    oracle = oracle or Oracle(workload, takes=takes, seed=seed, device=device)
    if oracle.workload != workload or oracle.takes != takes:
        raise ValueError(f"the oracle is for {oracle.workload.label()}, takes {oracle.takes}; make one for this case")
    if takes == "embeddings":
        found = module if module is not None else function
        if not isinstance(found, nn.Module) or not hasattr(found, "attention"):
            raise ValueError(
                f"an implementation that takes embeddings must build an nn.Module with its core in the attribute "
                f"'attention'; got a {type(found).__name__}"
            )
        checks, diagnosis, against = tuple(embeddings_checks(function, found, oracle, deterministic)), None, None
    else:
        seen = Seen()
        checks = tuple(heads_checks(function, oracle, deterministic, confirmed, seen))
        against = seen.against
        diagnosis = diagnose(oracle, seen, checks)
    duration = max(0, time.perf_counter_ns() - started)
    return Verification(
        checks=checks,
        sampled_rows=oracle.sample.row_count,
        against=against,
        diagnosis=diagnosis,
        duration_ns=duration,
    )


def summary(verification: Verification) -> str:
    """One line on the first failing check, which explains the later ones, after the mistake whose result it looks like:
    'out is that of offset=blocked; out: error 3.1e-01 > tolerance 2.0e-06 at batch 0, position 1024, head 3, dim 5
    (and dq, dv)'.
    """
    failing = [check for check in verification.checks if not check.passed]
    if not failing:
        return f"{len(verification.checks)} checks passed" if verification.checks else "nothing was checked"
    others = f" (and {', '.join(check.name for check in failing[1:])})" if failing[1:] else ""
    named = f"{verification.diagnosis}; " if verification.diagnosis else ""
    return f"{named}{_line(failing[0])}{others}"


def _line(check: Check) -> str:
    if check.error is None or check.tolerance is None:
        text = check.detail or "failed"
    elif check.tolerance == 0:
        text = f"error {check.error:.3g}" + (f" ({check.detail})" if check.detail else "")
    else:
        text = f"error {check.error:.1e} > tolerance {check.tolerance:.1e}"
    return f"{check.name}: {text}" + (f" at {check.where}" if check.where else "")

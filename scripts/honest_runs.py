"""Do right implementations pass verification on random workloads? Every failure is a fault of the checks, or a bug.

A seed draws a workload; each implementation that supports it here is verified as `dilabench verify` does, on each
backend, and a call of its timed sequence is checked. Writes counts, and each failure with all that repeats it.

    python scripts/honest_runs.py --seconds 540 --processes 8 --device cuda --out honest.json
    python scripts/honest_runs.py --first-seed 1234 --seeds 1          # one workload again
"""

import argparse
import collections
import gc
import json
import multiprocessing
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.verify import summary
from dilabench.engine.verify.case_verifier import CaseVerifier
from dilabench.engine.verify.timed_outputs import TimedOutputs
from dilabench.engine.worker.protocol import case_spec
from dilabench.machine import Machine, detect
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.manager import discover
from dilabench.record import Case
from dilabench.workload.spec import Workload

HEAD_DIMS = (1, 2, 3, 7, 8, 16, 24, 32, 33, 48, 64, 80, 96, 128, 200, 256)
MASKS = ("local_window", "global_local", "dilated_sparse", "strided", "hierarchical", "random")
# B·N·H·D: verifying twice as much takes twice as long and shows no more.
MOST_VALUES = 2**19


def random_workload(seed: int) -> Workload:
    """The workload of a seed: any pattern, shape, dtype, mask, window, layout and mode; N evenly over its logarithm."""
    draw = random.Random(seed)
    length = round(3000 ** draw.random())
    kv_heads, head_dim = draw.randint(1, 4), draw.choice(HEAD_DIMS)
    while kv_heads * length * head_dim > MOST_VALUES:
        head_dim = draw.choice(HEAD_DIMS)
    room = max(1, MOST_VALUES // (kv_heads * length * head_dim))
    heads = kv_heads * draw.randint(1, min(4, room))
    batch = draw.randint(1, max(1, min(3, MOST_VALUES // (heads * length * head_dim))))
    causal = draw.random() < 0.5
    window = (draw.choice((-1, -1, -1, 0, 5, length // 3)), -1 if causal else draw.choice((-1, -1, 0, 4)))
    fields: dict[str, Any] = {"batch_size": batch, "layout": "padded"}
    if draw.random() < 0.2:
        inner = sorted(draw.sample(range(1, length), min(length - 1, draw.randint(0, 4))))
        fields = {"batch_size": 1, "layout": "packed", "cu_seqlens": (0, *inner, length)}
    return Workload.model_validate(
        {
            **fields,
            "pattern": _pattern(draw, length),
            "seq_len": length,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": draw.choice(("float64", "float32", "float32", "bfloat16", "bfloat16", "float16")),
            "causal": causal,
            "window": window,
            "scale": draw.choice((None, None, None, 0.3, 1.0)),
            "mode": draw.choice(("forward", "backward", "both", "both")),
        }
    )


def _pattern(draw: random.Random, length: int) -> dict[str, Any]:
    kind = draw.choice(("dense", "dilated", "dilated", "dilated", "block_sparse"))
    if kind == "dense":
        return {"kind": "dense"}
    if kind == "dilated":
        return _branches(draw, length)
    sparsity, size = draw.choice((0.0, 0.5, 0.9)), draw.choice((16, 16, 32, 64, 128))
    fields = {"mask": draw.choice(MASKS), "block_size": size, "sparsity": sparsity, "per_head": draw.random() < 0.3}
    branches = _branches(draw, length) if draw.random() < 0.3 else None
    return {"kind": kind, **fields, "seed": draw.randrange(100), "branches": branches}


def _branches(draw: random.Random, length: int) -> dict[str, Any]:
    count = draw.randint(1, 4)
    nested = draw.random() < 0.5
    first = max(1, round((2 * length) ** draw.random()))
    lengths = [first * 2**k if nested else max(1, round((2 * length) ** draw.random())) for k in range(count)]
    rates = [2**k if nested and draw.random() < 0.7 else draw.randint(1, 13) for k in range(count)]
    return {
        "kind": "dilated",
        "segment_lengths": lengths,
        "dilation_rates": rates,
        "heads": draw.choice(("all", "all", "grouped")),
        "offset": draw.choice(("modulo", "modulo", "blocked")),
        "offset_by": draw.choice(("head", "head", "kv_head")),
        "merge_grad": draw.choice(("exact", "exact", "exact", "detached")),
    }


def cases_of(workload: Workload, catalogue: Catalogue, machine: Machine) -> Iterator[Case]:
    """Every implementation for one device and backend that nothing known speaks against."""
    for implementation in catalogue.implementations:
        if implementation.sharding is not None:
            continue
        names = catalogue.backends.names if implementation.uses_backend else (None,)
        for backend in names:
            case = Case(implementation=implementation.name, backend=backend, workload=workload)
            if not catalogue.reasons_against(case, machine):
                yield case


def failures_of(case: Case, seed: int, verifier: CaseVerifier, catalogue: Catalogue, machine: Machine) -> list[str]:
    """What verification and the check of a timed call say against a case; empty where it passes both."""
    device = torch.device(machine.device)
    call = PreparedCall(case_spec(case, catalogue, seed, machine), device, InputStore(device))
    verification, why = verifier.verify(call)
    outputs = TimedOutputs(call)
    outputs.know(verification)
    call.timed_calls.begin(last=True)
    call.fresh()()
    kept = call.timed_calls.end()
    timed = outputs.check(kept) if kept is not None else verification
    return [*([] if verification.passed else [why]), *([] if timed.passed else [summary(timed)])]


def work(first: int, step: int, stop: int, until: float, device: str) -> dict[str, Any]:
    """Seeds first, first + step, … below `stop`, until the time `until` (of time.monotonic)."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    catalogue, machine = discover().catalogue, detect(device)
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for seed in range(first, stop, step):
        workload, verifier = random_workload(seed), CaseVerifier(torch.device(device))
        for case in cases_of(workload, catalogue, machine):
            if time.monotonic() > until:
                return {"counts": counts, "failures": failures}
            name = f"{case.implementation} {case.backend or ''}".strip()
            counts[name] += 1
            try:
                found = failures_of(case, seed, verifier, catalogue, machine)
            except Exception as error:  # noqa: BLE001 (a case that raises is a finding, the others go on)
                found = [f"{type(error).__name__}: {error}"]
            if found:
                print(f"seed {seed}, {name}, {workload.label()}: {'; '.join(found)}", flush=True)
                failures.append({"seed": seed, "case": case.model_dump(mode="json"), "why": found})
        counts["workloads"] += 1
        gc.collect()
    return {"counts": counts, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10**9)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("honest_runs.json"))
    asked = parser.parse_args()
    until, stop = time.monotonic() + asked.seconds, asked.first_seed + asked.seeds
    parts = [(asked.first_seed + i, asked.processes, stop, until, asked.device) for i in range(asked.processes)]
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        results = pool.starmap(work, parts, chunksize=1)
    counts = sum((collections.Counter(one["counts"]) for one in results), collections.Counter())
    failures = [failure for one in results for failure in one["failures"]]
    workloads = counts.pop("workloads", 0)
    report = {
        "workloads": workloads,
        "verifications": counts.total(),
        "failed": len(failures),
        "counts": dict(sorted(counts.items())),
        "failures": failures,
    }
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("workloads", "verifications", "failed")}))


if __name__ == "__main__":
    main()

"""Do right implementations pass verification on random workloads? Every failure is a fault of the checks, or a bug.

A seed draws a workload; each implementation that supports it here is verified as `dilabench verify` does, on each
backend, and calls of its timed sequence are checked. Writes counts, and each failure with all that repeats it.

    python scripts/honest_runs.py --processes 8 --device cuda --out honest.json
    python scripts/honest_runs.py --first-seed 1234 --seeds 1          # one workload again
    python scripts/honest_runs.py --ranks 2                            # rings over two processes, by gloo
"""

import argparse
import collections
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dilabench.distributed.launch import meeting_store
from dilabench.distributed.world import World
from dilabench.engine.call.counted_bytes import counted
from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.case_spec import case_spec
from dilabench.engine.verify import summary
from dilabench.engine.verify.case_verifier import CaseVerifier
from dilabench.engine.verify.timed_outputs import TimedOutputs
from dilabench.machine import Machine, detect
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.manager import discover
from dilabench.record import Case
from dilabench.workload.spec import Workload

HEAD_DIMS = (1, 2, 3, 7, 8, 16, 24, 32, 33, 48, 64, 80, 96, 128, 200, 256)
MASKS = ("local_window", "global_local", "dilated_sparse", "strided", "hierarchical", "random")
# B·N·H·D: verifying twice as much takes twice as long and shows no more.
MOST_VALUES = 2**19
# How long a case may go on after the time is over. One that was ended then has no result.
GRACE_S = 60.0
# In each of two slots.
TIMED_CALLS = 5


def random_workload(seed: int, longest: int = 3000) -> Workload:
    """The workload of a seed: any pattern, shape, dtype, mask, window, layout and mode; N to `longest`, by its log."""
    draw = random.Random(seed)
    length = round(longest ** draw.random())
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


def cases_of(
    workload: Workload, catalogue: Catalogue, machine: Machine, compiled: bool, ranks: int = 1
) -> Iterator[Case]:
    """Every implementation for one device, or for several ranks, and backend that nothing known speaks against."""
    for implementation in catalogue.implementations:
        if (implementation.sharding is None) != (ranks == 1) or (implementation.compiles and not compiled):
            continue
        names = [one.name for one in catalogue.backends if compiled or not one.compiles]
        for backend in names if implementation.uses_backend else (None,):
            case = Case(implementation=implementation.name, backend=backend, workload=workload, world_size=ranks)
            if not catalogue.reasons_against(case, machine):
                yield case


def failures_of(
    case: Case, seed: int, verifier: CaseVerifier, catalogue: Catalogue, machine: Machine, world: World | None = None
) -> list[str]:
    """What verification and the checks of timed calls say against a case; empty where it passes both."""
    device = torch.device(machine.device)
    call = PreparedCall(case_spec(case, catalogue, seed, machine), device, InputStore(device), world)
    verification, why = verifier.verify(call)
    outputs = TimedOutputs(call)
    outputs.know(verification)
    for last in (False, True):
        call.timed_calls.begin(last, seed=seed)
        with counted(call) as other_bytes:
            for _ in range(TIMED_CALLS):
                call.fresh()()
        kept = call.timed_calls.end()
    timed = outputs.check(kept) if kept is not None else verification
    failed = [*([] if verification.passed else [why]), *([] if timed.passed else [summary(timed)]), *other_bytes]
    return failed if world is None else list(dict.fromkeys(why for of_rank in world.share(failed) for why in of_rank))


@dataclasses.dataclass
class Found:
    """What one process has found so far. seed: the one it is at."""

    seed: int
    workloads: int = 0
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def work_as_rank(asked: argparse.Namespace, rank: int, store: str, until: float, path: Path) -> None:
    """The same as one of the ranks, all of which go through all seeds; rank 0 keeps the time and writes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with World.join(meeting_store(store, asked.ranks), rank, asked.ranks, torch.device("cpu")) as world:
        work(asked, asked.first_seed, until, path, world)


def work(asked: argparse.Namespace, first: int, until: float, path: Path, world: World | None = None) -> None:
    """Every `processes`-th seed from the first on, until the time `until` (of time.time). `path` gets what is found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    catalogue, machine = discover().catalogue, detect(asked.device)
    stride = asked.processes if world is None else 1
    found = Found(first)
    for found.seed in range(first, asked.first_seed + asked.seeds, stride):
        workload, verifier = random_workload(found.seed, asked.longest), CaseVerifier(torch.device(asked.device))
        for case in cases_of(workload, catalogue, machine, asked.compiled, asked.ranks):
            path.write_text(json.dumps(vars(found)))
            over = time.time() > until
            if over if world is None else world.share(over)[0]:
                return
            name = f"{case.implementation} {case.backend or ''}".strip()
            found.counts[name] += 1
            try:
                why = failures_of(case, found.seed, verifier, catalogue, machine, world)
            except Exception as error:  # noqa: BLE001 (a case that raises is a finding, the others go on)
                why = [f"{type(error).__name__}: {error}"]
            if why:
                print(f"seed {found.seed}, {name}, {workload.label()}: {'; '.join(why)}", flush=True)
                found.failures.append({"seed": found.seed, "case": case.model_dump(mode="json"), "why": why})
            if any("CUDA error" in one for one in why):
                # Nothing works in this process from now on.
                until = 0.0
        found.workloads += 1
        gc.collect()
    path.write_text(json.dumps(vars(found)))


def main() -> None:
    """Share the seeds out among processes, and put together what each has written, also one that died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="after this no case is begun")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10**9)
    parser.add_argument("--longest", type=int, default=3000, help="tokens; part of what repeats a seed")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="verify rings over so many processes instead (CPU)")
    parser.add_argument("--compiled", action="store_true", help="also what compiles for seconds at its first call")
    parser.add_argument("--out", type=Path, default=Path("honest_runs.json"))
    asked = parser.parse_args()
    until, context = time.time() + asked.seconds, multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        count = asked.processes if asked.ranks == 1 else asked.ranks
        paths = [Path(folder) / str(index) for index in range(count)]
        firsts = range(asked.first_seed, asked.first_seed + count)
        store = str(Path(folder) / "store")
        running = [
            context.Process(target=work, args=(asked, first, until, path))
            if asked.ranks == 1
            else context.Process(target=work_as_rank, args=(asked, index, store, until, path))
            for index, (first, path) in enumerate(zip(firsts, paths, strict=True))
        ]
        for process in running:
            process.start()
        ended = []
        for process in running:
            process.join(max(0.0, until + GRACE_S - time.time()))
            if process.is_alive():
                ended.append(process)
                process.kill()
                process.join()
        nothing = [vars(Found(first)) for first in firsts]
        results = [
            json.loads(path.read_text()) if path.exists() else one for path, one in zip(paths, nothing, strict=True)
        ]
    died = [
        {"seed": result["seed"], "why": [f"its process ended with {process.exitcode}"]}
        for process, result in zip(running, results, strict=True)
        if process.exitcode and process not in ended
    ]
    # All ranks have seen the same cases.
    results = results if asked.ranks == 1 else results[:1]
    counts = sum((collections.Counter(one["counts"]) for one in results), collections.Counter())
    failures = [*died, *(failure for one in results for failure in one["failures"])]
    totals = {
        "workloads": sum(one["workloads"] for one in results),
        "verifications": counts.total(),
        "failed": len(failures),
    }
    report = {**totals, "longest": asked.longest, "counts": dict(sorted(counts.items())), "failures": failures}
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(totals))


if __name__ == "__main__":
    main()

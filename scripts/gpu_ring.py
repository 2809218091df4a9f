"""Ring attention on the GPUs of one host: is each algorithm right, and how near is it to P times one device?

    torchrun --standalone --nproc-per-node 4 scripts/gpu_ring.py --peers --out "$OUT/ring.json"

Every algorithm is held to float64 first (error at most twice that of one device in bfloat16); then forward and backward
are timed against one device with the same kernel. Times are the maximum over ranks of each sample, then the median.
With --peers, public projects compute the causal dense rows from the same inputs in the same processes, timed by the
same function; one that is wrong gets a row that says so, and no time. What raises becomes a row with the reason. The
file is written after each row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import gpu_ring_peers as peers
from gpu_ring_trial import (
    DENSE,
    Row,
    backend_of,
    errors_of,
    late,
    peak,
    random_inputs,
    say,
    share,
    small_workload,
    timed,
    together,
    workload_of,
)

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.distributed.ablation import idle
from dilabench.distributed.launch import world_from_environment
from dilabench.distributed.single_rank import SingleRank
from dilabench.distributed.world import World
from dilabench.impls import strided
from dilabench.impls.ring import allgather, gathered, rings, ulysses

ALGORITHMS = {
    "ring": rings.build,
    "ring-overlap": rings.build_overlap,
    "zigzag-ring": rings.build_zigzag,
    "ring-allgather": allgather.build,
    "zigzag-allgather": gathered.build,
    "ring-varlen": rings.build_varlen,
    "ulysses": ulysses.build,
}
# preset, algorithm, least efficiency, longest time in ms (targets for 4 H200)
TARGETS: tuple[tuple[str, str, float, float | None], ...] = (
    ("large", "zigzag-ring", 0.75, 20.0),
    ("large_seq", "zigzag-ring", 0.88, 50.0),
    ("qwen3_32b", "zigzag-ring", 0.85, None),
    ("qwen3_32b", "zigzag-allgather", 0.85, None),
    ("medium", "zigzag-ring", 0.50, None),
    ("longnet_128k", "ring-allgather", 0.80, None),
    ("longnet_1m", "ring-allgather", 0.92, None),
    ("large", "ring-overlap", 0.0, None),
    ("large", "ring", 0.0, None),
    ("large", "zigzag-allgather", 0.0, None),
    ("large", "ulysses", 0.0, None),
    ("qwen3_32b", "ulysses", 0.0, None),
)


def main() -> int:
    """Verify, time, print, write; 0 when everything is right and every target of this many GPUs is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="dense kernel of both sides (sdpa-cudnn, flash4); sdpa-flash on a CPU")
    parser.add_argument("--windowed-backend", default="sdpa-flash", help="the kernel that verifies windows")
    parser.add_argument("--peers", action="store_true", help="time public projects beside the causal dense rows")
    parser.add_argument("--slow-peers", action="store_true", help="also those forms of them that are never the fastest")
    parser.add_argument("--seconds", type=float, default=200.0, help="start no new row after this long")
    parser.add_argument("--only", default="", help="comma-separated presets")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="comma-separated: which to verify and time")
    parser.add_argument("--skip-verify", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths by this, for a trial without a GPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), "ring.json"))
    options = parser.parse_args()
    options.backend = options.backend or ("sdpa-cudnn" if options.device == "cuda" else "sdpa-flash")
    started = options.started = time.monotonic()
    world = world_from_environment(options.device, timeout_s=150.0)
    report: Row = {
        "ranks": world.size,
        "transport": world.transport,
        "backend": options.backend,
        "dtype": options.dtype,
        "verified": [],
    }
    report |= {"verified_peers": [], "timed": [], "peers": []}
    say(world, f"messages by {world.transport}")
    with world:
        try:
            if not options.skip_verify:
                verify_all(world, options, report)
            if options.peers:
                peers.verify_all(world, options, report)
            time_all(world, options, report)
        finally:
            report["seconds"] = round(time.monotonic() - started, 1)
            write(world, options, report)
    right = all(row["passed"] for row in report["verified"])
    return 0 if right and all(row["meets"] for row in report["timed"]) else 5 if not right else 6


def time_all(world: World, options: argparse.Namespace, report: Row) -> None:
    """Every row of the targets, each preset's peers after its first one."""
    for preset, algorithm, efficiency, longest_ms in TARGETS:
        wanted = algorithm in options.algorithms.split(",") and preset in (options.only or preset).split(",")
        if not wanted or late(world, options, f"{preset} {algorithm}"):
            continue
        found, why = together(world, partial(measure, world, options, preset, algorithm))
        row = found or {"preset": preset, "algorithm": algorithm, "failed": why}
        meets = found is not None and found["efficiency"] >= efficiency
        meets = meets and (longest_ms is None or row["total_ms"] <= longest_ms)
        row |= {"target_efficiency": efficiency, "target_ms": longest_ms, "meets": meets}
        report["timed"].append(row)
        write(world, options, report)
        tell(world, row)
        if options.peers and workload_of(preset, options).pattern.kind == "dense":
            if not any(one["preset"] == preset for one in report["peers"]):
                single_ms = found and found["single"]["total_ms"]
                for one in peers.rows(world, options, report, preset, single_ms):
                    report["peers"].append(one)
                    write(world, options, report)
                    peers.tell(world, preset, one)
            peers.compare(world, row, [one for one in report["peers"] if one["preset"] == preset])
            write(world, options, report)


def write(world: World, options: argparse.Namespace, report: Row) -> None:
    """What is known so far."""
    if world.rank == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1))


def verify_all(world: World, options: argparse.Namespace, report: Row) -> None:
    """Each algorithm on odd shapes: dense, grouped heads, window, dilated, packed."""
    n = 2048
    dilated = {"kind": "dilated", "segment_lengths": [n // 4, n // 2, n], "dilation_rates": [1, 2, 6]}
    trials: list[tuple[str, Row]] = [
        ("causal", {**DENSE, "seq_len": n}),
        ("causal, N prime", {**DENSE, "seq_len": 2039}),
        ("full", {**DENSE, "seq_len": n, "causal": False}),
        ("window", {**DENSE, "seq_len": n, "window": (300, 0)}),
        ("dilated", {"pattern": dilated, "seq_len": n}),
        ("dilated full", {"pattern": dilated, "seq_len": n, "causal": False}),
    ]
    bounds = (0, 7, n // 4, n - 300, n)
    packed = [("packed", {**DENSE, "seq_len": n, "batch_size": 1, "layout": "packed", "cu_seqlens": bounds})]
    rows = report["verified"]
    of_one_form = {"ring-varlen": packed, "zigzag-allgather": [*trials[:4], *packed]}
    for name in options.algorithms.split(","):
        for what, fields in of_one_form.get(name, trials):
            workload = small_workload(options, **fields)
            backend = backend_of(options.windowed_backend if what == "window" else options.backend)
            found, why = together(world, partial(errors_of, world, ALGORITHMS[name], workload, backend))
            row = found or {"failed": why, "ratio": float("inf")}
            rows.append({"algorithm": name, "workload": what, **row, "passed": row["ratio"] <= 2.0})
            write(world, options, report)
            if not rows[-1]["passed"]:
                say(world, f"WRONG {rows[-1]}")
    passed = sum(row["passed"] for row in rows)
    say(world, f"verified {passed} of {len(rows)}; largest ratio to one device {max(r['ratio'] for r in rows):.2f}")
    write(world, options, report)


def measure(world: World, options: argparse.Namespace, preset: str, algorithm: str) -> Row:
    """One row: one device, all devices, and all devices without communication and without computation."""
    workload = workload_of(preset, options)
    backend = backend_of(options.backend)
    inputs = random_inputs(workload, world.device, seed=2)
    single = timed(world, strided.build(workload, BuildContext(device=world.device, backend=backend)), inputs)
    build = ALGORITHMS[algorithm]

    def built(world: World, backend: LoadedBackend) -> Any:
        return build(workload, BuildContext(device=world.device, backend=backend, world=world))

    whole = built(world, backend)
    shards = [whole.shards.take(x, world.rank) for x in inputs]
    del inputs
    world.traffic.clear()
    parallel = timed(world, whole, shards)
    calls = parallel.pop("calls")
    single.pop("calls")
    counted = {name: count // calls for name, count in world.traffic.counters().items()}
    most = {name: max(fact.get(name, 0) for fact in share(world, counted)) for name in sorted(counted)}
    compute = timed(world, built(SingleRank.silenced(world), backend), shards)["total_ms"]
    communication = timed(world, built(world, idle(backend)), shards)["total_ms"]
    total, alone = parallel["total_ms"], single["total_ms"]
    return {
        "preset": preset,
        "algorithm": algorithm,
        "workload": workload.label(),
        "single": single,
        **parallel,
        "efficiency": alone / (world.size * total),
        "speedup": alone / total,
        "tokens_per_s": round(workload.tokens / total * 1e3),
        "compute_only_ms": compute,
        "communication_only_ms": communication,
        "exposed_ms": total - compute,
        "bytes_per_call_max_over_ranks": most,
        "peak_bytes": peak(world),
    }


def tell(world: World, row: Row) -> None:
    """A line per row, as soon as it is known."""
    if "failed" in row:
        say(world, f"{row['preset']:<13} {row['algorithm']:<14} FAILED {row['failed']}")
        return
    single = row["single"]
    say(
        world,
        f"{row['preset']:<13} {row['algorithm']:<14} one {single['forward_ms']:.2f} + {single['backward_ms']:.2f} ms, "
        f"{world.size} ranks {row['forward_ms']:.2f} + {row['backward_ms']:.2f} = {row['total_ms']:.2f} ms, "
        f"efficiency {row['efficiency']:.1%} (target {row['target_efficiency']:.0%}) "
        f"compute alone {row['compute_only_ms']:.2f}, communication alone {row['communication_only_ms']:.2f}, "
        f"exposed {row['exposed_ms']:.2f}{'' if row['meets'] else '  BELOW TARGET'}",
    )


if __name__ == "__main__":
    sys.exit(main())

"""Ring attention on the GPUs of one host: is each algorithm right, and how near is it to P times one device?

    torchrun --standalone --nproc-per-node 4 scripts/gpu_ring.py --out "$OUT/ring.json"

Every algorithm is held to float64 first (error at most twice that of one device in bfloat16); then forward and backward
are timed against one device with the same kernel. Times are the maximum over ranks of each sample, then the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
from torch import Tensor

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.distributed.ablation import MuteWorld, idle
from dilabench.distributed.launch import world_from_environment
from dilabench.distributed.whole import Whole
from dilabench.distributed.world import World
from dilabench.impls import dense, strided
from dilabench.impls.ring import allgather, overlap, ring, ulysses, varlen, zigzag
from dilabench.plugins.builtin import dilabench_register_backends
from dilabench.registry import Catalogue, load_target
from dilabench.spec import Workload
from dilabench.workloads.presets import PRESETS

ALGORITHMS = {
    "ring": ring,
    "ring-overlap": overlap,
    "zigzag-ring": zigzag,
    "ring-allgather": allgather,
    "ring-varlen": varlen,
    "ulysses": ulysses,
}
DENSE = {"pattern": {"kind": "dense"}}
LONGNET = {
    "kind": "dilated",
    "segment_lengths": [2048, 4096, 8192, 16384, 32768],
    "dilation_rates": [1, 2, 4, 8, 16],
}
# preset, algorithm, least efficiency, longest time in ms (targets for 4 H200)
TARGETS: tuple[tuple[str, str, float, float | None], ...] = (
    ("large", "zigzag-ring", 0.75, 20.0),
    ("large_seq", "zigzag-ring", 0.88, 50.0),
    ("qwen3_32b", "zigzag-ring", 0.85, None),
    ("medium", "zigzag-ring", 0.50, None),
    ("longnet_128k", "ring-allgather", 0.80, None),
    ("longnet_1m", "ring-allgather", 0.92, None),
    ("large", "ring-overlap", 0.0, None),
    ("large", "ring", 0.0, None),
    ("large", "ulysses", 0.0, None),
    ("qwen3_32b", "ulysses", 0.0, None),
)


def main() -> int:
    """Verify, time, print, write; 0 when everything is right and every target of this many GPUs is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="sdpa-cudnn", help="dense kernel of both sides (sdpa-cudnn, flash4)")
    parser.add_argument("--windowed-backend", default="sdpa-flash", help="the kernel that verifies windows")
    parser.add_argument("--seconds", type=float, default=200.0, help="start no new row after this long")
    parser.add_argument("--only", default="", help="comma-separated presets")
    parser.add_argument("--skip-verify", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths by this, for a trial without a GPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), "ring.json"))
    options = parser.parse_args()
    started = time.monotonic()
    world = world_from_environment(options.device, timeout_s=150.0)
    report: dict[str, Any] = {"ranks": world.size, "backend": options.backend, "verified": [], "timed": []}
    try:
        if not options.skip_verify:
            report["verified"] = verify_all(world, options)
        for preset, algorithm, efficiency, longest_ms in TARGETS:
            if options.only and preset not in options.only.split(","):
                continue
            late = world.share(time.monotonic() - started > options.seconds)
            if any(late):
                say(world, f"{preset} {algorithm}: no time left")
                continue
            row = measure(world, options, preset, algorithm)
            meets = row["efficiency"] >= efficiency and (longest_ms is None or row["total_ms"] <= longest_ms)
            row |= {"target_efficiency": efficiency, "target_ms": longest_ms, "meets": meets}
            report["timed"].append(row)
            tell(world, row)
    finally:
        report["seconds"] = round(time.monotonic() - started, 1)
        if world.rank == 0:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1))
        world.close()
    right = all(row["passed"] for row in report["verified"])
    return 0 if right and all(row["meets"] for row in report["timed"]) else 5 if not right else 6


def workload_of(preset: str, shrink: int, dtype: str) -> Workload:
    """A preset's workload; `longnet_1m` is longnet_128k at a million tokens."""
    name, length = ("longnet_128k", 1048576) if preset == "longnet_1m" else (preset, None)
    fields = dict(next(one for one in PRESETS if one.name == name).fields)
    fields.setdefault("dtype", "bfloat16")
    pattern = LONGNET if fields.pop("pattern", "dense") == "dilated" else {"kind": "dense"}
    for gone in ("segment_lengths", "dilation_rates"):
        fields.pop(gone, None)
    fields["seq_len"] = (length or int(fields["seq_len"])) // shrink
    fields["num_kv_heads"] = fields.get("num_kv_heads") or fields["num_heads"]
    fields |= {"dtype": dtype, "mode": "both", "pattern": pattern}
    return Workload.model_validate(fields)


def verify_all(world: World, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each algorithm on odd shapes: dense, grouped heads, window, dilated, packed."""
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    base = {"batch_size": 2, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "dtype": dtype, "mode": "both"}
    n = 2048
    dilated = {"kind": "dilated", "segment_lengths": [n // 4, n // 2, n], "dilation_rates": [1, 2, 6]}
    trials: list[tuple[str, dict[str, Any]]] = [
        ("causal", {**DENSE, "seq_len": n}),
        ("causal, N prime", {**DENSE, "seq_len": 2039}),
        ("full", {**DENSE, "seq_len": n, "causal": False}),
        ("window", {**DENSE, "seq_len": n, "window": (300, 0)}),
        ("dilated", {"pattern": dilated, "seq_len": n}),
        ("dilated full", {"pattern": dilated, "seq_len": n, "causal": False}),
    ]
    bounds = (0, 7, n // 4, n - 300, n)
    packed = [("packed", {**DENSE, "seq_len": n, "batch_size": 1, "layout": "packed", "cu_seqlens": bounds})]
    rows = []
    for name in ALGORITHMS:
        for what, fields in packed if name == "ring-varlen" else trials:
            workload = Workload.model_validate({**base, **fields})
            backend = options.windowed_backend if what == "window" else options.backend
            rows.append(verify_one(world, name, what, workload, load_backend(backend)))
            if not rows[-1]["passed"]:
                say(world, f"WRONG {rows[-1]}")
    passed = sum(row["passed"] for row in rows)
    say(world, f"verified {passed} of {len(rows)}; largest ratio to one device {max(r['ratio'] for r in rows):.2f}")
    return rows


def verify_one(world: World, name: str, what: str, workload: Workload, backend: LoadedBackend) -> dict[str, Any]:
    """Largest and mean error over ranks, of out, dq, dk and dv, next to those of one device."""
    packed = workload.layout == "packed"
    inputs = random_inputs(workload, world.device, seed=1)
    exact_backend = load_backend("math")
    alone = World.alone(world.device)
    context = BuildContext(device=world.device, backend=backend, world=world)
    one = Whole(ring.build(workload, BuildContext(device=world.device, backend=backend, world=alone)), packed)
    exact_context = BuildContext(device=world.device, backend=exact_backend, world=alone)
    exact = Whole(ring.build(workload.replace(dtype="float64"), exact_context), packed)
    found = gradients_of(Whole(ALGORITHMS[name].build(workload, context), packed), inputs)
    single = gradients_of(one, inputs)
    wanted = gradients_of(exact, [x.double() for x in inputs])
    ratios, errors = {}, {}
    for part, a, b, c in zip(("out", "dq", "dk", "dv"), found, single, wanted, strict=True):
        mine, theirs = (a.double() - c).abs(), (b.double() - c).abs()
        floor = torch.finfo(a.dtype).eps * float(c.abs().max()) / 4
        # The mean tells of drift, the maximum of a single wrong place.
        worst = float(mine.max()) / max(float(theirs.max()), floor), float(mine.mean()) / float(theirs.mean())
        ratios[part], errors[part] = max(worst), float(mine.max())
    ratio = max(world.share(max(ratios.values())))
    return {"algorithm": name, "workload": what, "ratio": ratio, "errors": errors, "passed": ratio <= 2.0}


def measure(world: World, options: argparse.Namespace, preset: str, algorithm: str) -> dict[str, Any]:
    """One row: one device, all devices, and all devices without communication and without computation."""
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    workload = workload_of(preset, options.shrink, dtype)
    backend = load_backend(options.backend)
    inputs = random_inputs(workload, world.device, seed=2)
    build_one = dense.build if workload.pattern.kind == "dense" else strided.build
    single = timed(world, build_one(workload, BuildContext(device=world.device, backend=backend)), inputs)
    module = ALGORITHMS[algorithm]

    def built(world: World, backend: LoadedBackend) -> Any:
        return module.build(workload, BuildContext(device=world.device, backend=backend, world=world))

    whole = built(world, backend)
    shards = [whole.shards.take(x, world.rank) for x in inputs]
    del inputs
    world.traffic.clear()
    parallel = timed(world, whole, shards)
    calls = parallel.pop("calls")
    single.pop("calls")
    counted = {name: count // calls for name, count in world.traffic.counters().items()}
    most = {name: max(fact.get(name, 0) for fact in world.share(counted)) for name in sorted(counted)}
    compute = timed(world, built(MuteWorld.of(world), backend), shards)["total_ms"]
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


def timed(world: World, function: Any, inputs: list[Tensor], seconds: float = 1.2) -> dict[str, Any]:
    """Median forward, backward and total in ms; every sample is the maximum over ranks."""
    q, k, v, dout = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    samples: list[tuple[float, float, float]] = []
    wanted, calls = 4, 0
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    while len(samples) < wanted:
        calls += 1
        sample = one_call(world, function, leaves, dout)
        if calls == 3:
            slowest = max(world.share(sample[2]))
            wanted = max(5, min(30, int(seconds * 1e3 / max(slowest, 1e-3))))
        if calls > 3:
            samples.append(sample)
    by_rank = world.share(samples)
    forward, backward, total = (
        statistics.median(max(rank[index][part] for rank in by_rank) for index in range(len(samples)))
        for part in range(3)
    )
    ranks = [statistics.median(sample[2] for sample in rank) for rank in by_rank]
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "total_ms": total,
        "rank_ms": ranks,
        "samples": len(samples),
        "calls": calls,
    }


def one_call(world: World, function: Any, leaves: list[Tensor], dout: Tensor) -> tuple[float, float, float]:
    """Forward, backward and total of one call in ms, started together."""
    if world.device.type == "cpu":
        world.barrier()
        marks = [time.perf_counter()]
        out = function(*leaves)
        marks.append(time.perf_counter())
        torch.autograd.grad(out, leaves, dout)
        marks.append(time.perf_counter())
        return (marks[1] - marks[0]) * 1e3, (marks[2] - marks[1]) * 1e3, (marks[2] - marks[0]) * 1e3
    world.barrier()
    # An all-reduce on the device: queued work of all ranks starts together, launches hidden behind it.
    torch.cuda._sleep(5_000_000)
    world.sum_in_place([torch.ones(1, device=world.device)])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    out = function(*leaves)
    events[1].record()
    torch.autograd.grad(out, leaves, dout)
    events[2].record()
    torch.cuda.synchronize(world.device)
    forward, backward = events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])
    return forward, backward, forward + backward


def random_inputs(workload: Workload, device: torch.device, seed: int) -> list[Tensor]:
    """q, k, v and dout, the same on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    lead = (workload.seq_len,) if workload.layout == "packed" else (workload.batch_size, workload.seq_len)
    heads = (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads, workload.num_heads)
    dtype = getattr(torch, workload.dtype)
    return [torch.randn(*lead, h, workload.head_dim, generator=generator, device=device, dtype=dtype) for h in heads]


def gradients_of(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def load_backend(name: str) -> LoadedBackend:
    """A built-in backend by name."""
    catalogue = Catalogue()
    for backend in dilabench_register_backends():
        catalogue.backends.add(backend, "dilabench")
    descriptor = catalogue.backends.get(name)
    assert descriptor.backward_target is not None
    return LoadedBackend(descriptor.name, load_target(descriptor.target), load_target(descriptor.backward_target))


def peak(world: World) -> int:
    """Peak device memory of this rank since the last timing began."""
    return torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0


def tell(world: World, row: dict[str, Any]) -> None:
    """A line per row, as soon as it is known."""
    single = row["single"]
    say(
        world,
        f"{row['preset']:<13} {row['algorithm']:<14} one {single['forward_ms']:.2f} + {single['backward_ms']:.2f} ms, "
        f"{world.size} ranks {row['forward_ms']:.2f} + {row['backward_ms']:.2f} = {row['total_ms']:.2f} ms, "
        f"efficiency {row['efficiency']:.1%} (target {row['target_efficiency']:.0%}) "
        f"compute alone {row['compute_only_ms']:.2f}, communication alone {row['communication_only_ms']:.2f}, "
        f"exposed {row['exposed_ms']:.2f}{'' if row['meets'] else '  BELOW TARGET'}",
    )


def say(world: World, text: str) -> None:
    """Rank 0 speaks for all."""
    if world.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

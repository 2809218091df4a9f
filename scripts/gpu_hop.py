"""How fast one hop of a ring is, by copy engines and by NCCL, alone and beside an attention kernel.

    torchrun --standalone --nproc-per-node 2 scripts/gpu_hop.py --out "$OUT/hop.json"

Each rank sends to the next and receives from the one before, both at once. Beside attention, the table gives the time
of both together and of each alone: what a transfer costs is what it adds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from gpu_ring_trial import backend_of, say, share

from dilabench.distributed.launch import world_from_environment
from dilabench.distributed.world import World

MIB = 1 << 20


def main() -> int:
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", default="1,16,128,512,1024", help="sizes of a message")
    parser.add_argument("--backend", default="sdpa-cudnn")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), "hop.json"))
    options = parser.parse_args()
    worlds = {}
    world = world_from_environment("cuda", timeout_s=30.0)
    say(world, f"transport: {world.transport}")
    worlds["nccl"] = replace(world, copies=None, transport="nccl")
    if world.copies is not None:
        worlds["copies"] = world
    attention, alone_ms = kernel(world, options.backend)
    rows = []
    for name, one in worlds.items():
        for size in options.mebibytes.split(","):
            rows.append(measure(one, name, int(size) * MIB, attention, alone_ms))
            say(world, json.dumps(rows[-1]))
    if world.rank == 0:
        options.out.write_text(json.dumps({"ranks": world.size, "attention_ms": alone_ms, "rows": rows}, indent=1))
    world.close()
    return 0


def kernel(world: World, backend: str) -> tuple[Callable[[], object], float]:
    """A causal attention call of some milliseconds, and how many."""
    attend = backend_of(backend).attend
    q, k, v = (torch.randn(4, 8192, 16, 128, device=world.device, dtype=torch.bfloat16) for _ in range(3))

    def call() -> object:
        return attend(q, k, v, causal=True, scale=128**-0.5)

    return call, timed(world, lambda: None, call)


def measure(
    world: World, name: str, nbytes: int, attention: Callable[[], object], alone_ms: float
) -> dict[str, object]:
    """One row: a message of so many bytes to the next rank."""
    sent = torch.full((nbytes,), world.rank + 1, dtype=torch.uint8, device=world.device)
    received = torch.zeros_like(sent)
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def begin() -> Callable[[], None]:
        return world.swap({following: [sent]}, {before: [received]}, "hop").wait

    def transfer() -> None:
        begin()()

    hop_ms = timed(world, lambda: None, transfer)
    right = bool((received == before + 1).all())
    both_ms = timed(world, begin, attention)
    return {
        "transport": name,
        "mib": nbytes // MIB,
        "right": all(share(world, right)),
        "hop_ms": round(hop_ms, 4),
        "gb_per_s": round(nbytes / hop_ms / 1e6, 1),
        "with_attention_ms": round(both_ms, 3),
        "added_ms": round(both_ms - alone_ms, 3),
    }


def timed(world: World, begin: Callable[[], object], call: Callable[[], object], samples: int = 12) -> float:
    """Median of the slowest rank, in ms. What `begin` gives is called after `call`."""
    found = []
    for _ in range(samples):
        torch.cuda.synchronize(world.device)
        share(world, None)
        torch.cuda._sleep(3_000_000)
        world.sum_in_place([torch.ones(1, device=world.device)])
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        end = begin()
        call()
        if callable(end):
            end()
        stop.record()
        torch.cuda.synchronize(world.device)
        found.append(max(share(world, start.elapsed_time(stop))))
    return statistics.median(found[2:])


if __name__ == "__main__":
    sys.exit(main())

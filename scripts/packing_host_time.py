"""CPU time of the host for packings that were not seen before, and memory over many of them; nothing is launched, so
that launches (one for the lists of a pass) are missing.

    python scripts/packing_host_time.py [packings]

A new packing is looked up from its bounds, then gets the lists of one forward and one backward pass.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from statistics import median
from typing import Any

import torch
from triton.runtime import JITFunction

from dilabench.attention import operands
from dilabench.contracts import BuildContext
from dilabench.impls.fused import Packings
from dilabench.kernels.fused.packing import ListRequest, PassRequests
from dilabench.workload.spec import Workload

TOKENS, TILE = 65536, 64
PATTERNS: dict[str, dict[str, Any]] = {
    "LongNet's branches, causal": {
        "pattern": {"kind": "dilated", "segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)},
        "causal": True,
    },
    "GigaPath's branches, detached": {
        "pattern": {
            "kind": "dilated",
            "segment_lengths": (1024, 5792, 32768, 185363, 1048576),
            "dilation_rates": (1, 2, 4, 8, 16),
            "offset": "blocked",
            "padding": "zero_key",
            "merge_grad": "detached",
        },
        "causal": False,
    },
}


def bounds_of(seed: int) -> tuple[int, ...]:
    """19 to 35 documents."""
    numbers = random.Random(seed)
    return (0, *sorted(numbers.sample(range(1, TOKENS), numbers.randint(18, 34))), TOKENS)


def measure(fields: dict[str, Any], count: int) -> str:
    """A line of figures."""
    shape = {"batch_size": 1, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64, "dtype": "bfloat16", "mode": "both"}
    packed = {"layout": "packed", "cu_seqlens": (0, TOKENS), "seq_len": TOKENS}
    workload = Workload.model_validate({**shape, **packed, **fields})
    packings, x = Packings(workload, BuildContext(device=torch.device("cpu"))), torch.empty(0)
    kept: dict[int, tuple[PassRequests, PassRequests]] = {}

    def host_us(seed: int) -> float:
        bounds = bounds_of(seed)
        began = time.process_time_ns()
        computation = packings.of(operands.without_empty(operands.bounds(bounds, TOKENS), TOKENS))
        plan, packing = computation.plan, computation.packing
        assert packing is not None
        if id(plan) not in kept:
            forward = PassRequests(*(ListRequest(group, TILE, TILE) for group in plan.groups))
            of_both = [ListRequest(group, TILE, TILE, key, TILE) for group in plan.groups for key in (False, True)]
            backward = PassRequests(*of_both)
            kept[id(plan)] = forward, backward
        for requests in kept[id(plan)]:
            packing.lists(requests, workload.causal, x)
        return (time.process_time_ns() - began) / 1e3

    for seed in range(100):
        host_us(seed)
    times = [host_us(seed) for seed in range(100, 100 + count)]
    gc.collect()
    tracemalloc.start()
    for seed in range(100):
        host_us(seed)
    before, _ = tracemalloc.get_traced_memory()
    for seed in range(100 + count, 100 + 2 * count):
        host_us(seed)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (
        f"median {median(times):.0f} µs of host time, memory {(after - before) / 1024:+.0f} KiB over {count} packings"
    )


if __name__ == "__main__":
    JITFunction.run = lambda *_arguments, **_options: None
    packings_measured = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for name, fields in PATTERNS.items():
        print(f"{name}: {measure(fields, packings_measured)}")

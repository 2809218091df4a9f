"""Host time of attention over ranks, by part: forward and backward, from a profile of 100 calls.

    torchrun --nproc-per-node 2 scripts/ranks_host_time.py --shape 1x8192x32x8x128

The profile slows a call down; the time of one call without it is printed beside. On CPUs the ranks use gloo, and times
hold waits for messages: read the counts there.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from dilabench.attention import ring_attention, sequence_shards

CALLS = 100
# By what a file's path holds, the first that fits; what has no file belongs to its caller.
PARTS = {
    "messages": ("dilabench/distributed/", "ring/schedule/row_exchange", "torch/distributed/", "cuda/streams"),
    "merges": ("ring/schedule/sums", "kernels/combine", "kernels/merge", "kernels/lse", "launch_cache", "triton/"),
    "kernels": ("dilabench/backends/", "ring/schedule/calls", "kernels/cpu/"),
    "autograd": ("torch/autograd/", "impls/one_operator", "impls/operator_rules"),
    "lists and views": ("ring/schedule/pieces",),
    "call": ("dilabench/attention/", "dilabench/impls/"),
}
OPERATIONS = {
    "lists and views": ("narrow", "transpose", "view", "unbind", "as_strided", "squeeze", "flatten", "contiguous"),
    "kernels": ("torch._ops",),
    "autograd": ("run_backward", "built-in method apply"),
    "allocations": ("empty",),
}


def part_of(file: str, name: str) -> str | None:
    """The part that a function belongs to; None for one that is its caller's."""
    for part, texts in (OPERATIONS if file == "~" else PARTS).items():
        if any(text in (name if file == "~" else file) for text in texts):
            return part
    return None if file == "~" else "other"


def by_part(profile: cProfile.Profile) -> dict[str, tuple[float, float]]:
    """By part the microseconds and the function calls of one call."""
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for (file, _, name), (_, count, own_s, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        part = part_of(file, name)
        if part is not None:
            seconds[part] += own_s
            counts[part] += count
            continue
        for (caller_file, _, caller), (_, calls, caller_s, _) in callers.items():
            part = part_of(caller_file, caller) or "other"
            seconds[part] += caller_s
            counts[part] += calls
    return {part: (own_s / CALLS * 1e6, counts[part] / CALLS) for part, own_s in seconds.most_common()}


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median time until the host is back, of calls that find the device idle and the ranks together."""
    found = []
    for _ in range(20):
        dist.barrier()
        wait_for(device)
        began_s = time.perf_counter()
        call()
        found.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(found)


def wait_for(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Profile one call's shape on all ranks; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1x8192x32x8x128", help="BxNxHxKxD")
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--order", default="zigzag")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    batch, length, heads, kv_heads, dim = map(int, given.shape.split("x"))
    shards = sequence_shards(length, order=given.order)
    query, key, value = (
        torch.randn(batch, shards.rows, count, dim, device=device, dtype=getattr(torch, given.dtype)).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    dout = torch.randn_like(query)

    def call() -> object:
        out = ring_attention(query, key, value, shards, algorithm=given.algorithm)
        return torch.autograd.grad(out, (query, key, value), dout)

    for _ in range(5):
        call()
    alone_ms = median_ms(call, device)
    # The backward pass in the thread that is profiled.
    torch.autograd.set_multithreading_enabled(False)
    for _ in range(3):
        call()
    profile = cProfile.Profile()
    for _ in range(CALLS):
        dist.barrier()
        wait_for(device)
        profile.enable()
        call()
        profile.disable()
    if dist.get_rank() == 0:
        parts = by_part(profile)
        lines = [f"{part:16} {own_us:7.0f} us {count:7.1f} calls" for part, (own_us, count) in parts.items()]
        total_us, total = (sum(column) for column in zip(*parts.values(), strict=True))
        what = f"{given.shape} over {dist.get_world_size()} ranks ({shards.transport(device)}), {given.algorithm}"
        print(
            f"{what}: {alone_ms:.2f} ms on the host",
            *lines,
            f"{'profiled':16} {total_us:7.0f} us {total:7.1f} calls",
            sep="\n",
        )
    else:
        shards.transport(device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What `gpu_ring.py` does with every row, ours and a peer's: inputs, errors, times, and going on after a failure."""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilabench.backends.load import load_backend
from dilabench.contracts import Build, BuildContext, LoadedBackend
from dilabench.distributed.whole import Whole
from dilabench.distributed.world import World
from dilabench.impls.ring import rings
from dilabench.plugins.builtin.workloads import PRESETS
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.manager import discover
from dilabench.workload.spec import Workload

DENSE = {"pattern": {"kind": "dense"}}
LONGNET = {
    "kind": "dilated",
    "segment_lengths": [2048, 4096, 8192, 16384, 32768],
    "dilation_rates": [1, 2, 4, 8, 16],
}
Row = dict[str, Any]
Result = TypeVar("Result")


class OtherRankFailedError(RuntimeError):
    """Another rank's reason for not going on with a row."""


def together(world: World, work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """A row's work on all ranks: this rank's result, or why it failed on the first rank where it did.

    A rank that fails says so in place of the next fact that the others share, so that all of them end the row there.
    """
    result = why = None
    try:
        result = work()
    except OtherRankFailedError as failure:
        return None, str(failure)
    except Exception as error:  # noqa: BLE001 (whatever a row raises must not end the others)
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        traceback.print_exc()
    try:
        share(world, None, why)
    except OtherRankFailedError as failure:
        return None, str(failure)
    finally:
        if why and world.device.type == "cuda":
            torch.cuda.empty_cache()
    return result, None


def share(world: World, fact: Any, why: str | None = None) -> list[Any]:
    """A fact of every rank, in their order. Raises OtherRankFailedError when one has a reason to fail instead."""
    told = world.share((why, fact))
    for rank, (reason, _) in enumerate(told):
        if reason:
            raise OtherRankFailedError(f"rank {rank}: {reason}")
    return [fact for _, fact in told]


def late(world: World, options: argparse.Namespace, what: str) -> bool:
    """No row is begun on any rank when the time is over on one."""
    over = any(share(world, time.monotonic() - options.started > options.seconds))
    if over:
        say(world, f"{what}: no time left")
    return over


def workload_of(preset: str, options: argparse.Namespace) -> Workload:
    """A preset's workload; `longnet_1m` is longnet_128k at a million tokens."""
    name, length = ("longnet_128k", 1048576) if preset == "longnet_1m" else (preset, None)
    fields = dict(next(one for one in PRESETS if one.name == name).fields)
    pattern = LONGNET if fields.pop("pattern", "dense") == "dilated" else {"kind": "dense"}
    for gone in ("segment_lengths", "dilation_rates"):
        fields.pop(gone, None)
    fields["seq_len"] = (length or int(fields["seq_len"])) // options.shrink
    fields["num_kv_heads"] = fields.get("num_kv_heads") or fields["num_heads"]
    fields |= {"dtype": options.dtype, "mode": "both", "pattern": pattern}
    return Workload.model_validate(fields)


def small_workload(options: argparse.Namespace, **fields: Any) -> Workload:
    """What can be compared with float64 in no time."""
    base = {"batch_size": 2, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "dtype": options.dtype, "mode": "both"}
    return Workload.model_validate({**base, **fields})


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


def errors_of(world: World, build: Build, workload: Workload, backend: LoadedBackend) -> Row:
    """Largest and mean error over ranks, of out, dq, dk and dv, next to those of one device."""
    packed = workload.layout == "packed"
    inputs = random_inputs(workload, world.device, seed=1)
    exact_backend = backend_of("math")
    alone = World.alone(world.device)
    context = BuildContext(device=world.device, backend=backend, world=world)
    one = Whole(rings.build(workload, BuildContext(device=world.device, backend=backend, world=alone)), packed)
    exact_context = BuildContext(device=world.device, backend=exact_backend, world=alone)
    exact = Whole(rings.build(workload.replace(dtype="float64"), exact_context), packed)
    found = gradients_of(Whole(build(workload, context), packed), inputs)
    single = gradients_of(one, inputs)
    wanted = gradients_of(exact, [x.double() for x in inputs])
    ratios, errors = {}, {}
    for part, a, b, c in zip(("out", "dq", "dk", "dv"), found, single, wanted, strict=True):
        mine, theirs = (a.double() - c).abs(), (b.double() - c).abs()
        floor = torch.finfo(a.dtype).eps * float(c.abs().max()) / 4
        # The mean tells of drift, the maximum of a single wrong place.
        worst = float(mine.max()) / max(float(theirs.max()), floor), float(mine.mean()) / float(theirs.mean())
        ratios[part], errors[part] = max(worst), float(mine.max())
    return {"ratio": max(share(world, max(ratios.values()))), "errors": errors}


def timed(world: World, function: Any, inputs: list[Tensor], seconds: float = 1.2) -> Row:
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
            slowest = max(share(world, sample[2]))
            wanted = max(5, min(30, int(seconds * 1e3 / max(slowest, 1e-3))))
        if calls > 3:
            samples.append(sample)
    by_rank = share(world, samples)
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
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    share(world, None)
    if world.device.type == "cpu":
        marks = [time.perf_counter()]
        out = function(*leaves)
        marks.append(time.perf_counter())
        torch.autograd.grad(out, leaves, dout)
        marks.append(time.perf_counter())
        return (marks[1] - marks[0]) * 1e3, (marks[2] - marks[1]) * 1e3, (marks[2] - marks[0]) * 1e3
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


def peak(world: World) -> int:
    """Peak device memory of this rank since the last timing began."""
    return torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0


def backend_of(name: str) -> LoadedBackend:
    """A registered backend by name."""
    return load_backend(catalogue().backends.get(name))


@cache
def catalogue() -> Catalogue:
    """Everything that is registered."""
    return discover().catalogue


def say(world: World, text: str) -> None:
    """Rank 0 speaks for all."""
    if world.rank == 0:
        print(text, flush=True)

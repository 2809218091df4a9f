"""Implementations that are slower than another by a known share, to test the engine's detection (torch).

On a CPU a busy wait follows the call, for a share of its time. On CUDA a spin kernel follows it, for a share of the
time measured when it was built.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from dilabench.contracts import AttentionFn, BuildContext
from dilabench.engine.device.device import device_of
from dilabench.engine.timers.cuda_events import elapsed_ns
from dilabench.impls.strided import build as build_plain
from dilabench.workload.spec import Workload

PROBE_CALLS = 20
PROBE_CYCLES = 1_000_000

Build = Callable[[Workload, BuildContext], AttentionFn]


def slowed(effect: float) -> Build:
    """The builder of a call that takes 1 + `effect` times as long."""

    def build(workload: Workload, context: BuildContext) -> AttentionFn:
        plain = build_plain(workload, context)
        if context.device.type == "cuda":
            return _spinning(plain, effect)
        return _waiting(plain, effect)

    return build


build_same = slowed(0.0)
build_slower_2 = slowed(0.02)
build_slower_5 = slowed(0.05)
build_slower_10 = slowed(0.10)


def _waiting(plain: AttentionFn, effect: float) -> AttentionFn:
    clock = time.perf_counter_ns

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        started = clock()
        out = plain(q, k, v)
        ready = clock()
        until = ready + int(effect * (ready - started))
        while clock() < until:
            pass
        return out

    return call


def _spinning(plain: AttentionFn, effect: float) -> AttentionFn:
    cycles: list[int] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not cycles:
            call_ns = _gpu_ns(lambda: plain(q, k, v), q.device)
            spin_ns = _gpu_ns(lambda: torch.cuda._sleep(PROBE_CYCLES), q.device)
            cycles.append(round(effect * call_ns / spin_ns * PROBE_CYCLES))
        out = plain(q, k, v)
        if cycles[0]:
            torch.cuda._sleep(cycles[0])
        return out

    return call


def _gpu_ns(work: Callable[[], object], device: torch.device) -> float:
    """GPU time of a piece of work, the median of some after a first one."""
    work()
    times = []
    for _ in range(PROBE_CALLS):
        device_of(device).synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # the launches hide behind a spin, as they do in the timer
        torch.cuda._sleep(PROBE_CYCLES)
        begin.record()
        work()
        end.record()
        device_of(device).synchronize()
        times.append(elapsed_ns(begin, end))
    return float(median(times))

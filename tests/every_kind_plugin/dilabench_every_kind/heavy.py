"""What needs torch: a backend (math, called by another name), an implementation over any backend, a timer."""

import time

import torch
from torch import Tensor

from dilabench.backends.math import attend, attend_backward
from dilabench.contracts import AttentionFn, BuildContext
from dilabench.engine.timers import Call, Samples
from dilabench.record import Note
from dilabench.workload.spec import Workload
from dilabench_every_kind.stripes import Stripes

__all__ = ["TenCalls", "attend", "attend_backward", "build"]


def build(workload: Workload, context: BuildContext) -> AttentionFn:
    """Not causal and without a window, the keys that are seen are dense attention's; else a bias says which."""
    every, backend = Stripes.of(workload).every, context.require_backend()
    positions = torch.arange(workload.seq_len)
    first, stop = (torch.from_numpy(bound)[:, None] for bound in workload.shapes[0].bounds(positions.numpy()))
    hidden = (positions[::every] < first) | (positions[::every] >= stop)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k[:, ::every], v[:, ::every]
        if not hidden.any() and not torch.is_grad_enabled():
            return backend.attend(q, k, v, causal=False, scale=workload.softmax_scale)[0]
        g = workload.group_size
        scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(g, 2)) * workload.softmax_scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
        return torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(g, 2))

    return attention


class TenCalls:
    """A sample is the mean of ten calls by the host clock."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def take(self, count: int) -> Samples:
        return Samples(tuple(self._sample() for _ in range(count)))

    def notes(self) -> tuple[Note, ...]:
        return ()

    def _sample(self) -> int:
        calls = [self._call.fresh() for _ in range(10)]
        started = time.perf_counter_ns()
        for call in calls:
            call()
        return (time.perf_counter_ns() - started) // 10

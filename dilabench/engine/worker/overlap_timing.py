"""A call over ranks timed whole, without its communication and without its computation, interleaved (torch).

exposed communication = the whole call - computation alone (ring.md §6.4); the remaining communication is hidden behind
computation. The samples are a diagnosis of the row, not a measurement of an implementation. A call without one of its
parts gives a wrong result, on purpose.
"""

# ruff: noqa: ARG001 (a stand-in has the parameters of the original)
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.distributed.single_rank import SingleRank
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.timers import SampleTimer
from dilabench.metadata import RECEIVED_BYTES
from dilabench.record import Diagnostic, Part


def time_parts(
    call: PreparedCall, make_timer: Callable[[PreparedCall], SampleTimer], turns: int
) -> tuple[Diagnostic, ...]:
    """One sample of each part per round, on this rank; all ranks call this together.

    Empty for a call that sends no messages through its `World`, because other messages cannot be removed. Without
    "communication" if more than a backend's kernels would have to be removed.
    """
    assert call.world is not None
    if not any(call.world.share(call.counters().get(RECEIVED_BYTES.key, 0))):
        return ()
    calls: dict[Part, PreparedCall] = {"whole": call, "computation": call.ablated(computation_only)}
    if call.spec.backend is not None and call.spec.takes == "heads":
        calls["communication"] = call.ablated(communication_only)
    timers = {part: make_timer(call_of_part) for part, call_of_part in calls.items()}
    for timer in timers.values():
        timer.take(1)
    samples: dict[Part, list[int]] = {part: [] for part in timers}
    for _ in range(turns):
        for part, timer in timers.items():
            samples[part] += timer.take(1).samples_ns
    return tuple(Diagnostic(part=part, samples_ns=tuple(taken)) for part, taken in samples.items())


def computation_only(context: BuildContext) -> BuildContext:
    """The build context of a call that computes everything and sends no messages."""
    assert context.world is not None
    return replace(context, world=SingleRank.silenced(context.world))


def communication_only(context: BuildContext) -> BuildContext:
    """The build context of a call that packs, sends and merges everything without an attention kernel."""
    return replace(context, backend=idle(context.require_backend()))


def idle(backend: LoadedBackend) -> LoadedBackend:
    """The backend without its kernels, that for packed sequences too: results of the right shapes, never computed."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        *lead, rows, heads, _ = q.shape
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return torch.empty_like(q) if out is None else out, q.new_empty((*lead, heads, rows), dtype=lse_dtype)

    def attend_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        dq: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q) if dq is None else dq, torch.empty_like(k), torch.empty_like(v)

    packed = backend.packed and backend.packed._replace(attend=attend, attend_backward=attend_backward)
    return replace(backend, attend=attend, attend_backward=attend_backward, packed=packed)

"""A call over ranks as it is, without its communication and without its computation, in turns (torch).

exposed communication = the whole call - computation alone (ring.md §6.4); the rest of the communication is hidden
behind computation. The samples describe the call beside its row; they are no measurement of an implementation. What a
call without one of its parts computes is wrong on purpose.
"""

# ruff: noqa: ARG001 (what stands in for something takes what that takes)
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
    """One sample of each part per turn, on this rank; all ranks call this together.

    Nothing for a call that sends nothing through its `World`: what it sends in another way could not be left out.
    Without "communication" where more than a backend's kernels would have to be left out.
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
    """What to build with for a call that computes everything and sends nothing."""
    assert context.world is not None
    return replace(context, world=SingleRank.silenced(context.world))


def communication_only(context: BuildContext) -> BuildContext:
    """What to build with for a call that packs, sends and merges everything and runs no attention kernel."""
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

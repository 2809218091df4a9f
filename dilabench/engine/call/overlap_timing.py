"""A call over ranks as it is, without its communication and without its computation, in turns (torch).

exposed communication = the whole call - computation alone (ring.md §6.4); the rest of the communication is hidden
behind computation. The samples describe the call beside its row; they are no measurement of an implementation.
"""

from collections.abc import Callable, Mapping

from dilabench.distributed.ablation import communication_only, computation_only
from dilabench.engine.call.prepared_call import Ablation, PreparedCall
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
    calls: dict[Part, PreparedCall] = {"whole": call}
    calls |= {part: call.ablated(ablation) for part, ablation in _ablations(call).items()}
    timers = {part: make_timer(one) for part, one in calls.items()}
    for timer in timers.values():
        timer.take(1)
    samples: dict[Part, list[int]] = {part: [] for part in timers}
    for _ in range(turns):
        for part, timer in timers.items():
            samples[part] += timer.take(1).samples_ns
    return tuple(Diagnostic(part=part, samples_ns=tuple(taken)) for part, taken in samples.items())


def _ablations(call: PreparedCall) -> Mapping[Part, Ablation]:
    if call.spec.backend is None or call.spec.takes != "heads":
        return {"computation": computation_only}
    return {"computation": computation_only, "communication": communication_only}

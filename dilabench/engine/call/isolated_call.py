"""What a worker does with an isolated case: a call, its peak memory, samples, verification; nothing else in memory."""

import torch

from dilabench.choice.descriptors import load_target
from dilabench.distributed.world import World
from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.memory_limit import memory_limited
from dilabench.engine.call.peak_memory import measure_memory
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import device_of
from dilabench.engine.timers.wall import Wall
from dilabench.engine.verify import summary
from dilabench.engine.verify.sampled_rows import verify_sampled_rows
from dilabench.engine.worker.protocol import CaseSpec, IsolatedResult
from dilabench.record import Slot

MAX_SAMPLES = 20


def measure_isolated(
    spec: CaseSpec, device: torch.device, limit_bytes: int | None, seconds: float, world: World | None = None
) -> IsolatedResult:
    """Make inputs, call once, take the peak, sample for about `seconds`, all within the memory limit; then verify rows.

    With a world, one rank's part of that. Raises whatever the call raises, out of memory above all. The oracle works
    outside the limit.
    """
    load_target(spec.target)
    with memory_limited(device, limit_bytes, backward=spec.case.workload.mode != "forward"):
        call = PreparedCall(spec, device, InputStore(device), world)
        memory = measure_memory(call)
        count = max(1, min(MAX_SAMPLES, int(seconds * 1e9 / call.call_ns)))
        timer = Wall(call)
        samples = timer.take(count)
    device_of(device).release_cached()
    # The numbers that were timed are known by now; a result that was kept of them is not one of these.
    call.timed_calls.renew(call.inputs(0))
    verification = verify_sampled_rows(call)
    return IsolatedResult(
        verification=verification,
        why="" if verification.passed else summary(verification),
        memory=memory,
        slot=Slot(samples_ns=samples.samples_ns),
        notes=(*timer.notes(), *call.notes),
        setup_ns=call.setup_ns,
        counters=call.counters(),
    )

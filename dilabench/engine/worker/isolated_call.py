"""The measurement of an isolated case: a call, its peak memory, samples, verification, with no other case in memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from dilabench.choice.descriptors import load_target
from dilabench.distributed.world import World
from dilabench.engine.call.counted_bytes import counted
from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.intact import restored
from dilabench.engine.call.kernel_trace import profiled
from dilabench.engine.call.peak_memory import measure_memory
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.call.timed_calls import drawn_together
from dilabench.engine.device.device import device_of, resident_bytes
from dilabench.engine.timers.wall import Wall
from dilabench.engine.verify import summary
from dilabench.engine.verify.across_ranks import RanksOracle
from dilabench.engine.verify.call import form_checks
from dilabench.engine.verify.compare import compare_both_ways
from dilabench.engine.verify.heads import GRADIENTS, NO_GRADIENT, how_many, key_axes, row_axes
from dilabench.engine.verify.oracle.in_place import InPlaceOracle
from dilabench.engine.verify.timed_outputs import TimedOutputs
from dilabench.engine.worker.replies import Isolated
from dilabench.errors import said, text_of
from dilabench.record import Check, CheckName, Slot, Verification

MAX_SAMPLES = 20
# Random rows of each timed call that are compared: there may be a single such call.
TIMED_ROWS = 8

# An option of glibc's mallopt (malloc.h): allocations of at least this size are mapped one by one.
M_MMAP_THRESHOLD = -3
SMALLEST_MAPPED_BYTES = 128 * 2**10


def measure_isolated(
    spec: CaseSpec, device: torch.device, limit_bytes: int | None, seconds: float, world: World | None = None
) -> Isolated:
    """Make inputs, call once, take the peak, sample for about `seconds`, all within the memory limit; then verify rows
    of timed calls, and of one more call.

    With a world, one rank's part of this. Exceptions of the call pass through, mostly out of memory. The oracle works
    outside the limit.
    """
    load_target(spec.target)
    with memory_limited(device, limit_bytes, backward=spec.case.workload.mode != "forward"):
        call = PreparedCall(spec, device, InputStore(device), world)
        memory = measure_memory(call)
        count = max(1, min(MAX_SAMPLES, int(seconds * 1e9 / call.call_ns)))
        timer, timed, checker = Wall(call), call.timed_calls, TimedOutputs(call)
        timed.begin(count=count, seed=drawn_together(world), rows=TIMED_ROWS, holds=False)
        started = time.perf_counter_ns()
        try:
            with counted(call) as other_bytes:
                samples = timer.take(count)
        finally:
            timed.end()
            replaced = restored()
        checker.sampled(max(0, time.perf_counter_ns() - started))
    device_of(device).release_cached()
    of_timed = checker.check(None)
    found = [Check(name=CheckName.TIMED_MESSAGES, passed=False, detail=text) for text in other_bytes]
    if replaced:
        text = f"after a timed call {' and '.join(replaced)}"
        found.append(Check(name=CheckName.INTACT, passed=False, detail=text))
    of_timed = of_timed.model_copy(update={"checks": (*of_timed.checks, *found)})
    # The timed inputs may be known by now, so verification uses new ones: a kept result would be wrong.
    call.timed_calls.renew(call.inputs(0))
    before = verify_sampled_rows(call)
    checks, duration_ns = (*before.checks, *of_timed.checks), before.duration_ns + of_timed.duration_ns
    verification = of_timed.model_copy(
        update={"checks": checks, "sampled_rows": before.sampled_rows, "duration_ns": duration_ns}
    )
    return Isolated(
        verification=verification,
        why="" if verification.passed else summary(verification),
        memory=memory,
        slot=Slot(samples_ns=samples.samples_ns),
        notes=(*timer.notes(), *call.notes),
        setup_ns=call.setup_ns,
        counters=call.counters(),
    )


# Messages of Python, C++ and the system if a thread or process gets no memory for its stack.
NO_THREAD = ("can't start new thread", os.strerror(errno.EAGAIN))


@contextlib.contextmanager
def memory_limited(device: torch.device, limit_bytes: int | None, *, backward: bool = True) -> Iterator[None]:
    """Let this process allocate at most this many more bytes on the device; a larger allocation raises.

    CUDA: a cap on torch's caching allocator; other libraries' memory does not count. CPU: RLIMIT_DATA above what the
    process has mapped now, with every thread's stack and heap; a thread that finds too little left raises MemoryError.
    Raises ValueError on any other device. None sets no limit. `backward`: the calls inside have a backward pass.
    """
    if limit_bytes is None:
        yield
    elif (hardware := device_of(device)).facts.own_memory:
        with hardware.memory_limited(limit_bytes):
            yield
    else:
        yield from _data_limited(limit_bytes, backward)


def _data_limited(limit_bytes: int, backward: bool) -> Iterator[None]:
    # The threads of torch and its profiler, and modules that a first backward pass imports, take tens of MiB. They take
    # them now, before the limit.
    profiled(lambda: _use_torch(backward), torch.device("cpu"), memory=True)
    # A small object that a timed call leaves in the place of a freed tensor would keep the next one from fitting there.
    # So tensors are mapped one by one, and freed ones count no more. glibc has this option, other C libraries do not.
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, SMALLEST_MAPPED_BYTES)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = resident_bytes("VmData") + limit_bytes
    ceiling = wanted if before[1] == resource.RLIM_INFINITY else min(wanted, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, before[1]))
    try:
        yield
    except (OSError, RuntimeError) as error:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        if any(phrase in text_of(error) for phrase in NO_THREAD) and _thread_starts():
            raise MemoryError(f"none is left for a thread ({said(error)})") from error
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _use_torch(backward: bool) -> None:
    leaf = torch.ones(2**20, requires_grad=backward)
    result = leaf.mul(2)
    if backward:
        torch.autograd.grad(result, leaf, torch.ones_like(result))


def _thread_starts() -> bool:
    """Whether it was the limit that a thread did not start, not a want of threads or processes."""
    try:
        thread = threading.Thread(target=int)
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True


def verify_sampled_rows(call: PreparedCall) -> Verification:
    """Call once more and hold the result to the oracle. The call's dout is zero outside the sampled rows afterwards."""
    started = time.perf_counter_ns()
    inputs = call.inputs(0)
    there = device_of(inputs.q.device).verifies_on
    dout = call.output_gradient().to(there) if call.workload.mode != "forward" else None
    given = (inputs.q.to(there), inputs.k.to(there), inputs.v.to(there))
    if call.world is None:
        oracle = InPlaceOracle(call.workload, given, dout, call.spec.seed)
    else:
        oracle = RanksOracle(call.workload, given, dout, call.spec.seed, call.shards, call.world)
    checks = tuple(_checks(call, oracle))
    duration = max(0, time.perf_counter_ns() - started)
    return Verification(checks=checks, sampled_rows=oracle.sample.row_count, duration_ns=duration)


def _checks(call: PreparedCall, oracle: InPlaceOracle) -> Iterator[Check]:
    inputs = call.inputs(0)
    backward = call.workload.mode != "forward"
    with torch.set_grad_enabled(backward):
        out = call.function(inputs.q, inputs.k, inputs.v)
    form = form_checks(
        out.detach() if isinstance(out, Tensor) else out, oracle.out_shape, oracle.dtype, inputs.q.device
    )
    yield from form
    if not oracle.together(all(check.passed for check in form)):
        return
    gradients: tuple[Tensor | None, ...] = ()
    if backward:
        full = torch.autograd.grad(out, inputs.distinct, oracle.sampled_dout.to(out.device), allow_unused=True)
        taken = (oracle.sampled, oracle.keys_of, oracle.keys_of)
        gradients = tuple(
            None if x is None else take(x.to(oracle.device)).clone() for take, x in zip(taken, full, strict=True)
        )
        del full
    rows = oracle.sampled(out.detach().to(oracle.device)).clone()
    # The oracle's tensors fit only now.
    del out
    yield from compare_both_ways(CheckName.OUT, rows, oracle.expected[0], row_axes(oracle), how_many(oracle))
    for index, gradient in enumerate(gradients):
        name, axes = GRADIENTS[index], key_axes(oracle) if index else row_axes(oracle)
        if gradient is None:
            yield Check(name=name, passed=False, detail=NO_GRADIENT)
        else:
            yield from compare_both_ways(name, gradient, oracle.gradients[index], axes, f"dout on {how_many(oracle)}")

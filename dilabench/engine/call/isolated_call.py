"""What a worker does with an isolated case: a call, its peak memory, samples, verification; nothing else in memory."""

import gc
import time
from collections.abc import Iterator

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
from dilabench.metadata import STREAM_PIECES, STREAM_TOKENS, STREAM_WALL_NS, STREAMED
from dilabench.record import Check, Note, Slot, Verification
from dilabench.workload.spec import Workload

MAX_SAMPLES = 20
VERIFIED_PIECES = 4


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


class Stream:
    """Pieces of a stream one after another: fresh random inputs, one timed call each, some pieces verified."""

    def __init__(self, spec: CaseSpec, device: torch.device, pieces: int) -> None:
        self._call = PreparedCall(spec, device, InputStore(device))
        self._device = device_of(device)
        self._generator = torch.Generator(device)
        self._verified = _spread(pieces)

    def process(self, start: int, count: int) -> IsolatedResult:
        """Make, call and time pieces `start` to `start + count - 1`. Inputs depend on seed and number of a piece."""
        started = time.perf_counter_ns()
        samples, checks, rows = [], [], 0
        for piece in range(start, start + count):
            self._draw(piece)
            samples.append(self._time())
            if piece in self._verified:
                found = verify_sampled_rows(self._call)
                rows += found.sampled_rows or self._call.workload.tokens
                checks += list(_of_piece(found, piece))
        verification = Verification(
            checks=tuple(checks), sampled_rows=rows, duration_ns=max(0, time.perf_counter_ns() - started - sum(samples))
        )
        wall_ns = time.perf_counter_ns() - started
        return IsolatedResult(
            verification=verification,
            why="" if all(check.passed for check in checks) else summary(verification),
            slot=Slot(samples_ns=tuple(samples)),
            setup_ns=self._call.setup_ns,
            counters={
                STREAM_PIECES.key: count,
                STREAM_TOKENS.key: count * self.workload.tokens,
                STREAM_WALL_NS.key: wall_ns,
            },
            notes=self._notes(),
        )

    def measure_memory(self) -> IsolatedResult:
        """Peak bytes of one piece. Call it last, because it makes further calls."""
        return IsolatedResult(memory=measure_memory(self._call))

    @property
    def workload(self) -> Workload:
        """The workload of one piece."""
        return self._call.workload

    def _draw(self, piece: int) -> None:
        self._generator.manual_seed(self._call.spec.seed + piece)
        with torch.no_grad():
            for tensor in self._call.inputs(0).distinct:
                tensor.normal_(generator=self._generator)
            if self._call.workload.mode != "forward":
                self._call.output_gradient().normal_(generator=self._generator)

    def _time(self) -> int:
        call = self._call.fresh()
        self._device.synchronize()
        started = time.perf_counter_ns()
        result = call()
        self._device.synchronize()
        elapsed = max(1, time.perf_counter_ns() - started)
        del result
        gc.collect(0)
        return elapsed

    def _notes(self) -> tuple[Note, ...]:
        message = (
            f"streamed: pieces of {self.workload.seq_len} tokens, each a sequence of its own, one after another; a "
            "sample is one piece"
        )
        return (STREAMED.note(message),)


def _spread(pieces: int) -> frozenset[int]:
    """The first piece, the last, and some between."""
    last = pieces - 1
    return frozenset(last * index // max(1, VERIFIED_PIECES - 1) for index in range(VERIFIED_PIECES))


def _of_piece(found: Verification, piece: int) -> Iterator[Check]:
    for check in found.checks:
        place = f"piece {piece}" + (f", {check.where}" if check.where else "")
        yield check.model_copy(update={"where": place})

"""Common parts of the CUDA timers: events, the L2 flush, and a spacer that hides launches."""

import time
from collections.abc import Callable

import torch

from dilabench.engine.device.device import device_of
from dilabench.engine.timers import Call

SPACER_MIN_NS = 20_000
# For any call, for one that is not known to wait for the device inside, and for one that is known not to.
SPACER_MAX_NS, SPACER_LONGEST_NS, SPACER_LIMIT_NS = 5_000_000, 50_000_000, 200_000_000
OUTLASTED = 3
PROBE_CYCLES = 2_000_000


class Spacer:
    """How long the GPU has to spin before a call: twice as long as the host takes to enqueue it, so that launches are
    hidden. The spins of earlier calls that are still in the queue count.

    A call that waits for the device inside takes the longer the longer the spacer is: no spacer hides its launches.
    `OUTLASTED` calls in a row that outlast a long spacer may be such; any other may do so once. The next call gets a
    short spacer: if it is enqueued sooner by less than half of the difference, it does not wait but needs a longer one.
    """

    def __init__(self) -> None:
        self.ns = SPACER_MIN_NS
        self._longest_ns = SPACER_LONGEST_NS
        self._least_ns = SPACER_LIMIT_NS
        self._outlasted = 0
        # The long spacer that calls outlasted, and the time of enqueueing behind it, until the next call.
        self._suspect: tuple[int, int] | None = None
        # By the host's clock, the earliest end of the spins that were queued.
        self._ends_ns = 0

    def queued(self, now_ns: int) -> int:
        """The spin to queue now, in ns: with what is left of earlier ones the GPU spins for at least `ns`."""
        self._ends_ns = max(self._ends_ns, now_ns)
        spin_ns = max(SPACER_MIN_NS, now_ns + self.ns - self._ends_ns)
        self._ends_ns += spin_ns
        return spin_ns

    def adapt(self, enqueue_ns: int) -> None:
        """To the time that enqueueing a call behind the spacer took."""
        if self._suspect is not None:
            long_ns, behind_ns = self._suspect
            if behind_ns - enqueue_ns < (long_ns - self.ns) // 2:
                self._longest_ns = SPACER_LIMIT_NS
            self._suspect = None
        self._outlasted = self._outlasted + 1 if enqueue_ns >= self.ns > SPACER_MAX_NS else 0
        if self._outlasted == OUTLASTED:
            self._suspect = (self.ns, enqueue_ns) if self._longest_ns < SPACER_LIMIT_NS else None
            self._longest_ns = SPACER_MAX_NS
        self._least_ns = min(self._least_ns, enqueue_ns)
        most_ns = max(SPACER_MAX_NS, min(self._longest_ns, 2 * self._least_ns))
        self.ns = min(most_ns, max(self.ns, 2 * enqueue_ns))


class ColdStage:
    """Times one call on the GPU's own clock, with the cache emptied and the launches hidden.

    Before each call a buffer of twice the L2 is zeroed, then the GPU spins (`torch.cuda._sleep`) while the host
    enqueues the call: when it starts, everything it needs is in the queue. The spin adapts to the enqueue time seen,
    and to what the GPU still has to spin for the calls before.
    It therefore differs between ranks, whose GPUs wait for each other after it: else the sample of a rank that spins
    less would hold its wait for messages of a rank that still spins.
    """

    def __init__(self, call: Call) -> None:
        self._call, device = call, call.device
        l2 = device_of(device).l2_bytes
        # Inputs of four times the L2 push each other out: a flush would only cost time.
        self.flushes = call.working_set_bytes <= 4 * l2
        self._flush = torch.empty(2 * l2, dtype=torch.uint8, device=device) if self.flushes else None
        self._cycles_per_ns = _spin_rate(device)
        self.spacer = Spacer()

    def run(self, fresh: Callable[[], Callable[[], object]], count: int) -> tuple[list[int], list[int]]:
        """(GPU time, enqueue time) of `count` fresh calls in ns, with one synchronisation at the end."""
        events, enqueue_ns = [], []
        for _ in range(count):
            call = fresh()
            if self._flush is not None:
                self._flush.zero_()
            torch.cuda._sleep(int(self.spacer.queued(time.perf_counter_ns()) * self._cycles_per_ns))
            self._call.device_barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started = time.perf_counter_ns()
            begin.record()
            call()
            end.record()
            spent = time.perf_counter_ns() - started
            enqueue_ns.append(spent)
            events.append((begin, end))
            del call
            self.spacer.adapt(spent)
        torch.cuda.synchronize(self._call.device)
        return [elapsed_ns(begin, end) for begin, end in events], enqueue_ns


def elapsed_ns(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    """Time between two recorded events, at least 1 ns (their resolution is about 500 ns)."""
    return max(1, round(begin.elapsed_time(end) * 1e6))


def _spin_rate(device: torch.device) -> float:
    """Cycles that `torch.cuda._sleep` counts per nanosecond."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(PROBE_CYCLES // 10)
    begin.record()
    torch.cuda._sleep(PROBE_CYCLES)
    end.record()
    torch.cuda.synchronize(device)
    return PROBE_CYCLES / elapsed_ns(begin, end)

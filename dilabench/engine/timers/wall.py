"""Host clock around one call and a device synchronisation: the time that a user waits."""

import time
from collections.abc import Callable

from dilabench.engine.device.device import device_of
from dilabench.engine.timers import Call, ClockError, Samples
from dilabench.metadata import BATCHED, CLOCK
from dilabench.record import Note

RESOLUTIONS_PER_SAMPLE = 1000
MAX_BATCH = 1024
RETRIES = 3


class Wall:
    """A sample lasts at least a thousand clock resolutions: calls shorter than that are timed in batches.

    Backward-only calls are never batched, because the forward pass between them is not part of the time.
    """

    def __init__(self, call: Call, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._call = call
        self._clock = clock
        floor_ns = RESOLUTIONS_PER_SAMPLE * resolution_ns(clock)
        wanted = -(-floor_ns // max(1, call.call_ns))
        self._batch = 1 if call.workload.mode == "backward" else max(1, min(MAX_BATCH, wanted))
        self._backwards = 0
        self._device = device_of(call.device)
        self._sets = call.rotate(self._batch) if self._device.l2_bytes or self._batch > 1 else 1

    def take(self, count: int) -> Samples:
        """Elapsed host time per call, device work included; on a device with streams also the part before the call has
        returned. Raises ClockError when the clock will not advance.
        """
        samples = [self._sample() for _ in range(count)]
        enqueued = tuple(enqueue for _, enqueue in samples) if self._device.has_streams else ()
        return Samples(tuple(elapsed for elapsed, _ in samples), enqueued)

    def notes(self) -> tuple[Note, ...]:
        """Batching, and samples thrown away because the clock ran backwards."""
        notes = []
        if self._batch > 1:
            notes.append(
                BATCHED.note(
                    f"a sample is the mean of {self._batch} calls, because one is near the clock's resolution"
                    + (f"; they share {self._sets} input sets" if self._sets < self._batch else ""),
                    observed=self._batch,
                )
            )
        if self._backwards:
            message = f"the host clock did not advance over {self._backwards} samples, which were taken again"
            notes.append(CLOCK.note(message, observed=self._backwards, threshold=0))
        return tuple(notes)

    def _sample(self) -> tuple[int, int]:
        for _ in range(RETRIES):
            calls = [self._call.fresh() for _ in range(self._batch)]
            self._device.synchronize()
            started = self._clock()
            for call in calls:
                call()
            returned = self._clock() - started if self._device.has_streams else 0
            self._device.synchronize()
            elapsed = self._clock() - started
            if elapsed >= self._batch:
                return elapsed // self._batch, max(0, returned) // self._batch
            self._backwards += 1
        raise ClockError(f"the host clock did not advance over a call {RETRIES} times in a row; is it being set?")


def resolution_ns(clock: Callable[[], int] = time.perf_counter_ns, tries: int = 20) -> int:
    """The smallest step that the clock was seen to make, at least 1 ns."""
    steps = []
    for _ in range(tries):
        first = clock()
        second = clock()
        if second > first:
            steps.append(second - first)
    return min(steps, default=1)

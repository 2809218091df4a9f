"""CUDA events around one call on an empty L2, with the launches hidden: the GPU default."""

from statistics import median

from dilabench.engine.timers import Call, Samples
from dilabench.engine.timers.cuda_events import ColdStage
from dilabench.metadata import LAUNCH_BOUND, LAUNCH_EXPOSED, NO_FLUSH
from dilabench.record import Note

MIN_LAUNCHES = 3


class Cold:
    """GPU time of a call whose inputs are in memory, not in cache, as in a model where other layers ran in between."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._stage = ColdStage(call)
        self._gpu_ns: list[int] = []
        self._enqueue_ns: list[int] = []

    def take(self, count: int) -> Samples:
        """GPU time per call, with the host's enqueue time."""
        gpu_ns, enqueue_ns = self._stage.run(self._call.fresh, count)
        self._gpu_ns += gpu_ns
        self._enqueue_ns += enqueue_ns
        return Samples(tuple(gpu_ns), tuple(enqueue_ns))

    def notes(self) -> tuple[Note, ...]:
        """Whether the cache was flushed, and whether the host cannot keep the GPU busy."""
        notes = []
        if not self._stage.flushes:
            message = "the inputs are over four times the L2 cache and push each other out, so it was not flushed"
            notes.append(NO_FLUSH.note(message, observed=self._call.working_set_bytes))
        if len(self._gpu_ns) >= MIN_LAUNCHES:
            notes += launch_notes(self._gpu_ns, self._enqueue_ns, self._stage.spacer.ns)
        return tuple(notes)


def launch_notes(gpu_ns: list[int], enqueue_ns: list[int], spacer_ns: int) -> list[Note]:
    """Notes of a call whose host part is long against its GPU part.

    Enqueueing that takes longer than the GPU's work bounds what a user sees: `launch_bound`. Enqueueing longer than the
    spacer is not hidden (the call waits for the device, say), so that the samples hold launch gaps.
    """
    enqueue, gpu = median(enqueue_ns[1:] or enqueue_ns), median(gpu_ns[1:] or gpu_ns)
    notes = []
    if enqueue > gpu:
        notes.append(
            LAUNCH_BOUND.note(
                LAUNCH_BOUND.meaning,
                observed=enqueue,
                threshold=gpu,
                hint="without a CUDA graph a user waits for the launches; the timer 'graph' has the time with one",
            )
        )
    if enqueue > spacer_ns:
        notes.append(
            LAUNCH_EXPOSED.note(
                f"launching takes {enqueue / 1e6:.1f} ms, the spacer hides {spacer_ns / 1e6:.0f} ms",
                observed=enqueue,
                threshold=spacer_ns,
                hint="the call waits for the device inside, or launching is very long; its samples hold launch gaps",
            )
        )
    return notes

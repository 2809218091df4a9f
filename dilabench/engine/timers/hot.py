"""CUDA events around a batch of calls, with warm caches: throughput of a loop."""

import torch

from dilabench.engine.timers import Call, Samples
from dilabench.engine.timers.cuda_events import elapsed_ns
from dilabench.metadata import BATCHED
from dilabench.record import Note

BATCH_NS = 2_000_000
MAX_BATCH = 100


class Hot:
    """A sample is the mean over a batch of calls that follow each other without a gap."""

    def __init__(self, call: Call) -> None:
        self._call = call
        # Backward alone has a forward pass before each call, which must not be inside the events.
        single_call = call.workload.mode == "backward"
        self._batch = 1 if single_call else max(1, min(MAX_BATCH, BATCH_NS // max(1, call.call_ns)))

    def take(self, count: int) -> Samples:
        """Time per call between the events."""
        pairs = []
        for _ in range(count):
            calls = [self._call.fresh() for _ in range(self._batch)]
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for call in calls:
                call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self._call.device)
        return Samples(tuple(max(1, elapsed_ns(begin, end) // self._batch) for begin, end in pairs))

    def notes(self) -> tuple[Note, ...]:
        """The batch, when there is one."""
        if self._batch == 1:
            return ()
        message = (
            f"a sample is the mean of {self._batch} calls in a row, on warm caches and the same inputs: work that one "
            "keeps for the next does not show"
        )
        return (BATCHED.note(message, observed=self._batch),)

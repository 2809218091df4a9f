"""A CUDA graph of one call, replayed on an empty L2: GPU time without launches between kernels."""

import torch

from dilabench.engine.call.kept_call import KeptCall
from dilabench.engine.device.capture import harmless_if_it_fails
from dilabench.engine.timers import Call, Samples, TimerUnusableError
from dilabench.engine.timers.cuda_events import ColdStage
from dilabench.errors import first_line
from dilabench.metadata import NO_FLUSH
from dilabench.record import Note

WARM_CALLS = 3


class Graph:
    """Captured after warm-up on a side stream. Replays are timed exactly as `cold` times calls: flush, spacer, events.

    The graph reads the same inputs at each replay; the flush makes them cold. A call that cannot be captured (it waits
    for the device, or allocates outside torch) makes the timer unusable, with the reason.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._stage = ColdStage(call)
        self._graph, self._captured = self._capture()

    def take(self, count: int) -> Samples:
        """GPU time per replay."""
        gpu_ns, enqueue_ns = self._stage.run(lambda: self._call.replayed(self._captured, self._graph.replay), count)
        return Samples(tuple(gpu_ns), tuple(enqueue_ns))

    def notes(self) -> tuple[Note, ...]:
        """Whether the cache was flushed between replays."""
        if self._stage.flushes:
            return ()
        message = "the inputs are over four times the L2 cache and push each other out, so it was not flushed"
        return (NO_FLUSH.note(message, observed=self._call.working_set_bytes),)

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, KeptCall]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with harmless_if_it_fails(self._call.device):
                with torch.cuda.stream(stream):
                    for _ in range(WARM_CALLS):
                        self._call.fresh()()
                    # The graph of a backward pass is made before the capture; autograd then runs it on this stream.
                    call, captured = self._call.capturable()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=stream):
                    call()
        except RuntimeError as error:
            torch.cuda.synchronize()
            why = first_line(error) or type(error).__name__
            raise TimerUnusableError(f"the call cannot be captured: {why}") from error
        torch.cuda.synchronize()
        return graph, captured

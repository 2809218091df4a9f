"""Is the work on the current stream? Asked on CUDA only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilabench.engine.verify.call import Call
from dilabench.engine.verify.compare import agreement
from dilabench.record import Check

# About 20 ms at 1.5 GHz: long enough that work on another stream would run before the inputs arrive.
SPIN_CYCLES = 30_000_000


def stream_check(call: Call, inputs: Sequence[Tensor], first: Tensor, tolerance: float) -> Check:
    """Call on a fresh side stream whose inputs arrive only after queued work.

    Work that the function puts on another stream reads the NaN that stood there before.
    """
    late = [torch.full_like(tensor, torch.nan) for tensor in inputs]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_CYCLES)
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source)
        out = call.unwatched(late)
        result = out.clone()
    torch.cuda.synchronize()
    return agreement("stream", first, result, tolerance, "a call on a side stream with work queued")

"""The optimizations as things to compare: everything off, each alone, all together."""

from typing import Any

from dilabench.machine import Machine
from dilabench.record import Optimizations
from dilabench.request import RunRequest
from dilabench.suites.planner import reasons_against_optimizations

NONE = "nothing"
ALL_TOGETHER = "all together"
CACHE_ENTRIES = 64
POOL_BYTES = 2**30


def variants(request: RunRequest, machine: Machine, mode: str) -> dict[str, dict[str, Any]]:
    """Fields of Optimizations by the name of what is switched on; all together are those that can be here.

    A size that the request names is the one used. Gradient checkpointing is there where a backward pass is.
    """
    alone: dict[str, dict[str, Any]] = {
        "pattern cache": {"pattern_cache_entries": request.pattern_cache_entries or CACHE_ENTRIES},
        "buffer pool": {"buffer_pool_bytes": request.buffer_pool_bytes or POOL_BYTES},
        "CUDA graph": {"cuda_graph": True},
        "torch.compile": {"compile": True},
    }
    off = Optimizations(pattern_cache_entries=0).model_dump()
    together = {
        name: value
        for fields in alone.values()
        for name, value in fields.items()
        if not any(reasons_against_optimizations(Optimizations(**fields), machine))
    }
    return {
        NONE: off,
        **{name: {**off, **fields} for name, fields in alone.items()},
        ALL_TOGETHER: {**off, **together},
        # It trades time for memory, so it is none of those that make things faster together.
        **({"gradient checkpointing": {**off, "gradient_checkpointing": True}} if mode != "forward" else {}),
    }

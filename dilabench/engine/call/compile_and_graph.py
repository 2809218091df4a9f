"""torch.compile and CUDA graphs around a built function, so that it still gives what it gave before (torch)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from dilabench.contracts import AttentionFn
from dilabench.distributed.whole import Sharded
from dilabench.engine.call.inputs import InputSet
from dilabench.engine.device.capture import harmless_if_it_fails
from dilabench.errors import first_line
from dilabench.metadata import COMPILE_BREAKS, COMPILE_GRAPHS

# Every case of a worker compiles the same few functions again; after eight times torch would run them uncompiled.
COMPILED_CASES = 4096


class OptimizationUnusableError(Exception):
    """An optimization cannot be used for this function on this device; the text says why."""


def compiled(function: AttentionFn) -> AttentionFn:
    """The function under torch.compile; it is compiled at its first call."""
    torch._dynamo.config.recompile_limit = COMPILED_CASES
    torch._dynamo.config.accumulated_recompile_limit = COMPILED_CASES
    return cast(AttentionFn, torch.compile(function))


class OptimizedShards(torch.nn.Module):
    """A compiled, checkpointed or captured function of shards that still has `shards`, `world` and parameters.

    torch.compile, checkpointing and graphs give plain functions; `Whole` asks its function for these attributes.
    """

    def __init__(self, optimized: AttentionFn, built: Sharded) -> None:
        super().__init__()
        self.shards, self.world = built.shards, built.world
        # Held for its parameters, if it is a module; called is the other.
        self.built = built
        self._optimized = (optimized,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """This rank's part of out."""
        return self._optimized[0](q, k, v)


@contextmanager
def compiling(counters: dict[str, int], over_ranks: bool = False) -> Iterator[None]:
    """Around the first call of a compiled function: counts graphs and breaks between them.

    Raises OptimizationUnusableError when torch cannot compile it.
    """
    before = _compiled_so_far()
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        hint = "; torch does not trace every way of sending between ranks: leave compile out" if over_ranks else ""
        raise OptimizationUnusableError(f"torch.compile cannot compile it: {' '.join(lines[:2])}{hint}") from error
    for name, count in _compiled_so_far().items():
        counters[name] = count - before[name]


def _compiled_so_far() -> dict[str, int]:
    counted = torch._dynamo.utils.counters
    return {
        COMPILE_GRAPHS.key: counted["stats"]["unique_graphs"],
        COMPILE_BREAKS.key: sum(counted["graph_break"].values()),
    }


def graphed(function: AttentionFn, inputs: InputSet) -> tuple[AttentionFn, int]:
    """The function as a CUDA graph that is replayed, and the bytes that the graph keeps.

    A replay reads and writes the graph's own tensors: inputs are copied in, and results copied out, so that they belong
    to the caller as before. Both copies are part of a call. Raises OptimizationUnusableError when the function cannot
    be captured (it waits for the device, or brings tensors from the host).
    """
    device = inputs.q.device
    before = torch.cuda.memory_allocated(device)
    samples = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in (inputs.q, inputs.k, inputs.v))
    try:
        with harmless_if_it_fails(device):
            replay = torch.cuda.make_graphed_callables(cast(Callable[..., Any], function), samples)
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        torch.cuda.synchronize(device)
        raise OptimizationUnusableError(f"a CUDA graph cannot capture it: {first_line(error)}") from error

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = replay(_Owned.apply(q), _Owned.apply(k), _Owned.apply(v))
        return cast(Tensor, out).clone()

    return call, torch.cuda.memory_allocated(device) - before


class _Owned(torch.autograd.Function):
    """The tensor itself; its gradient as a copy, because the next replay overwrites the graph's."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()

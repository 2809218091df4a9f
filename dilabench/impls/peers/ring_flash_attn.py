"""`ring-flash-attn-zigzag` and `ring-flash-attn-ring`: the package ring_flash_attn, over flash-attn 2.

The package's own import needs transformers and all of flash-attn, which its batch functions do not: only the module
of a function is imported, in a package without its `__init__`. Read in version 0.1.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.distributed.sharding import Shards, contiguous, zigzag
from dilabench.impls.peers import flash_attn_stand_in
from dilabench.impls.peers.private_import import imported
from dilabench.impls.peers.sharded import PeerOverRanks, world_of
from dilabench.workload.equal_parts import against_equal_pairs, against_equal_parts
from dilabench.workload.spec import Workload

PACKAGE = "ring_flash_attn"
INSTALL = "pip install --no-deps ring-flash-attn"


def build_zigzag(workload: Workload, context: BuildContext) -> RingFlashAttention:
    """Causal only, on balanced shards."""
    return _built(workload, context, "zigzag_ring_flash_attn", zigzag, against_equal_pairs)


def build_ring(workload: Workload, context: BuildContext) -> RingFlashAttention:
    """Causal or not, on successive shards."""
    return _built(workload, context, "ring_flash_attn", contiguous, against_equal_parts)


class RingFlashAttention(PeerOverRanks):
    """A function of the package as an AttentionFn of shards, with lse."""

    def __init__(self, shards: Shards, context: BuildContext, function: Callable[..., Any], workload: Workload) -> None:
        assert context.world is not None
        super().__init__(shards, context.world)
        self._function, self._workload = function, workload

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Differentiable."""
        out: Tensor = self._called(q, k, v, with_lse=False)
        return out

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N_local]."""
        out, lse, _ = self._called(q, k, v, with_lse=True)
        return out, lse

    def _called(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Any:
        return self._function(
            q,
            k,
            v,
            softmax_scale=self._workload.softmax_scale,
            causal=self._workload.causal,
            return_attn_probs=with_lse,
            group=self.world.group,
        )


def _built(
    workload: Workload,
    context: BuildContext,
    module: str,
    sharding: Callable[[Sequence[tuple[int, int]], int], Shards],
    against: Callable[[Workload, int], str | None],
) -> RingFlashAttention:
    world = world_of(context, against(workload, context.world.size if context.world else 1))
    function = getattr(_imported(module, context.require_backend()), f"{module}_func")
    return RingFlashAttention(sharding(workload.sequences, world.size), context, function, workload)


def _imported(module: str, backend: LoadedBackend) -> ModuleType:
    """A module of the package over flash-attn itself where that is the backend, over the backend otherwise.

    Raises ModuleNotFoundError where the package is missing.
    """
    return imported(f"{PACKAGE}.{module}", *flash_attn_stand_in.stand_ins(backend), install=INSTALL)

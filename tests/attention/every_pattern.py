"""A call of every pattern, of a batch and of packed sequences, by all tensors that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilabench.attention import attention, native_sparse_attention
from dilabench.patterns import (
    BlockSparsePattern,
    ColumnBoundsPattern,
    DilatedPattern,
    SelectedBlocksPattern,
    TopKBlocksPattern,
    WindowSinkPattern,
)

N, H, K, D, BLOCK = 48, 4, 2, 16, 16
# Of packed sequences: lengths that no block divides.
BOUNDS = (0, 20, 48)
BLOCKS_OF_QUERIES = {False: 3, True: 4}
SPANS: dict[str, int] = {"compression_length": 8, "compression_stride": 4, "block_size": BLOCK, "window": 9}


class Case(NamedTuple):
    """A function of query, key and value, with options and the further tensors that it takes."""

    function: Callable[..., Tensor]
    options: dict[str, Any]
    takes: tuple[str, ...] = ()
    packed: bool = False

    def tensors(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
        """New tensors by name, on the CPU."""
        generator = torch.Generator("cpu").manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            whole = (N, *shape) if self.packed else (1, N, *shape)
            return torch.randn(whole, generator=generator, dtype=torch.float64, device="cpu").to(dtype)

        found = {"query": drawn(H, D), "key": drawn(K, D), "value": drawn(K, D)}
        more: dict[str, Callable[[], Tensor]] = {
            "sink": lambda: drawn(H).flatten()[:H].clone(),
            "gates": lambda: drawn(H, 3),
            "window_key": lambda: drawn(K, D),
            "window_value": lambda: drawn(K, D),
            "indices": self._blocks,
        }
        found |= {name: more[name]() for name in self.takes}
        if self.packed:
            found["cu_seqlens"] = torch.tensor(BOUNDS, dtype=torch.int32, device="cpu")
        return found

    def _blocks(self) -> Tensor:
        """Of each token the first block, of each block of queries its own and the first."""
        if isinstance(self.options.get("pattern"), TopKBlocksPattern):
            return torch.tensor(
                [[0, 0], [0, 1], [0, 0] if self.packed else [0, 2], [0, 1]][: BLOCKS_OF_QUERIES[self.packed]],
                device="cpu",
            )
        shape = (N, K, 2) if self.packed else (1, N, K, 2)
        return torch.tensor([0, -1], device="cpu").expand(shape).clone()

    def __call__(self, tensors: dict[str, Tensor], **options: Any) -> Tensor:
        return self.function(**tensors, **self.options, **options)


def _of(pattern: Any, *takes: str, **options: Any) -> dict[bool, Case]:
    options = {"causal": True, **options, **({} if pattern is None else {"pattern": pattern})}
    return {packed: Case(attention, options, takes, packed) for packed in (False, True)}


_PATTERNS: dict[str, dict[bool, Case]] = {
    "dense": _of(None, "sink"),
    "whole": _of(None, causal=False),
    "window": _of(None, "sink", window=(5, 0)),
    "dilated": _of(DilatedPattern(segment_lengths=(16, 48), dilation_rates=(1, 2)), "sink"),
    "dilated window": _of(DilatedPattern(segment_lengths=(16, 48), dilation_rates=(1, 2)), window=(5, 0)),
    "detached": _of(DilatedPattern(segment_lengths=(16, 48), dilation_rates=(1, 2), merge_grad="detached")),
    "window_sink": _of(WindowSinkPattern(sinks=2, window_size=5), "sink"),
    "column_bounds": _of(ColumnBoundsPattern(document_lengths=(11, 5)), "sink"),
    "block_sparse": _of(BlockSparsePattern(block_size=BLOCK, mask="random", sparsity=0.5), "sink"),
    "topk_blocks": _of(TopKBlocksPattern(block_size=BLOCK, selector="random", top_k=2), "sink", "indices"),
    "selected_blocks": _of(SelectedBlocksPattern(block_size=BLOCK), "sink", "indices"),
    "native_sparse": {
        packed: Case(native_sparse_attention, SPANS, ("gates", "window_key", "window_value", "indices"), packed)
        for packed in (False, True)
    },
}
CASES = {
    name + (" packed" if packed else ""): case for name, cases in _PATTERNS.items() for packed, case in cases.items()
}

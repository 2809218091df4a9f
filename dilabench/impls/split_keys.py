"""`split-keys`: few queries over many keys, which are split between programs; heads that read the same keys are rows of
one tile. Forward only.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.one_operator import AttentionComputation
from dilabench.impls.operator_rules import last_dim_contiguous
from dilabench.kernels.key_segments import KeyBranches
from dilabench.kernels.split_keys import Bounds, attend_few_rows
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.workload.spec import Window, Workload


def build(workload: Workload, context: BuildContext) -> SplitKeys:  # noqa: ARG001
    """The branches of its pattern reach the device with the first call."""
    # The pattern's branches in any sequence, without the workload's mask.
    shape = SequenceShape(1, workload.num_heads, workload.num_kv_heads, causal=False, window=(-1, -1))
    window = workload.window[0], 0 if workload.causal else workload.window[1]
    return SplitKeys(workload.pattern, shape, window, workload.softmax_scale)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SplitKeys(AttentionComputation):
    """The last rows of k [B, N, K, D] and v [B, N, K, Dv], all N keys of each item.

    shape: the heads, of any length. window: keys behind and ahead, (-1, 0) if causal.
    """

    pattern: Pattern
    shape: SequenceShape
    window: Window
    scale: float
    branches: dict[Hashable, KeyBranches] = field(default_factory=dict, repr=False)

    def of_lengths(self, lengths: Tensor) -> OfNumbers:
        """The computation of a cache with this many keys in each item, int [B] on the device, or with the first of
        them and their end, [B, 2]; more than N are all.
        """
        return OfNumbers(self, lengths.contiguous())

    def of_bounds(self, queries: Tensor, keys: Tensor) -> OfNumbers:
        """The computation of packed sequences, bounds int [S + 1] on the device."""
        return OfNumbers(self, None, Bounds(queries.contiguous(), keys.contiguous()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, bounds: Bounds | None = None
    ) -> tuple[Tensor, Tensor]:
        """out [B, M, H, Dv] and lse [B, H, M]; of packed sequences B is 1."""
        # Segments of a growing cache are cut at powers of two only, so that few tables are made.
        about = 1 << (k.shape[1] - 1).bit_length(), q.device, type(q)
        branches = self.branches.get(about)
        if branches is None:
            self.branches[about] = branches = _branches(self.pattern, self.shape, *about)
        q, k, v = last_dim_contiguous(q), last_dim_contiguous(k), last_dim_contiguous(v)
        return attend_few_rows(q, k, v, branches, self.window, self.scale, lengths, bounds)

    def backward(self, *_tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Raises ValueError: implementations with a backward pass serve calls that want gradients."""
        raise ValueError("split-keys has no backward pass; use mode=forward or another implementation")


class OfNumbers(NamedTuple):
    """The same for as many keys as a tensor says, which the host never reads."""

    computation: SplitKeys
    lengths: Tensor | None
    bounds: Bounds | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `SplitKeys.forward`."""
        return self.computation.forward(q, k, v, self.lengths, self.bounds)

    def backward(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `SplitKeys.backward`."""
        return self.computation.backward(*tensors)


def _branches(
    pattern: Pattern,
    shape: SequenceShape,
    length: int,
    device: torch.device,
    _kind: type[Tensor],
) -> KeyBranches:
    """The branches of sequences of up to this length. Traced tensors have other tables than tensors with data."""
    shape = replace(shape, length=length)
    segments = []
    for head in range(shape.num_heads):
        of_head = pattern.strided_segments(shape, head)
        if of_head is None:
            raise ValueError(f"a {pattern.kind} pattern is no union of strided segments")
        segments.append(of_head)
    return KeyBranches.of(segments, shape.num_heads // shape.num_kv_heads, device)

"""`fused`: one Triton kernel over the union of branches on residue-class tiles, each distinct pair computed once.

With detached merge weights every branch is a separate launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.null_mass import log_zero_keys
from dilabench.impls.one_operator import AttentionComputation, is_plain_eager_call
from dilabench.kernels.fused.backward import fused_backward
from dilabench.kernels.fused.forward import fused_forward, fused_forward_partials
from dilabench.kernels.fused.packing import Packing
from dilabench.kernels.fused.partials import Partials
from dilabench.kernels.fused.residue_plan import ResiduePlan, capped_plan, document_plan, residue_plan
from dilabench.kernels.fused.zero_keys import ZeroKeysOfDocuments
from dilabench.kernels.launch_cache import Beside, Launch, LaunchCache
from dilabench.kernels.streams import record, stream_number
from dilabench.kernels.tuning import Direction, TileConfig, read_tiles
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> Fused | FusedDetached:
    """Plan the tiles of the workload; tables reach the device with the first call.

    Raises ValueError for branches that have no plan (`residue_plan`).
    """
    if workload.cu_seqlens is not None:
        return Packings(workload, context).of(workload.cu_seqlens)
    pattern = DilatedPattern.of(workload)
    detached = _is_detached(workload, pattern)
    about, options = _of_heads(workload, pattern)
    branches = pattern.segment_lengths, pattern.dilation_rates
    plan = capped_plan(
        residue_plan(*branches, workload.seq_len, *about, separate=detached, **options), workload.softcap
    )
    zero_keys = log_zero_keys(workload, context.device, apart=detached) if pattern.has_zero_keys else None
    scale, tiles = workload.softmax_scale, read_tiles(context.tiles)
    if not detached:
        return Fused(plan, scale, zero_keys, tiles)
    # Each at a separate address, a multiple of the alignment that kernels are compiled for.
    of_branches = () if zero_keys is None else tuple(branch.clone() for branch in zero_keys)
    return FusedDetached(plan, scale, of_branches, tiles)


def _is_detached(workload: Workload, pattern: DilatedPattern) -> bool:
    """Return True if each branch is a separate launch."""
    # A head of one branch has no merge: its gradients are the exact ones. In the forward pass all merges are alike.
    return workload.detaches_merge and not pattern.has_grouped_heads and len(pattern.branches) > 1


def _of_heads(workload: Workload, pattern: DilatedPattern) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `residue_plan` after the length, positional and by name."""
    about = workload.num_heads, workload.num_kv_heads, workload.causal, pattern.offset, pattern.offset_by
    return about, {"branch_of_head": pattern.branch_of_head(workload.num_heads), "window": workload.window}


# One that goes forward, and one that goes backward.
_PACKINGS_WITH_ZERO_KEYS = 2


class Packings:
    """The shared part of packings of one configuration: a computation for another packing takes microseconds per
    document.

    The workload's bounds do not matter.
    """

    def __init__(self, workload: Workload, context: BuildContext) -> None:
        self._pattern = DilatedPattern.of(workload)
        self._detached = _is_detached(workload, self._pattern)
        self._about, self._options = _of_heads(workload, self._pattern)
        self._scale, self._tiles = workload.softmax_scale, read_tiles(context.tiles)
        self._softcap = workload.softcap
        self._zero_keys: ZeroKeysOfDocuments | None = None
        if self._pattern.has_zero_keys and not workload.causal:
            residues = self._pattern.residues(workload.num_heads, workload.num_kv_heads)
            self._zero_keys = ZeroKeysOfDocuments(self._pattern.branches, residues, context.device)
        self._kept: dict[Hashable, tuple[Tensor, ...]] = {}

    def of(self, bounds: tuple[int, ...] | Tensor, tokens: int = 0, longest: int = 0) -> Fused | FusedDetached:
        """The computation for documents from ``bounds[i]`` to ``bounds[i + 1]``, as `Packing` takes them."""
        branches = self._pattern.segment_lengths, self._pattern.dilation_rates
        packing = Packing(bounds, tokens, longest)
        plan = document_plan(*branches, packing, *self._about, separate=self._detached, **self._options)
        if self._softcap is not None:
            plan = capped_plan(plan, self._softcap)
        if self._detached:
            return FusedDetached(plan, self._scale, (), self._tiles, packing, self)
        return Fused(plan, self._scale, None, self._tiles, packing, self)

    def zero_keys(self, packing: Packing, x: Tensor) -> tuple[Tensor, ...]:
        """Zero keys of all branches together, or of each if merge weights are detached; empty if there can be none.

        They are as large as lse, so only the latest packings' are kept, for the layers of a model.
        """
        if self._zero_keys is None:
            return ()
        if packing.is_read_by_graph(x):
            return self._zero_keys(packing.bounds(x), packing.tokens, self._detached)
        key = packing, stream_number(x), type(x)
        found = self._kept.pop(key, None)
        if found is None:
            found = self._zero_keys(packing.bounds(x), packing.tokens, self._detached)
        self._kept[key] = found
        while len(self._kept) > _PACKINGS_WITH_ZERO_KEYS:
            del self._kept[next(iter(self._kept))]
        return found


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Fused(AttentionComputation):
    """All branches in one kernel.

    `zero_keys`: as `null_mass.log_zero_keys` gives them, added to the result of all branches. `tiles`: shapes of the
    kernels by their names, instead of the defaults. `packing`: the documents of a plan for documents, with tensors [T,
    ·, D]; `packings` gives computations for others.
    """

    plan: ResiduePlan
    scale: float
    zero_keys: Tensor | None = field(default=None, repr=False, compare=False)
    tiles: Mapping[Direction, TileConfig] = field(default_factory=dict, repr=False, compare=False)
    packing: Packing | None = field(default=None, repr=False, compare=False)
    packings: Packings | None = field(default=None, repr=False, compare=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, beside: Beside | None = None) -> tuple[Tensor, Tensor]:
        """out and lse, outside autograd; `beside`: launches to compile with it."""
        config, mass = self.tiles.get("forward"), self.zero_keys
        if mass is not None:
            record([mass])
        if self.packing is not None and self.packings is not None:
            mass = next(iter(self.packings.zero_keys(self.packing, q)), None)
        return fused_forward(
            q,
            k,
            v,
            self.plan,
            scale=self.scale,
            log_mass=mass,
            config=config,
            beside=beside,
            packing=self.packing,
        )

    def forward_before_backward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, which compiles for `backward`, too."""
        return self.forward(q, k, v, partial(_backward_launches, self, q, k, v))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from the merged out and lse."""
        return _backward(self, (dout, q, k, v, out, lse), None)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FusedDetached(AttentionComputation):
    """Separate branches, merged with weights that count as constants in the backward pass.

    Given its own out and the merged lse, the backward of a branch is its share of the detached gradient
    (`impls.union.union`). Each branch has its own zero keys, `zero_keys` by its index; no pair is shared. Else as
    `Fused`.
    """

    plan: ResiduePlan
    scale: float
    zero_keys: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    tiles: Mapping[Direction, TileConfig] = field(default_factory=dict, repr=False, compare=False)
    packing: Packing | None = field(default=None, repr=False, compare=False)
    packings: Packings | None = field(default=None, repr=False, compare=False)

    keeps_more: ClassVar[bool] = True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, beside: Beside | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out and lse, outside autograd, and the results of every branch; `beside`: launches to compile with it."""
        out, lse, partials = self.with_branches(q, k, v, beside)
        return out, lse, [*partials]

    def forward_before_backward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """As `forward`, which compiles for `backward`, too."""
        return self.forward(q, k, v, partial(_backward_launches, self, q, k, v))

    def with_branches(
        self, q: Tensor, k: Tensor, v: Tensor, beside: Beside | None = None, cache: LaunchCache | None = None
    ) -> tuple[Tensor, Tensor, Partials]:
        """out and lse, and the results of each branch."""
        masses = self.zero_keys
        record(masses)
        if self.packing is not None and self.packings is not None:
            masses = self.packings.zero_keys(self.packing, q)
        return fused_forward_partials(
            q,
            k,
            v,
            self.plan,
            scale=self.scale,
            log_masses=masses,
            config=self.tiles.get("forward"),
            beside=beside,
            packing=self.packing,
            cache=cache,
        )

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from the merged lse; the results of branches are recomputed unless `kept`."""
        partials = Partials(*kept) if kept else self.with_branches(q, k, v)[2]
        return _backward(self, (dout, q, k, v, out, lse), partials)


def _backward_launches(of: Fused | FusedDetached, q: Tensor, k: Tensor, v: Tensor) -> list[Launch]:
    """The launches of the backward pass, on results that hold anything."""
    if not is_plain_eager_call(q, k, v):
        # Traced memory belongs to the forward pass.
        return []
    noted: list[Launch] = []
    cache = LaunchCache(noted)
    batch, length, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    partials = of.with_branches(q, k, v, cache=cache)[2] if isinstance(of, FusedDetached) else None
    _backward(of, (out, q, k, v, out, lse), partials, cache)
    return noted


_Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _backward(
    of: Fused | FusedDetached, given: _Given, partials: Partials | None, cache: LaunchCache | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients; given: dout, q, k, v, out, lse, and with detached weights what each branch gives."""
    return fused_backward(
        *given,
        of.plan,
        scale=of.scale,
        query_config=of.tiles.get("backward_query"),
        key_config=of.tiles.get("backward_key"),
        partials=partials,
        packing=of.packing,
        cache=cache,
    )

"""`fused`: one Triton kernel over the union of branches on residue-class tiles, each distinct pair computed once.

Branches that fit no residue-class plan (`ResiduePlan.leftover` says why) go branch by branch through our dense kernel
on strided views, merged in place; both forms are exact. Grouped heads are planned all or not at all.
With detached merge weights every branch is a launch by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls.null_mass import add_null_mass_, log_zero_keys
from dilabench.impls.one_operator import differentiable, new_number, register
from dilabench.impls.packed import Packed, build_packed
from dilabench.impls.union.branches import branches_of, covers_every_row
from dilabench.impls.union.strided_rows import kept_rows
from dilabench.impls.union.union import Union, union_of
from dilabench.kernels import dense_tiles
from dilabench.kernels.fused.apart import Apart
from dilabench.kernels.fused.backward import fused_backward
from dilabench.kernels.fused.forward import fused_forward, fused_forward_apart
from dilabench.kernels.fused.residue_plan import ResiduePlan, residue_plan
from dilabench.kernels.launches import followed_by
from dilabench.kernels.tile_candidates import read_tiles
from dilabench.kernels.tuning import Direction, TileConfig
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload

DENSE_TILES = LoadedBackend("dense-tiles", dense_tiles.attend, dense_tiles.attend_backward)


def build(workload: Workload, context: BuildContext) -> Fused | FusedApart | Packed:
    """Plan the tiles of the workload; tables reach the device with the first call."""
    return build_packed(_padded, workload, context) if workload.layout == "packed" else _padded(workload, context)


def _padded(workload: Workload, context: BuildContext) -> Fused | FusedApart:
    pattern = DilatedPattern.of(workload)
    # A head of one branch merges with nothing: its gradients are the exact ones. Forward alone, all merges are alike.
    apart = workload.detaches_merge and not pattern.has_grouped_heads and len(pattern.branches) > 1
    plan = _plan(workload, apart)
    rest = range(len(pattern.branches)) if plan is None else [index for index, _ in plan.leftover]
    if context.tiles and plan is None:
        raise ValueError(f"tiles {context.tiles!r}: no branch of this workload goes through the fused kernels")
    per_branch = _per_branch(workload, context, list(rest), apart)
    zero_keys = log_zero_keys(workload, context.device, apart=apart)
    scale, tiles = workload.softmax_scale, read_tiles(context.tiles)
    if not apart:
        return Fused(plan, per_branch, scale, zero_keys, tiles)
    # Each at an address of its own, a multiple of what kernels are compiled for.
    of_branches = () if zero_keys is None else tuple(branch.clone() for branch in zero_keys)
    return FusedApart(plan, per_branch, scale, of_branches, tiles)


def _plan(workload: Workload, apart: bool) -> ResiduePlan | None:
    pattern = DilatedPattern.of(workload)
    plan = residue_plan(
        pattern.segment_lengths,
        pattern.dilation_rates,
        workload.seq_len,
        workload.num_heads,
        workload.num_kv_heads,
        workload.causal,
        pattern.offset,
        pattern.offset_by,
        apart=apart,
        branch_of_head=pattern.branch_of_head(workload.num_heads),
        window=workload.window,
    )
    # What is left of grouped heads would be dealt to other heads as a pattern of its own.
    return plan if plan.complete or (plan.groups and not pattern.has_grouped_heads) else None


def _per_branch(workload: Workload, context: BuildContext, indices: list[int], apart: bool) -> Union | None:
    """The branches of these indices, each on its own; without zero keys but where they stay apart."""
    if not indices:
        return None
    pattern = DilatedPattern.of(workload)
    segments, rates = zip(*(pattern.branches[index] for index in indices), strict=True)
    changes: dict[str, Any] = {"segment_lengths": segments, "dilation_rates": rates}
    if not apart:
        changes |= {"padding": "masked", "merge_grad": "exact"}
    chosen = pattern.model_copy(update=changes)
    part = workload.model_copy(update={"pattern": chosen})
    rows, covered = kept_rows(part, context.patterns), covers_every_row(branches_of(part))
    return union_of(part, DENSE_TILES, rows, covered, context.device)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Fused:
    """The planned branches in one kernel, and the rest merged onto them. At least one of the two is there.

    `zero_keys`: as `null_mass.log_zero_keys` gives them, added to the result of all branches. `tiles`: shapes of the
    kernels by their names, where not their own.
    """

    plan: ResiduePlan | None
    rest: Union | None
    scale: float
    zero_keys: Tensor | None = field(default=None, repr=False, compare=False)
    tiles: Mapping[Direction, TileConfig] = field(default_factory=dict, repr=False, compare=False)
    number: int = field(default_factory=new_number, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        register(self.number, self)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N] (natural log, float32), which carries no gradient."""
        return differentiable(self, self.number, q, k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, outside autograd."""
        if self.plan is None:
            assert self.rest is not None
            out, lse, _ = self.rest.forward(q, k, v)
            if self.zero_keys is not None:
                add_null_mass_(out, lse, self.zero_keys)
            return out, lse
        config = self.tiles.get("forward")
        planned = fused_forward(q, k, v, self.plan, scale=self.scale, log_mass=self.zero_keys, config=config)
        return planned if self.rest is None else self.rest.forward(q, k, v, onto=planned)[:2]

    def forward_before_backward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, which compiles for `backward`, too."""
        with followed_by(partial(_backward_of_any, self, q, k, v)):
            return self.forward(q, k, v)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from the merged out and lse."""
        return _backward(self, (dout, q, k, v, out, lse))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FusedApart:
    """Branches by themselves, merged with weights that count as constants in the backward pass.

    Given its own out and the merged lse, the backward of a branch is its share of the detached gradient
    (`impls.union.union`). Each branch has its own zero keys, `zero_keys` by its index; no pair is shared. Else as
    `Fused`.
    """

    plan: ResiduePlan | None
    rest: Union | None
    scale: float
    zero_keys: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    tiles: Mapping[Direction, TileConfig] = field(default_factory=dict, repr=False, compare=False)
    number: int = field(default_factory=new_number, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        register(self.number, self)

    @property
    def keeps_more(self) -> bool:
        """Whether `forward` gives what spares `backward` a second forward pass."""
        return True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [B, H, N] (natural log, float32), which carries no gradient."""
        return differentiable(self, self.number, q, k, v, keeps_more=self.keeps_more)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out and lse, outside autograd, and what every branch gives by itself."""
        if self.plan is None:
            assert self.rest is not None
            return self.rest.forward(q, k, v)
        out, lse, apart = self.planned(q, k, v)
        kept = [apart.outs, apart.lses]
        if self.rest is not None:
            kept += self.rest.forward(q, k, v, onto=(out, lse))[2]
        return out, lse, kept

    def forward_before_backward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """As `forward`, which compiles for `backward`, too."""
        with followed_by(partial(_backward_of_any, self, q, k, v)):
            return self.forward(q, k, v)

    def planned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Apart]:
        """out and lse of the planned branches, and what each gives by itself."""
        assert self.plan is not None
        config = self.tiles.get("forward")
        return fused_forward_apart(q, k, v, self.plan, scale=self.scale, log_masses=self.zero_keys, config=config)

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
        """dq, dk, dv from the merged lse; what branches give by themselves is computed again where it is not `kept`."""
        given = (dout, q, k, v, out, lse)
        if self.plan is None:
            return _backward(self, given, of_rest=kept)
        apart = Apart(kept[0], kept[1]) if kept else self.planned(q, k, v)[2]
        return _backward(self, given, apart, kept[2:])


def _backward_of_any(of: Fused | FusedApart, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The launches of the planned part on results that hold anything."""
    if of.plan is None:
        return
    batch, length, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    _planned_backward(of, (out, q, k, v, out, lse), of.planned(q, k, v)[2] if isinstance(of, FusedApart) else None)


_Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _backward(
    of: Fused | FusedApart, given: _Given, apart: Apart | None = None, of_rest: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of both parts; given: dout, q, k, v, out, lse, and of what branches are apart their own results."""
    planned = None if of.plan is None else _planned_backward(of, given, apart)
    if of.rest is not None:
        planned = of.rest.backward(*given, of_rest, onto=planned)
    assert planned is not None
    return planned


def _planned_backward(of: Fused | FusedApart, given: _Given, apart: Apart | None) -> tuple[Tensor, Tensor, Tensor]:
    assert of.plan is not None
    by_query, by_key = of.tiles.get("backward_query"), of.tiles.get("backward_key")
    return fused_backward(*given, of.plan, scale=of.scale, query_config=by_query, key_config=by_key, apart=apart)

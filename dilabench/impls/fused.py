"""`fused`: one Triton kernel over the union of branches on residue-class tiles, each distinct pair computed once.

Branches that fit no residue-class plan (`ResiduePlan.leftover` says why) go branch by branch through our dense kernel
on strided views, merged in place; both forms are exact. Grouped heads are planned all or not at all.
With detached merge weights every branch is a kernel by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls.null_mass import add_null_mass_, log_zero_keys
from dilabench.impls.one_operator import differentiable, new_number, register
from dilabench.impls.packed import Packed, build_packed
from dilabench.impls.union.branches import branches_of, covers_every_row
from dilabench.impls.union.merging import merge_rows_
from dilabench.impls.union.strided_rows import kept_rows
from dilabench.impls.union.union import Union, union_of
from dilabench.kernels import dense_tiles
from dilabench.kernels.fused.backward import fused_backward
from dilabench.kernels.fused.float_parts import readable
from dilabench.kernels.fused.forward import fused_forward
from dilabench.kernels.fused.residue_plan import ResiduePlan, residue_plan
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
    merges = not pattern.has_grouped_heads and len(pattern.branches) > 1
    if workload.mode != "forward" and pattern.is_detached and merges:
        return FusedApart(tuple(_whole(part, context) for part in _single_branches(workload)))
    return _whole(workload, context)


def _single_branches(workload: Workload) -> Iterator[Workload]:
    pattern = DilatedPattern.of(workload)
    for segment, rate in pattern.branches:
        changes = {"segment_lengths": (segment,), "dilation_rates": (rate,), "merge_grad": "exact"}
        yield workload.model_copy(update={"pattern": pattern.model_copy(update=changes)})


def _whole(workload: Workload, context: BuildContext) -> Fused:
    plan = _plan(workload)
    rest = range(len(DilatedPattern.of(workload).branches)) if plan is None else [index for index, _ in plan.leftover]
    if context.tiles and plan is None:
        raise ValueError(f"tiles {context.tiles!r}: no branch of this workload goes through the fused kernels")
    zero_keys = log_zero_keys(workload, context.device)
    per_branch = _per_branch(workload, context, list(rest))
    return Fused(plan, per_branch, workload.softmax_scale, zero_keys, read_tiles(context.tiles))


def _plan(workload: Workload) -> ResiduePlan | None:
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
        branch_of_head=pattern.branch_of_head(workload.num_heads),
        window=workload.window,
    )
    # What is left of grouped heads would be dealt to other heads as a pattern of its own.
    return plan if plan.complete or (plan.groups and not pattern.has_grouped_heads) else None


def _per_branch(workload: Workload, context: BuildContext, indices: list[int]) -> Union | None:
    """The branches of these indices, each on its own, without zero keys."""
    if not indices:
        return None
    pattern = DilatedPattern.of(workload)
    segments, rates = zip(*(pattern.branches[index] for index in indices), strict=True)
    changes = {"segment_lengths": segments, "dilation_rates": rates, "padding": "masked", "merge_grad": "exact"}
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padded: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """out and lse, outside autograd. `padded`: the same three from `readable`."""
        if self.plan is None:
            assert self.rest is not None
            out, lse, _ = self.rest.forward(q, k, v)
            if self.zero_keys is not None:
                add_null_mass_(out, lse, self.zero_keys)
            return out, lse
        config = self.tiles.get("forward")
        planned = fused_forward(
            q, k, v, self.plan, scale=self.scale, log_mass=self.zero_keys, config=config, padded=padded
        )
        return planned if self.rest is None else self.rest.forward(q, k, v, onto=planned)[:2]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        onto: tuple[Tensor, Tensor, Tensor] | None = None,
        padded: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from the merged out and lse, added to `onto` where that is given. `padded`: q, k, v and dout from
        `readable`.
        """
        planned = onto
        if self.plan is not None:
            planned = fused_backward(
                dout,
                q,
                k,
                v,
                out,
                lse,
                self.plan,
                scale=self.scale,
                query_config=self.tiles.get("backward_query"),
                key_config=self.tiles.get("backward_key"),
                onto=onto,
                padded=padded,
            )
        if self.rest is None:
            assert planned is not None
            return planned
        return self.rest.backward(dout, q, k, v, out, lse, onto=planned)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FusedApart:
    """Branches by themselves, merged with weights that count as constants in the backward pass.

    Given its own out and the merged lse, the backward of a branch is its share of the detached gradient
    (`impls.union.union`). Each branch has its own zero keys; no pair is shared.
    """

    branches: tuple[Fused, ...]
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
        """out and lse, outside autograd, and every branch's own out."""
        first, *others = self.branches
        padded = self._padded(q, k, v)
        own, lse = first.forward(q, k, v, padded)
        out, kept = own.clone(), [own]
        for branch in others:
            own, own_lse = branch.forward(q, k, v, padded)
            merge_rows_(out, lse, own, own_lse)
            kept.append(own)
        return out, lse, kept

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        _out: Tensor,
        lse: Tensor,
        kept: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from the merged lse; a branch's own out is computed again where they are not `kept`."""
        total: tuple[Tensor, Tensor, Tensor] | None = None
        padded = self._padded(q, k, v, dout)
        for index, branch in enumerate(self.branches):
            own = kept[index] if kept else branch.forward(q, k, v, padded and padded[:3])[0]
            total = branch.backward(dout, q, k, v, own, lse, total, padded)
        assert total is not None
        return total

    def _padded(self, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """The tensors as all branches can read them, so that not each of them pads; None: as they are."""
        groups = [group for branch in self.branches if branch.plan is not None for group in branch.plan.groups]
        whole = tuple(readable(x, groups) for x in tensors)
        return None if all(a is b for a, b in zip(whole, tensors, strict=True)) else whole

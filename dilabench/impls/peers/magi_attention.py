"""`magi-attention`: MagiAttention's distributed attention, whose own solver shares the rows out.

A key (its plan) is made in `build`; rows that a rank holds are those that the plan names. Read in its main branch, May
2026.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Shards, Span
from dilabench.impls.peers.sharded import PeerOverRanks, world_of
from dilabench.workload.equal_parts import against_equal_chunks
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> MagiAttention:
    """Raises ModuleNotFoundError where the package is missing, ValueError where its plan pads the sequence."""
    return MagiAttention(workload, context)


class MagiAttention(PeerOverRanks):
    """Dense attention of one sequence, causal or not, with lse."""

    def __init__(self, workload: Workload, context: BuildContext) -> None:
        ranks = context.world.size if context.world else 1
        world = world_of(context, against_equal_chunks(workload, ranks))
        from magi_attention.api import calc_attn, get_position_ids, magi_attn_flex_key
        from magi_attention.common import AttnRanges

        whole = [[0, workload.seq_len]]
        self._key = magi_attn_flex_key(
            q_ranges=AttnRanges.from_ranges(whole),
            k_ranges=AttnRanges.from_ranges(whole),
            attn_mask_type="causal" if workload.causal else "full",
            total_seqlen_q=workload.seq_len,
            total_seqlen_k=workload.seq_len,
            num_heads_q=workload.num_heads,
            num_heads_kv=workload.num_kv_heads,
            head_dim=workload.head_dim,
            pad_size=0,
            cp_group_or_mesh=world.group,
        )
        self._attend, self._scale = calc_attn, workload.softmax_scale
        held = world.share(get_position_ids(self._key).tolist())
        if sorted(position for part in held for position in part) != list(range(workload.seq_len)):
            raise ValueError(f"MagiAttention's plan for seq_len {workload.seq_len} pads or repeats rows")
        super().__init__(Shards(tuple(_spans(part) for part in held)), world)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Differentiable."""
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, and lse [1, H, N_local]."""
        out, meta = self._attend(q[0], k[0], v[0], self._key, softmax_scale=self._scale)
        return out[None], meta.lse.T[None]


def _spans(positions: list[int]) -> tuple[Span, ...]:
    """Runs of successive positions, in the order of local rows."""
    breaks = [0, *(row + 1 for row, (a, b) in enumerate(pairwise(positions)) if b != a + 1), len(positions)]
    return tuple(Span(positions[a], positions[b - 1] + 1, a) for a, b in pairwise(breaks))

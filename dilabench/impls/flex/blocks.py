"""The block mask of dilated attention by arithmetic on blocks: `create_block_mask` would look at all N x N pairs.

The rows of a branch on one residue lie in patches: those of one segment in one block of places. A pair of blocks is
touched where both have a patch of the same segment and causal mask and window leave some pair of its tokens, by the
first and last of each; it is full where both patches are whole blocks and every pair is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload

BLOCK = 128
ABSENT = -1
# Pairs of patches that are looked at in one go.
PAIRS_AT_ONCE = 2**24

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def head_offsets(workload: Workload) -> list[tuple[int, ...]]:
    """For every head the residue that it keeps in each branch, ABSENT where it takes no part."""
    pattern = DilatedPattern.of(workload)
    H, K = workload.num_heads, workload.num_kv_heads
    found = []
    for head in range(H):
        own = pattern.head_branches(head, H)
        residues = [
            pattern.head_offset(head, branch[1], H, K) if branch in own else ABSENT for branch in pattern.branches
        ]
        found.append(tuple(residues))
    return found


def block_mask(workload: Workload, tokens: Tensor, visible: MaskFunction) -> flex.BlockMask:
    """The mask over places of which number p holds token tokens[p] [N], on the device of `tokens`.

    `visible` is evaluated in partly visible blocks only. Memory: 16 bytes per head and pair of blocks.
    """
    pattern = DilatedPattern.of(workload)
    N = workload.seq_len
    offsets = head_offsets(workload)
    kinds = sorted(set(offsets))
    blocks = -(-N // BLOCK)
    touched, full = torch.zeros(2, len(kinds), blocks, blocks, dtype=torch.bool, device=tokens.device)
    for branch, (segment, rate) in enumerate(pattern.branches):
        for offset in {kind[branch] for kind in kinds} - {ABSENT}:
            found = _visible_blocks(_patches(tokens, segment, rate, offset), workload, blocks)
            for index, kind in enumerate(kinds):
                if kind[branch] == offset:
                    touched[index] |= found[0]
                    full[index] |= found[1]
    partly = touched & ~full
    kind_of_head = [kinds.index(own) for own in offsets]
    kv_num_blocks, kv_indices = _lists(partly, kind_of_head)
    full_kv_num_blocks, full_kv_indices = _lists(full, kind_of_head)
    q_num_blocks, q_indices = _lists(partly.transpose(1, 2), kind_of_head)
    full_q_num_blocks, full_q_indices = _lists(full.transpose(1, 2), kind_of_head)
    # Unlike `from_kv_blocks`, which sorts tables of all heads to find the lists by key.
    return flex.BlockMask(
        seq_lengths=(N, N),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


@dataclass(frozen=True, slots=True)
class _Patches:
    """Rows of one branch on one residue, those of one segment in one block together; all [patches], by segment.

    `whole`: the patch is every row of a block of full length. `first`, `last`: its least and greatest token.
    """

    segment: Tensor
    block: Tensor
    whole: Tensor
    first: Tensor
    last: Tensor


def _patches(tokens: Tensor, segment_length: int, rate: int, offset: int) -> _Patches:
    places = (tokens % segment_length % rate == offset).nonzero().squeeze(-1)
    own = tokens[places]
    blocks = -(-len(tokens) // BLOCK)
    key, of_patch, rows = torch.unique(
        own // segment_length * blocks + places // BLOCK, return_inverse=True, return_counts=True
    )
    first = torch.full_like(key, len(tokens)).scatter_reduce_(0, of_patch, own, "amin")
    last = torch.zeros_like(key).scatter_reduce_(0, of_patch, own, "amax")
    return _Patches(key // blocks, key % blocks, rows == BLOCK, first, last)


def _visible_blocks(patches: _Patches, workload: Workload, blocks: int) -> tuple[Tensor, Tensor]:
    """Pairs of blocks that the patches touch, and those that they fill: bool [blocks of queries, blocks of keys]."""
    left, right = workload.window
    right = 0 if workload.causal else right
    touched, full = torch.zeros(2, blocks * blocks, dtype=torch.bool, device=patches.block.device)
    members = _by_segment(patches.segment)
    for part in members.split(max(1, PAIRS_AT_ONCE // max(1, members.shape[1]) ** 2)):
        query, key = part.unsqueeze(2), part.unsqueeze(1)
        some = (query >= 0) & (key >= 0)
        every = some & patches.whole[query] & patches.whole[key]
        if right >= 0:
            some &= patches.first[key] <= patches.last[query] + right
            every &= patches.last[key] <= patches.first[query] + right
        if left >= 0:
            some &= patches.last[key] >= patches.first[query] - left
            every &= patches.first[key] >= patches.last[query] - left
        pair = patches.block[query] * blocks + patches.block[key]
        touched[pair[some]] = True
        full[pair[every]] = True
    return touched.view(blocks, blocks), full.view(blocks, blocks)


def _by_segment(segment: Tensor) -> Tensor:
    """Indices of the patches of every segment, [segments, most patches], and then -1."""
    _, counts = segment.unique_consecutive(return_counts=True)
    row = torch.repeat_interleave(torch.arange(len(counts), device=segment.device), counts)
    index = torch.arange(len(segment), device=segment.device)
    members = index.new_full((len(counts), int(counts.max()) if len(counts) else 0), -1)
    members[row, index - (counts.cumsum(0) - counts)[row]] = index
    return members


def _lists(marked: Tensor, kind_of_head: list[int]) -> tuple[Tensor, Tensor]:
    """How many and which blocks are marked in each row of bool [kinds, blocks, blocks]: int32 [1, H, blocks] and
    [1, H, blocks, blocks], whose rows end in zeros."""
    marked = marked.contiguous()
    blocks = marked.shape[-1]
    counts = marked.sum(-1, dtype=torch.int32)
    numbers = torch.arange(blocks, dtype=torch.int32, device=marked.device).repeat(blocks, 1)
    listed = torch.zeros(1, len(kind_of_head), blocks, blocks, dtype=torch.int32, device=marked.device)
    for kind in sorted(set(kind_of_head)):
        heads = [head for head, own in enumerate(kind_of_head) if own == kind]
        front = numbers < counts[kind].unsqueeze(-1)
        listed[0, heads[0]].masked_scatter_(front, numbers.masked_select(marked[kind]))
        for head in heads[1:]:
            listed[0, head] = listed[0, heads[0]]
    return counts[kind_of_head].unsqueeze(0), listed

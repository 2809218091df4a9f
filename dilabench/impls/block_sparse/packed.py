"""Packed sequences over lists of blocks: one plan for all of them, and one launch for each pass.

Bounds of columns hide each key from the other sequences. A mask of blocks restarts in each sequence, so it applies to
rows in which every sequence fills whole blocks. Masks over dilated branches are computed sequence by sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.block_sparse.planned import Planned, kernels_for, plan_of_columns
from dilabench.impls.one_operator import AttentionComputation
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.kernels.streams import on_a_stream_of_its_own, record
from dilabench.patterns.answers import HiddenRows, Positions, SequenceShape
from dilabench.workload.spec import Workload


def in_one_launch(workload: Workload, context: BuildContext) -> InWholeBlocks | None:
    """A packed workload of one mask of blocks, or of bounds of columns; None for others."""
    kernels = kernels_for(context.device, getattr(torch, workload.dtype))
    scale = workload.softmax_scale
    hidden = _hidden_rows(workload)
    if hidden is not None:
        whole = SequenceShape(
            workload.seq_len, workload.num_heads, workload.num_kv_heads, workload.causal, workload.window
        )
        return InWholeBlocks(Planned(kernels, plan_of_columns(whole, hidden), scale))
    found = _whole_blocks(workload)
    if found is None:
        return None
    plan, places, tokens = found
    computation = Planned(kernels, plan, scale)
    if len(places) == len(tokens):
        return InWholeBlocks(computation)
    with on_a_stream_of_its_own(context.device):
        return InWholeBlocks(computation, *(torch.from_numpy(x).to(context.device) for x in (places, tokens)))


def _hidden_rows(workload: Workload) -> HiddenRows | None:
    """Bounds of columns over all tokens, that hide a sequence's keys from the others, too; None if there are none."""
    tokens, found = workload.seq_len, []
    for (start, stop), shape in zip(workload.sequences, workload.shapes, strict=True):
        hidden = workload.pattern.hidden_rows(shape)
        if hidden is None:
            return None
        found.append((start, stop, hidden))
    count = max(len(hidden.starts) for _, _, hidden in found)
    # Behind these a range after each sequence, and one before it; starts that equal stops are no range.
    ranges = np.zeros((2, count + 1 + (not workload.causal), tokens), np.int64)
    for start, stop, hidden in found:
        here = ranges[:, :, start:stop]
        there = hidden.starts < hidden.stops
        at_start, at_stop = there & (hidden.starts == 0), there & (hidden.stops == stop - start)
        # A range at the edge of a sequence extends to the edge of all tokens.
        here[0, : len(there)] = np.where(at_start, 0, hidden.starts + start)
        here[1, : len(there)] = np.where(at_stop, tokens, hidden.stops + start)
        here[0, count], here[1, count] = np.where(at_stop.any(0), tokens, stop), tokens
        if not workload.causal:
            here[1, count + 1] = np.where(at_start.any(0), 0, start)
    return HiddenRows.of(tokens, *zip(*ranges, strict=True))


def _whole_blocks(workload: Workload) -> tuple[BlockPlan, Positions, Positions] | None:
    """A plan over rows in which sequences begin at whole blocks, the row of each token, and the token of each row: the
    last one of its sequence behind that. None if the pattern is no mask of blocks.
    """
    found = [workload.pattern.whole_blocks(shape) for shape in workload.shapes]
    masks = [blocks.mask for blocks in found if blocks is not None]
    size = workload.pattern.block_length
    if len(masks) < len(found) or size is None:
        return None
    begins = np.cumsum([0, *(len(mask[0]) for mask in masks)])
    whole = np.zeros((max(map(len, masks)), begins[-1], begins[-1]), bool)
    for mask, begin, stop in zip(masks, begins, begins[1:], strict=False):
        whole[:, begin:stop, begin:stop] = mask
    bounds = np.array(workload.cu_seqlens)
    lengths, starts = np.diff(bounds), bounds[:-1]
    places = np.arange(workload.seq_len) + (begins[:-1] * size - starts).repeat(lengths)
    rows = int(places[-1]) + 1
    of_sequence = np.diff(begins) * size
    inside = np.arange(begins[-1] * size) - (begins[:-1] * size).repeat(of_sequence)
    tokens = (np.minimum(inside, (lengths - 1).repeat(of_sequence)) + starts.repeat(of_sequence))[:rows]
    hidden = None
    if len(places) < rows:
        filled = np.zeros(rows, bool)
        filled[places] = True
        hidden = HiddenRows.of(rows, (np.zeros(rows, np.int64), np.where(filled, 0, rows)))
    return BlockPlan(whole, size, rows, workload.causal, workload.window, hidden=hidden), places, tokens


@dataclass(frozen=True, slots=True)
class InWholeBlocks(AttentionComputation):
    """All sequences in one launch. places: int64 [T], the row of each token; tokens: int64 [rows], the token of each
    row, which several rows may share. None if rows are tokens.
    """

    planned: Planned
    places: Tensor | None = None
    tokens: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        record((self.places, self.tokens))
        out, lse = self.planned.forward(*(_rows(x, self.tokens) for x in (q, k, v)))
        return _rows(out, self.places), lse if self.places is None else lse.index_select(2, self.places)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        record((self.places, self.tokens))
        if self.places is not None and self.tokens is not None:
            # A weight of exp(-inf) is 0 in rows that only fill blocks.
            infinite = lse.new_full((*lse.shape[:2], len(self.tokens)), torch.inf)
            lse = infinite.index_copy_(2, self.places, lse)
        dout, q, k, v, out = (_rows(x, self.tokens) for x in (dout, q, k, v, out))
        dq, dk, dv = self.planned.backward(dout, q, k, v, out, lse)
        return _rows(dq, self.places), _rows(dk, self.places), _rows(dv, self.places)


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    """[1, n, ·, D] of x [1, N, ·, D]: the rows of an index [n], or all of them."""
    if index is None:
        return x
    # In two dimensions torch copies whole rows.
    return x[0].flatten(1).index_select(0, index).view(1, -1, *x.shape[2:])

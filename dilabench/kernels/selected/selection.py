# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""The selection of each query token, and the device functions that map a token or a block to rows.

Batch items and packed documents are sequences that follow each other in T rows. Blocks are numbered over all
sequences, in their order. Batch items have one length, so that arithmetic finds a row's
sequence; of documents two tables have it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.workload.spec import UNBOUNDED, Window

# Values that change with a sequence or a selection cause no compilation.
PER_SELECTION = ("rows", "first_row", "length", "blocks_each", "n_blocks", "n_kv_heads", "left", "right")

# Further than any key: with a row it stays below 2^31.
_FAR = 2**30


@dataclass(frozen=True, eq=False)
class TokenSelection:
    """Selected key blocks of T query tokens: ``indices`` int32 [T, K, S], each counted from its sequence's first block.

    An index outside of the sequence's blocks stands for none; a repeated one counts once. ``length``: rows of each
    sequence; of documents T. ``n_blocks``: blocks of all sequences, of documents an upper bound. ``spans`` int32
    [T, 3] of documents: first row, end row and first block of a row's document. ``bounds`` int32 [n_blocks, 2] of
    documents: first and end row of a block. ``first_row``: the row of the first token, if others precede it.
    ``window``: how many rows back and ahead a token sees, -1 for all.
    """

    indices: Tensor
    block: int
    length: int
    causal: bool
    n_blocks: int
    spans: Tensor | None = None
    bounds: Tensor | None = None
    first_row: int = 0
    window: Window = UNBOUNDED

    @classmethod
    def of_batch(cls, indices: Tensor, block: int, causal: bool, window: Window = UNBOUNDED) -> TokenSelection:
        """The selection of ``indices`` int32 [B, N, K, S]."""
        batch, length = indices.shape[:2]
        n_blocks = batch * -(-length // block)
        return cls(indices.flatten(0, 1).contiguous(), block, length, causal, n_blocks, window=window)

    @classmethod
    def of_documents(
        cls, indices: Tensor, block: int, causal: bool, cu_seqlens: Tensor, window: Window = UNBOUNDED
    ) -> TokenSelection:
        """The selection of ``indices`` int32 [T, K, S] and ``cu_seqlens`` int [documents + 1] on their device, from 0
        to T; the host waits for nothing.
        """
        rows, documents = len(indices), len(cu_seqlens) - 1
        bounds = cu_seqlens.long()
        row = torch.arange(rows, device=indices.device)
        document = torch.bucketize(row, bounds[1:-1], right=True)
        end_block = (-(-bounds.diff() // block)).cumsum(0)
        first_block = torch.nn.functional.pad(end_block[:-1], (1, 0))
        spans = torch.stack((bounds[document], bounds[document + 1], first_block[document]), 1)
        n_blocks = rows // block + documents
        number = torch.arange(n_blocks, device=indices.device)
        document = torch.bucketize(number, end_block[:-1], right=True)
        first = bounds[document] + (number - first_block[document]) * block
        end = torch.minimum(first + block, bounds[document + 1])
        # No row selects a block behind the last one.
        tables = spans.int(), torch.stack((torch.minimum(first, end), end), 1).int()
        return cls(indices.contiguous(), block, rows, causal, n_blocks, *tables, window=window)

    def part(self, first_row: int, rows: int) -> TokenSelection:
        """The selections of some of the tokens, over the same keys."""
        return replace(self, indices=self.indices[first_row : first_row + rows], first_row=first_row)

    @property
    def rows(self) -> int:
        """T, the number of query tokens."""
        return self.indices.shape[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tables of documents, by the names under which kernels take them."""
        tables = {"spans": self.spans, "bounds": self.bounds}
        return {name: table for name, table in tables.items() if table is not None}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of every kernel over a selection."""
        rows, kv_heads, slots = self.indices.shape
        left, right = (_FAR if side < 0 else min(side, _FAR) for side in self.window)
        right = 0 if self.causal else right
        return {
            "rows": rows,
            "left": left,
            "right": right,
            # A causal mask alone is cheaper than as a window.
            "WINDOWED": left < _FAR or (right < _FAR and not self.causal),
            "first_row": self.first_row,
            "length": self.length,
            "blocks_each": -(-self.length // self.block),
            "n_blocks": self.n_blocks,
            "n_kv_heads": kv_heads,
            "SLOTS": slots,
            "BLOCK": self.block,
            "CAUSAL": self.causal,
        }


@triton.jit
def sequence_of_row(spans_ptr, row, there, length, blocks_each):
    """(first row, end row, first block) of the sequence of rows."""
    if spans_ptr is None:
        item = row // length
        first, end, first_block = item * length, (item + 1) * length, item * blocks_each
    else:
        at = spans_ptr + row * 3
        first, end = tl.load(at, there, 0), tl.load(at + 1, there, 0)
        first_block = tl.load(at + 2, there, 0)
    return first, end, first_block


@triton.jit
def last_seen(spans_ptr, row, there, length, right, CAUSAL: tl.constexpr):
    """The last key row that queries may see, -1 where there is no query."""
    if CAUSAL:
        last = row
    else:
        _, end, _ = sequence_of_row(spans_ptr, row, there, length, 0)
        last = tl.minimum(row + right, end - 1)
    return tl.where(there, last, -1)


@triton.jit
def rows_of_block(bounds_ptr, block, length, blocks_each, BLOCK: tl.constexpr):
    """First and end row of a block."""
    if bounds_ptr is None:
        item = block // blocks_each
        first = item * length + block % blocks_each * BLOCK
        end = tl.minimum(first + BLOCK, (item + 1) * length)
    else:
        first, end = tl.load(bounds_ptr + block * 2), tl.load(bounds_ptr + block * 2 + 1)
    return first, end


@triton.jit
def tile_at(ptr, row, token_step, head, head_step, UNIT: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr = True):
    """Addresses [rows, DIM] of rows of heads; steps in units of UNIT elements. WIDE: distances may pass 2^31, which
    takes twice the registers.
    """
    if WIDE:
        row = row.to(tl.int64)
    at = row * token_step + head * head_step
    return ptr + at[:, None] * UNIT + tl.arange(0, DIM)[None, :]


@triton.jit
def load_rows(
    ptr,
    row,
    token_step,
    head,
    head_step,
    there,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """[rows, DIM] of rows of heads; zeros where there is none and beyond the head dim."""
    at = tile_at(ptr, row, token_step, head, head_step, UNIT, DIM, WIDE)
    inside = there[:, None]
    if HEAD_DIM != DIM:
        inside = inside & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    return tl.load(at, inside, 0.0)

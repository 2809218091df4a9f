# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Results of single branches, which a backward pass with detached merge weights needs, and how they are merged.

A branch of rate r covers every r-th row of a head; only these are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels import tuning
from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.document_lists import BLOCK_TOKENS
from dilabench.kernels.fused.residue_plan import ResiduePlan
from dilabench.kernels.launch_cache import COPY_BYTES, Arguments, Launch
from dilabench.kernels.row_programs import row_program
from dilabench.kernels.softmax import weights_of_two

# The parts of a branch begin at a multiple of this many numbers, so of 16 bytes, for every shape: kernels are compiled
# again for others.
_UNIT = COPY_BYTES // 2
# Numbers of a branch in the table before the class of each head.
_BEFORE_CLASSES = 8
# Registers of a thread that merges class by class.
_REGISTERS = 64
_BLOCK_TOKENS = tl.constexpr(BLOCK_TOKENS)


class Partials(NamedTuple):
    """Results of branches one after another, float32 ``lses`` and ``outs``; `PartialPlaces` says where each is."""

    outs: Tensor
    lses: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PartialPlaces:
    """The places of rows of groups of a single branch in `Partials`: n rows (`BranchGroup.stored_rows`) of each head in
    out [B, n, H, D] and lse [B, H, n].

    shape: of all rows, [B, N, H, D]. outs, lses: where groups begin, and the end. table: int32, of each group the units
    that its out and lse begin at, rate, tokens and rows of a segment, stored rows, and the class of each head. classes:
    the latter of each group, [H] int32. step: where it `is_uniform`, tokens so far apart are in the same branches, and
    there are many of them.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    outs: tuple[int, ...]
    lses: tuple[int, ...]
    table: Tensor
    classes: tuple[Tensor, ...]
    step: int
    is_uniform: bool

    @classmethod
    def of(cls, groups: Sequence[BranchGroup], shape: Sequence[int], device: torch.device) -> PartialPlaces:
        """For the results of queries of this shape."""
        batch, length, heads, dim = shape
        rows = tuple(group.stored_rows for group in groups)
        outs = tuple(accumulate((_padded(batch * n * heads * dim) for n in rows), initial=0))
        lses = tuple(accumulate((_padded(batch * n * heads) for n in rows), initial=0))
        table = np.zeros((len(rows), _BEFORE_CLASSES + heads + -heads % (COPY_BYTES // 4)), np.int32)
        for line, group, n, out, lse in zip(table, groups, rows, outs, lses, strict=False):
            line[:6] = out // _UNIT, lse // _UNIT, group.modulus, group.super_tokens, group.super_rows, n
            line[_BEFORE_CLASSES : _BEFORE_CLASSES + heads] = group.class_of_head
        step = lcm(*(group.modulus for group in groups))
        # Segments of documents are not cut at the same classes, either.
        is_shifted = any(group.super_tokens % group.modulus for group in groups)
        tokens = length // max(1, *(group.documents for group in groups))
        are_many = length // step >= tuning.MANY_TOKENS and tokens // step >= tuning.MANY_TOKENS_OF_A_DOCUMENT
        is_uniform = are_many and not is_shifted
        there = torch.from_numpy(table).to(device)
        classes = there[:, _BEFORE_CLASSES : _BEFORE_CLASSES + heads].unbind()
        return cls(tuple(shape), rows, outs, lses, there, classes, step, is_uniform)

    def empty(self, q: Tensor) -> Partials:
        """Uninitialised results, of the dtype of q."""
        return Partials(q.new_empty(self.outs[-1]), q.new_empty(self.lses[-1], dtype=torch.float32))

    def views(self, partials: Partials) -> list[tuple[Tensor, Tensor]]:
        """out [B, n, H, D] and lse [B, H, n] of every group."""
        batch, _, heads, dim = self.shape
        row = heads * dim
        return [
            (
                partials.outs.as_strided((batch, n, heads, dim), (n * row, row, dim, 1), out),
                partials.lses.as_strided((batch, heads, n), (heads * n, n, 1), lse),
            )
            for n, out, lse in zip(self.rows, self.outs, self.lses, strict=False)
        ]

    def merge(self, tensors: dict[str, Tensor]) -> Launch:
        """The launch that merges outs and lses to out [B, N, H, D] and lse [B, H, N]: 0 and -inf in rows that no branch
        covers. For documents, ``documents`` and ``blocks`` say where they are (`packing.PassLists`).
        """
        batch, length, heads, dim = self.shape
        columns = triton.next_power_of_2(dim)
        rows, num_warps = row_program("partials", columns)

        def arguments(uniform: bool) -> Arguments:
            step = self.step if uniform else 1
            own = {
                "documents_ptr": None,
                "blocks_ptr": None,
                **{f"{name}_ptr": x for name, x in tensors.items()},
                "table_ptr": self.table,
                "length": length,
                "n_heads": heads,
                "step": step,
                "width": self.table.shape[1],
                "GROUPS": len(self.rows),
                "BEFORE_CLASSES": _BEFORE_CLASSES,
                "UNIFORM": uniform,
                "UNIT": _UNIT,
                "HEAD_DIM": dim,
                "COLUMNS": columns,
                "ROWS": rows,
                "num_warps": num_warps,
            }
            # Addresses of all branches, kept through the loop over documents, would take half as many again.
            limited = {"maxnreg": _REGISTERS} if uniform else {}
            return (triton.cdiv(triton.cdiv(length, step), rows) * step * batch * heads,), own | limited

        kind = (tensors["out"].dtype, dim, len(self.rows), "documents" in tensors)
        return Launch(_merge_kernel, arguments, self.is_uniform, kind)


@lru_cache(maxsize=32)
def partial_places(plan: ResiduePlan, shape: torch.Size, device: torch.device, _kind: type[Tensor]) -> PartialPlaces:
    """The layout of a plan's groups, for tensors of a kind (with data, or only traced); layouts of few lengths are
    kept.
    """
    return PartialPlaces.of(plan.groups, shape, device)


def _padded(elements: int) -> int:
    return elements + -elements % _UNIT


@triton.jit
def _add_own(state, out_ptr, lse_ptr, row, seen, n_heads, column, HEAD_DIM: tl.constexpr):
    """The running maximum, sum and rows of `_merge_kernel`, updated with one more branch."""
    top, total, merged = state
    row = row.to(tl.int64)
    lse = tl.load(lse_ptr + row, seen, float("-inf"))
    there = (lse != float("-inf"))[:, None] & (column < HEAD_DIM)[None, :]
    out = tl.load(out_ptr + (row * (n_heads * HEAD_DIM))[:, None] + column[None, :], there, 0.0)
    higher, kept, share = weights_of_two(top, lse)
    return higher, total * kept + share, merged * kept[:, None] + out.to(tl.float32) * share[:, None]


@triton.jit
def _add_branches(
    state,
    partials,
    table,
    program,
    begin,
    first_rows_ptr,
    inside,
    GROUPS: tl.constexpr,
    BEFORE_CLASSES: tl.constexpr,
    UNIFORM: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`_add_own` of all branches, for the tokens ``inside`` of a sequence that begins at the token ``begin``."""
    outs_ptr, lses_ptr = partials
    table_ptr, width = table
    batch, head, n_heads, first, step, column = program
    turn = tl.arange(0, ROWS)
    # ROWS * step more, so that it is positive where the sequence begins behind the first token.
    from_begin = first - begin + ROWS * step
    for group in tl.static_range(GROUPS):
        of_group = table_ptr + group * width
        rate, own_class = tl.load(of_group + 2), tl.load(of_group + BEFORE_CLASSES + head)
        stored = tl.load(of_group + 5)
        own_lse = lses_ptr + tl.load(of_group + 1).to(tl.int64) * UNIT + (batch * n_heads + head).to(tl.int64) * stored
        own_out = outs_ptr + tl.load(of_group).to(tl.int64) * UNIT
        own_out += (batch.to(tl.int64) * stored * n_heads + head) * HEAD_DIM
        first_row = 0
        if first_rows_ptr is not None:
            first_row = tl.load(first_rows_ptr + group)
        if UNIFORM:
            turns = from_begin // rate
            if from_begin - turns * rate == own_class:
                row = first_row + turns + (turn - ROWS) * (step // rate)
                state = _add_own(state, own_out, own_lse, row, inside, n_heads, column, HEAD_DIM)
        else:
            segment_tokens = tl.load(of_group + 3)
            place = first + turn * step - begin
            segment = place // segment_tokens
            place -= segment * segment_tokens
            within = place // rate
            row, seen = first_row + segment * tl.load(of_group + 4) + within, place - within * rate == own_class
            state = _add_own(state, own_out, own_lse, row, inside & seen, n_heads, column, HEAD_DIM)
    return state


@triton.jit(do_not_specialize=("length", "n_heads", "step", "width"))
def _merge_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    documents_ptr,
    blocks_ptr,
    length,
    n_heads,
    step,
    width,
    GROUPS: tl.constexpr,
    BEFORE_CLASSES: tl.constexpr,
    UNIFORM: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    # One program: every ``step``-th token of a head. UNIFORM: a branch covers all of them in a document, or none.
    pid = tl.program_id(0)
    head = pid % n_heads
    rest = pid // n_heads
    place = rest % step
    rest = rest // step
    blocks = tl.cdiv(tl.cdiv(length, step), ROWS)
    first = (rest % blocks) * ROWS * step + place
    batch = rest // blocks
    token = first + tl.arange(0, ROWS) * step
    valid = token < length
    column = tl.arange(0, COLUMNS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, COLUMNS], tl.float32)
    state = (top, total, merged)
    partials, table, program = (outs_ptr, lses_ptr), (table_ptr, width), (batch, head, n_heads, first, step, column)
    if documents_ptr is None:
        state = _add_branches(
            state, partials, table, program, 0, None, valid, GROUPS, BEFORE_CLASSES, UNIFORM, UNIT, HEAD_DIM, ROWS
        )
    else:
        # Documents that begin in the same block of tokens may end before the first one of the program.
        last = tl.minimum(first + (ROWS - 1) * step, length - 1)
        some = tl.minimum(first, length - 1)
        document_ptr = documents_ptr + tl.load(blocks_ptr + some // _BLOCK_TOKENS) * (1 + GROUPS)
        end = tl.load(document_ptr + 1 + GROUPS)
        while end <= some:
            document_ptr += 1 + GROUPS
            end = tl.load(document_ptr + 1 + GROUPS)
        begin = tl.load(document_ptr)
        while begin <= last:
            end = tl.load(document_ptr + 1 + GROUPS)
            state = _add_branches(
                state,
                partials,
                table,
                program,
                begin,
                document_ptr + 1,
                (token >= begin) & (token < end),
                GROUPS,
                BEFORE_CLASSES,
                UNIFORM,
                UNIT,
                HEAD_DIM,
                ROWS,
            )
            document_ptr += 1 + GROUPS
            begin = end
    top, total, merged = state
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = ((batch.to(tl.int64) * length + token) * n_heads + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_ptr + out_at, merged.to(out_ptr.dtype.element_ty), valid[:, None] & (column < HEAD_DIM)[None, :])
    tl.store(lse_ptr + (batch * n_heads + head).to(tl.int64) * length + token, top + tl.log(total), valid)

# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""How a program of a fused kernel finds its tile and reads its list: device functions shared by all of them."""

from __future__ import annotations

import triton
import triton.language as tl

from dilabench.kernels.fused.branch_group import CLASS_BITS, TILE_BITS

_TILE_BITS = tl.constexpr(TILE_BITS)
_TILE_MASK = tl.constexpr((1 << TILE_BITS) - 1)
_CLASS_MASK = tl.constexpr((1 << CLASS_BITS) - 1)
_COUNT_SHIFT = tl.constexpr(TILE_BITS + CLASS_BITS)


@triton.jit
def split_program(n_items, n_blocks, ITEM_MAJOR: tl.constexpr):
    """(item, block) of this program. Item-major order starts the heaviest tiles of all heads first; head-major order
    keeps one head's keys of one super-segment in the L2 cache.
    """
    pid = tl.program_id(0)
    if ITEM_MAJOR:
        item = pid // n_blocks
        block = pid % n_blocks
    else:
        item = pid % n_items
        block = pid // n_items
    return item, block


@triton.jit
def split_block(block, n_supers, n_heads):
    """(super-segment, head, batch element) of a block."""
    return block % n_supers, (block // n_supers) % n_heads, block // n_supers // n_heads


@triton.jit
def query_item(item, super_index, head, items_ptr, heads_ptr, full_supers, n_kinds, n_items):
    """(address of the item's header, class shift of the head)."""
    kind = tl.load(heads_ptr + head * 2)
    shift = tl.load(heads_ptr + head * 2 + 1)
    variant = (super_index >= full_supers).to(tl.int32)
    return items_ptr + ((variant * n_kinds + kind) * n_items + item) * 5, shift


@triton.jit
def load_tile(desc, batch, row, column):
    """[rows, D] of a descriptor over [B, rows of a class, columns]; rows beyond the sequence are 0."""
    return desc.load([batch, row, column]).reshape([desc.block_shape[1], desc.block_shape[2]])


@triton.jit
def store_tile(desc, batch, row, column, values):
    """The reverse of `load_tile`, rounded to the type of the tensor; rows beyond the sequence are dropped."""
    desc.store([batch, row, column], values.to(desc.dtype).reshape(desc.block_shape))


@triton.jit
def unpack(entry, shift, R: tl.constexpr):
    """(tile, token class, log2 of the multiplicity) of a list entry."""
    partner = (((entry >> _TILE_BITS) & _CLASS_MASK) + shift) % R
    return entry & _TILE_MASK, partner, tl.log2((entry >> _COUNT_SHIFT).to(tl.float32))


@triton.jit
def seen_keys(query_row, residue, key_tile, partner, end, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Which keys of a tile of class ``partner`` the queries of class ``residue`` see; rows count from the start of the
    super-segment. Causal queries before ``end``, where the sequence ends, see no key beyond it anyway.
    """
    key_row = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if CAUSAL:
        # Equal rows of two classes are ordered by class: a later class is a later token.
        last_row = query_row - (partner > residue).to(tl.int32)
        seen = key_row[None, :] <= last_row[:, None]
    else:
        seen = (key_row < end)[None, :]
    return seen

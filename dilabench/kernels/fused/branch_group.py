"""Branches that share one class modulus, and the frames in which heads see the classes (see `residue_plan`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

Offset = Literal["modulo", "blocked"]
OffsetBy = Literal["head", "kv_head"]

# One entry of a tile list is a positive int32: multiplicity (6 bits) | class (10 bits) | tile index (15 bits).
TILE_BITS = 15
CLASS_BITS = 10
MAX_MODULUS = 1 << CLASS_BITS
MAX_MULTIPLICITY = (1 << 6) - 1
SMALLEST_TILE = 16
LARGEST_TILE = 128

# Numbers of a super-segment of documents in `packing.DocumentLists.spans`, and of a visit.
SPAN_COLUMNS, VISIT_COLUMNS = 4, 8

# How far a query sees on a side without bound, in tokens: beyond any segment.
MAX_WINDOW = 1 << 30

# The residue of heads in a branch that they take no part in.
NO_RESIDUE = -1


class HeadResidues(NamedTuple):
    """How the query heads of a workload see its branches.

    `branch`: of each head the only branch that it takes part in; None if all take part in all.
    """

    num_heads: int
    num_kv_heads: int
    offset: Offset
    offset_by: OffsetBy
    branch: tuple[int, ...] | None = None

    def residue(self, head: int, branch: int, rate: int) -> int:
        """Residue of a head in a branch of dilation ``rate``; `NO_RESIDUE` if it has no part in the branch."""
        if self.branch is not None and self.branch[head] != branch:
            return NO_RESIDUE
        return head_offset(head, rate, *self[:4])

    def taking_part(self, branches: Sequence[int]) -> int:
        """How many take part in any of these branches."""
        return self.num_heads if self.branch is None else sum(branch in branches for branch in self.branch)


def head_offset(head: int, rate: int, num_heads: int, num_kv_heads: int, offset: Offset, offset_by: OffsetBy) -> int:
    """Residue of ``head`` in a branch of dilation ``rate``; ``blocked`` spreads ceil(heads / rate) neighbours on one
    residue.
    """
    index, count = head, num_heads
    if offset_by == "kv_head":
        index, count = head // (num_heads // num_kv_heads), num_kv_heads
    return index % rate if offset == "modulo" else index // -(-count // rate)


@dataclass(frozen=True)
class BranchGroup:
    """Branches that share one R, by ascending segment length; all lengths but ``length``, the N of the sequence, and
    ``super_tokens``, the longest segment, are in rows of R tokens.

    If R does not divide the longest segment (all have one length then), classes count from its start: only its first
    classes have the last row, and the next segment begins at another token modulo R.

    ``kinds[k][i]`` is the residue of branch i in the frame of kind k, or `NO_RESIDUE`; head h has kind ``head_kind[h]``
    and sees class ``(u + head_shift[h]) % modulus`` where the frame says u. ``window``: how many tokens before and
    after it a query sees, None for all of its segment. ``documents``: largest number of sequences in the ``length``
    tokens, 0 for a single one; super-segments restart in each, at the places in `packing`. ``softcap``: scores s become
    softcap · tanh(s / softcap); 0 for no cap.
    """

    branches: tuple[int, ...]
    modulus: int
    rates: tuple[int, ...]
    segment_rows: tuple[int, ...]
    super_tokens: int
    length: int
    kinds: tuple[tuple[int, ...], ...]
    head_kind: tuple[int, ...]
    head_shift: tuple[int, ...]
    heads_per_kv: int
    window: tuple[int, int] | None = None
    documents: int = 0
    softcap: float = 0.0

    @property
    def is_windowed(self) -> bool:
        """Whether a window hides pairs inside of segments."""
        return self.window is not None

    @property
    def compiled_for(self) -> tuple[int, ...]:
        """The properties of a group that kernels are compiled for; groups that share them share the kernels."""
        of_lists = self.heads_per_kv, len(self.kinds), self.is_shifted, self.is_windowed, self.documents > 0
        return *of_lists, self.softcap > 0

    def sure_and_most(self, tokens: int) -> tuple[int, int]:
        """Rows on a side on which a query sees this many tokens: in which it sees all keys, and beyond which none; of a
        class that may be another's where branches have different rates.
        """
        apart = self.modulus - 1 if len(set(self.rates)) > 1 else 0
        return (tokens - apart) // self.modulus, (tokens + apart) // self.modulus

    @property
    def one_frame_per_kv_head(self) -> bool:
        """Whether all heads of a K/V head see the classes alike, so that idle key tiles are known without asking each
        head.
        """
        g = self.heads_per_kv
        return len(self.kinds) == 1 and all(s == self.head_shift[h - h % g] for h, s in enumerate(self.head_shift))

    @property
    def sequence_rows(self) -> int:
        """Rows that the longest classes have; the last row may hold fewer than R tokens."""
        return -(-self.length // self.modulus)

    @property
    def super_rows(self) -> int:
        """Rows that the longest classes have in a whole super-segment."""
        return self.segment_rows[-1]

    @property
    def is_shifted(self) -> bool:
        """Whether super-segments begin at different tokens modulo R."""
        return self.documents > 0 or self.super_tokens % self.modulus > 0

    @property
    def full_supers(self) -> int:
        return self.length // self.super_tokens

    @property
    def tail_tokens(self) -> int:
        """Tokens of the shorter last super-segment."""
        return self.length % self.super_tokens

    @property
    def tail_rows(self) -> int:
        """Rows that the longest classes have in it."""
        return -(-self.tail_tokens // self.modulus)

    @property
    def n_supers(self) -> int:
        """Super-segments that every item of work is visited in; of documents a visit names the only one."""
        return 1 if self.documents else self.full_supers + (self.tail_rows > 0)

    @property
    def most_supers(self) -> int:
        """The most super-segments that this number of documents can have."""
        return self.full_supers + self.documents

    @property
    def stored_rows(self) -> int:
        """Rows that the longest classes have in all super-segments, one after another; of documents at most."""
        if self.documents:
            return self.length // self.modulus + self.most_supers
        return self.full_supers * self.super_rows + self.tail_rows

    @property
    def class_of_head(self) -> tuple[int, ...]:
        """The only class that each head sees, of a single branch that all take part in."""
        ((residue,),) = self.kinds
        return tuple((residue + shift) % self.modulus for shift in self.head_shift)

    @cached_property
    def covers_every_row(self) -> bool:
        """Whether each class of each head takes part in some branch of the group."""
        return all(self.active(kind, u) for kind in range(len(self.kinds)) for u in range(self.modulus))

    @property
    def covered_keys(self) -> float:
        """The share of keys that take part in some branch, of some head that reads them."""
        return _covered_keys(self.rates, self.kinds, self.modulus, self.head_kind, self.head_shift, self.heads_per_kv)

    @cached_property
    def largest_tile(self) -> int:
        """Largest power of two that divides every segment inside of the longest, and that the longest segment, or a
        shorter sequence, fills by more than half (but for the smallest tile there is).
        """
        filled = max(SMALLEST_TILE, 1 << (min(self.super_rows, self.sequence_rows) - 1).bit_length())
        inner = self.segment_rows[0]
        return min(filled, LARGEST_TILE if inner == self.super_rows else inner & -inner)

    def keys_of_a_query(self, causal: bool) -> float:
        """How many keys a query sees in the mean, of queries that see any, in whole segments: those that several
        branches show count for each of them. A branch of segments w and rate r shows w / r keys to each r-th query.
        """
        queries, *pairs = self._queries_and_pairs_of_a_token()
        return pairs[causal] / queries

    def queries_of_a_key(self, causal: bool) -> float:
        """How many queries see a key in the mean, over all heads that read it, counted in the same way."""
        _, *pairs = self._queries_and_pairs_of_a_token()
        return pairs[causal] * self.heads_per_kv / len(self.head_kind)

    def _queries_and_pairs_of_a_token(self) -> tuple[float, float, float]:
        """Queries, pairs, and pairs if causal, of a token in the mean, summed over all heads."""
        window_left, window_right = self.window or (MAX_WINDOW, MAX_WINDOW)
        queries = whole = half = 0.0
        for kind, heads in Counter(self.head_kind).items():
            branches = zip(self.rates, self.segment_rows, self.kinds[kind], strict=True)
            parts = [(rate, rows * self.modulus) for rate, rows, residue in branches if residue != NO_RESIDUE]
            queries += heads / min((rate for rate, _ in parts), default=math.inf)
            whole += heads * sum(min(tokens, window_left + 1 + window_right) / rate**2 for rate, tokens in parts)
            half += heads * sum(min(tokens / 2, window_left + 1) / rate**2 for rate, tokens in parts)
        return queries, whole, half

    def cuts_tiles(self, tile: int) -> bool:
        """Whether a segment or the sequence ends inside a tile of this many rows."""
        if self.documents:
            return True
        cut_super = self.full_supers > 0 and (self.super_rows % tile > 0 or self.is_shifted)
        return cut_super or self.tail_rows % tile > 0 or self.tail_tokens % self.modulus > 0

    def in_tiles(self, tile: int) -> tuple[BranchGroup, int]:
        """A group that many lengths share, and `tail_tokens` with the same lists of tiles of ``tile`` rows or multiples
        of it.

        If there are whole super-segments, the group has only these. The lists of the last super-segment depend on the
        number of tiles that begin in it, and on whether every class fills the last tile.
        """
        rows = -(-self.tail_rows // tile) * tile
        tail = self.modulus * rows - (self.tail_tokens // self.modulus < rows)
        if self.full_supers:
            return replace(self, length=self.super_tokens), min(tail, self.super_tokens - 1)
        # A window over the whole sequence covers the longer one, too.
        segments = tuple(segment if segment < self.sequence_rows else rows + 1 for segment in self.segment_rows)
        return replace(self, segment_rows=segments, super_tokens=self.modulus * (rows + 1), length=tail), tail

    def tails_in_tiles(self, tile: int) -> tuple[int, ...]:
        """Every tail that `in_tiles` gives behind whole super-segments."""
        rows = range(0, self.super_rows + tile, tile)
        ends = {min(self.modulus * some - less, self.super_tokens - 1) for some in rows for less in (0, 1)}
        return tuple(sorted(ends - {-1}))

    def active(self, kind: int, u: int) -> tuple[int, ...]:
        """Indices (into this group) of the branches that class ``u`` takes part in."""
        return _active(self.rates, self.kinds[kind], u)


def _active(rates: tuple[int, ...], kind: tuple[int, ...], u: int) -> tuple[int, ...]:
    return tuple(i for i, rate in enumerate(rates) if u % rate == kind[i])


# Many lengths have it in common.
@lru_cache(maxsize=256)
def _covered_keys(
    rates: tuple[int, ...],
    kinds: tuple[tuple[int, ...], ...],
    modulus: int,
    head_kind: tuple[int, ...],
    head_shift: tuple[int, ...],
    heads_per_kv: int,
) -> float:
    of_kinds = [{u for u in range(modulus) if _active(rates, kind, u)} for kind in kinds]
    classes = [
        {(u + shift) % modulus for u in of_kinds[kind]} for kind, shift in zip(head_kind, head_shift, strict=True)
    ]
    shared = [set().union(*classes[first : first + heads_per_kv]) for first in range(0, len(classes), heads_per_kv)]
    return sum(map(len, shared)) / (len(shared) * modulus)

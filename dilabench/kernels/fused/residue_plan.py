"""Residue-class plans: the union of dilated branches as a list of dense tiles, each distinct pair once.

A ``[B, N, H, D]`` tensor seen as ``[B, N / R, R, H, D]`` puts token ``l * R + c`` at row l of *class* c; where R does
not divide N, the first N mod R classes have a row more than the others. Let R be a multiple of every dilation rate that
divides every segment length, and W the longest segment. Then all rows of one class of a head take part in the same
branches, so a tile of rows of one class against a tile of rows of another is either wholly visible (apart from the
causal edge and where a segment ends) or not at all, and the number m of branches that give a pair is constant in the
tile: multiplicity becomes a scalar bias log2(m) on the logits of the tile.

A branch by itself needs no R that divides its segments: classes then count from the start of each.

Branches whose tiles would waste causal work on the diagonal, or whose rates do not fit one R, are placed in separate
*groups*, each with its own R. Branches that fit no group, or groups without a small common multiple, have no plan
(`choice.implementations` refuses them; `strided` computes them).

Grouped heads take part in one branch each: in the others they have no residue, and their lists of tiles are empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from dilabench.kernels.fused.branch_group import (
    MAX_MODULUS,
    MAX_MULTIPLICITY,
    MAX_WINDOW,
    NO_RESIDUE,
    SMALLEST_TILE,
    TILE_BITS,
    BranchGroup,
    HeadResidues,
    Offset,
    OffsetBy,
)
from dilabench.kernels.fused.tile_lists import computed_pairs
from dilabench.kernels.tuning import GROUP_COST_PAIRS, MERGE_COST_PAIRS

if TYPE_CHECKING:
    # Triton is not installed everywhere.
    from dilabench.kernels.fused.packing import Packing

# If a length is no multiple of all moduli, tensors may be padded to one that is, by less than this many tokens.
MOST_TOKENS_BEHIND = 4096
# Larger tables (4 bytes per entry) cost more than they save; such long segments belong to a dense kernel.
MAX_TABLE_ENTRIES = 1 << 25


@dataclass(frozen=True, eq=False)
class ResiduePlan:
    """Groups to run in order, each branch in one of them.

    Equal plans are the same object (`residue_plan`), which is quicker to look up than what they are made of.
    """

    groups: tuple[BranchGroup, ...]
    sequence_length: int
    num_heads: int
    num_kv_heads: int
    causal: bool


@lru_cache(maxsize=256)
def residue_plan(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    sequence_length: int,
    num_heads: int,
    num_kv_heads: int,
    causal: bool,
    offset: Offset = "modulo",
    offset_by: OffsetBy = "head",
    tile: int = 64,
    cut: tuple[tuple[int, ...], ...] | None = None,
    separate: bool = False,
    branch_of_head: tuple[int, ...] | None = None,
    window: tuple[int, int] = (-1, -1),
) -> ResiduePlan:
    """Split the branches into groups with the least computed pairs at ``tile`` rows.

    The search covers the ways to cut the branches, ordered by dilation rate, into runs; ``cut`` gives the groups
    (branch indices) instead, and ``separate`` one group for each branch. A branch without heads is in no group.
    ``branch_of_head``: the index of the only branch that each head takes part in; None if all take part in all.
    ``window``: how many tokens before and behind it a query sees, -1 for all.

    Raises ValueError for ill-formed arguments, a ``cut`` that does not fit, and branches that have no plan.
    """
    if len(segment_lengths) != len(dilation_rates) or not segment_lengths:
        raise ValueError(
            f"{len(segment_lengths)} segment lengths for {len(dilation_rates)} dilation rates: pair them up"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads are not a multiple of {num_kv_heads} key/value heads")
    if branch_of_head is not None and len(branch_of_head) != num_heads:
        raise ValueError(f"{len(branch_of_head)} branches of heads for {num_heads} heads: give one for each")
    heads = HeadResidues(num_heads, num_kv_heads, offset, offset_by, branch_of_head)
    left, right = (MAX_WINDOW if tokens < 0 else min(tokens, MAX_WINDOW) for tokens in window)
    branches = _Branches(segment_lengths, dilation_rates, heads, (left, MAX_WINDOW if causal else right))
    if cut is not None:
        given = [_fit(part, branches, sequence_length, SMALLEST_TILE) for part in cut]
        if refused := [fit for fit in given if isinstance(fit, str)]:
            raise ValueError(f"groups {cut}: {'; '.join(refused)}")
        groups = tuple(fit for fit in given if not isinstance(fit, str))
        if missing := sorted(set(range(len(dilation_rates))).difference(*cut)):
            raise ValueError(f"groups {cut} lack the branches {missing}")
        return ResiduePlan(groups, sequence_length, num_heads, num_kv_heads, causal)
    by_rate = sorted(range(len(dilation_rates)), key=lambda i: (dilation_rates[i], segment_lengths[i]))
    taken = tuple(i for i in by_rate if heads.taking_part((i,)))
    multiple = math.lcm(*(dilation_rates[i] for i in taken))
    if multiple > MOST_TOKENS_BEHIND:
        raise ValueError(f"the lcm of the dilation rates is {multiple}, above {MOST_TOKENS_BEHIND}")
    if separate:
        groups = _separate(taken, branches, sequence_length)
    else:
        groups = _groups(taken, branches, sequence_length, causal, tile)
    return ResiduePlan(groups, sequence_length, num_heads, num_kv_heads, causal)


@lru_cache(maxsize=64)
def capped_plan(plan: ResiduePlan, softcap: float | None) -> ResiduePlan:
    """The plan with a softcap of scores, if there is one."""
    if softcap is None:
        return plan
    return replace(plan, groups=tuple(replace(group, softcap=softcap) for group in plan.groups))


# Documents up to this many tokens have one plan, unless segments are shorter.
_SHORTEST_DOCUMENTS = 512


def document_plan(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    packing: Packing,
    *shape: Any,
    **options: Any,
) -> ResiduePlan:
    """As `residue_plan` for documents, each a separate sequence.

    The plan of many packings of as many tokens: it knows by rounded numbers how many documents there are, and how long
    they are. ``shape``: what `residue_plan` takes behind the length.
    """
    longest, most, tokens, documents = packing.longest, max(segment_lengths), packing.tokens, packing.documents
    doublings = (longest - 1).bit_length()
    # Every second power of two: each has separate lists.
    rounded = max(_SHORTEST_DOCUMENTS, 1 << doublings + (doublings + 1) % 2)
    # Lengths above all segments have the same lists, and none is above all tokens.
    rounded = min(rounded if rounded <= most else 2 * most, tokens)
    try:
        return _document_plan(segment_lengths, dilation_rates, rounded, tokens, documents, *shape, **options)
    except ValueError:
        return _document_plan(segment_lengths, dilation_rates, longest, tokens, documents, *shape, **options)


@lru_cache(maxsize=256)
def _document_plan(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    longest: int,
    tokens: int,
    documents: int,
    *shape: Any,
    **options: Any,
) -> ResiduePlan:
    alone = residue_plan(segment_lengths, dilation_rates, longest, *shape, **options)
    groups = tuple(replace(group, length=tokens, documents=documents) for group in alone.groups)
    return replace(alone, groups=groups, sequence_length=tokens)


class _Branches(NamedTuple):
    """Every branch of a pattern, the heads that take part in them, and how far queries see on both sides."""

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    heads: HeadResidues
    window: tuple[int, int]


def _separate(usable: tuple[int, ...], branches: _Branches, sequence_length: int) -> tuple[BranchGroup, ...]:
    """A group of each branch. Raises ValueError where one has no tiles."""
    found = []
    for index in usable:
        fit = _fit((index,), branches, sequence_length, SMALLEST_TILE)
        if isinstance(fit, str):
            raise ValueError(f"branch {index} has no residue-class tiles: {fit}")
        found.append(fit)
    return tuple(found)


def _groups(
    usable: tuple[int, ...], branches: _Branches, sequence_length: int, causal: bool, tile: int
) -> tuple[BranchGroup, ...]:
    """The cut of the next power of two, so that a new length needs no search, unless it does not fit this length."""
    rounded = 1 << (sequence_length - 1).bit_length()
    # A segment that holds all of this length may be cut in a longer one, and then not fit.
    parts = _cheapest_cut(usable, branches, rounded, causal, tile)
    found = [_fit(part, branches, sequence_length, _smallest_tile(part, tile)) for part in parts]
    groups = tuple(fit for fit in found if not isinstance(fit, str))
    if parts and len(groups) == len(parts):
        return groups
    _separate(usable, branches, sequence_length)
    parts = _cheapest_cut(usable, branches, sequence_length, causal, tile)
    fits = (_fit(part, branches, sequence_length, _smallest_tile(part, tile)) for part in parts)
    return tuple(fit for fit in fits if not isinstance(fit, str))


@lru_cache(maxsize=256)
def _cheapest_cut(
    usable: tuple[int, ...], branches: _Branches, sequence_length: int, causal: bool, tile: int
) -> tuple[tuple[int, ...], ...]:
    """Dynamic programme over cuts of ``usable`` (ascending dilation rate) into runs; a run that does not fit is not a
    choice. Empty if a branch does not fit alone.
    """
    if any(isinstance(_fit((i,), branches, sequence_length, SMALLEST_TILE), str) for i in usable):
        return ()
    best: list[tuple[float, tuple[tuple[int, ...], ...]]] = [(0.0, ())]
    for end in range(1, len(usable) + 1):
        options: list[tuple[float, tuple[tuple[int, ...], ...]]] = []
        for start in range(end):
            run = usable[start:end]
            group = _fit(run, branches, sequence_length, _smallest_tile(run, tile))
            if isinstance(group, str):
                continue
            cost = float(computed_pairs(group, min(tile, group.largest_tile), causal))
            if start:
                rows = branches.heads.taking_part(run) * sequence_length / min(group.rates)
                cost += MERGE_COST_PAIRS * rows + GROUP_COST_PAIRS
            options.append((best[start][0] + cost, (*best[start][1], run)))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def _smallest_tile(branches: tuple[int, ...], tile: int) -> int:
    """The least tile size of a group: several branches are faster separately than together in small tiles."""
    return SMALLEST_TILE if len(branches) == 1 else min(tile, 64)


def _fit(part: tuple[int, ...], branches: _Branches, sequence_length: int, smallest_tile: int) -> BranchGroup | str:
    """The group of these branches, or the reason why they cannot share residue-class tiles."""
    segment_lengths, dilation_rates, heads, window = branches
    ordered = tuple(sorted(part, key=lambda i: min(segment_lengths[i], sequence_length)))
    modulus = math.lcm(*(dilation_rates[i] for i in ordered))
    if modulus > MAX_MODULUS:
        return f"lcm of the dilation rates is {modulus}, above {MAX_MODULUS}"
    if len(ordered) > MAX_MULTIPLICITY:
        return f"{len(ordered)} branches share keys, above {MAX_MULTIPLICITY}"
    lengths: list[int] = []
    for i in ordered:
        length = segment_lengths[i]
        if length >= sequence_length:
            # One segment holds everything: its length may be rounded up, to nest over shorter ones or to whole rows.
            step = lengths[-1] if lengths else modulus
            length = -(-sequence_length // step) * step
        lengths.append(length)
    if uneven := [length for length in lengths if length % modulus and length < lengths[-1]]:
        return f"segment length {uneven[0]} is not a multiple of {modulus}, the lcm of the dilation rates"
    for short, long in pairwise(lengths):
        if long % short:
            return f"segment length {long} is not a multiple of {short}: segments are not nested"
    rates = tuple(dilation_rates[i] for i in ordered)
    kinds, head_kind, head_shift = _frames(ordered, rates, modulus, heads)
    group = BranchGroup(
        ordered,
        modulus,
        rates,
        tuple(-(-length // modulus) for length in lengths),
        lengths[-1],
        sequence_length,
        kinds,
        head_kind,
        head_shift,
        heads.num_heads // heads.num_kv_heads,
        window if min(window) < lengths[-1] - 1 else None,
    )
    if group.largest_tile < smallest_tile:
        return (
            f"segments of {group.segment_rows[0]} rows in a sequence of {group.sequence_rows} rows (modulo {modulus})"
            f" allow tiles of {group.largest_tile} rows, below {smallest_tile}"
        )
    if group.super_rows // SMALLEST_TILE >= 1 << TILE_BITS:
        return f"segment length {lengths[-1]} has more than {1 << TILE_BITS} tiles per class"
    if _most_entries(group, min(group.largest_tile, 64)) > MAX_TABLE_ENTRIES:
        return f"tile table of segment length {lengths[-1]} passes {MAX_TABLE_ENTRIES} entries"
    return group


def _most_entries(group: BranchGroup, tile: int) -> int:
    """Upper bound of the number of table entries: every visible (class, class) block of tiles, all kinds, both
    variants.
    """
    total = 0
    for rate, rows in zip(group.rates, group.segment_rows, strict=True):
        classes = group.modulus // rate
        total += classes * classes * -(-group.super_rows // tile) * -(-rows // tile)
    return 2 * total * len(group.kinds)


@lru_cache(maxsize=1024)
def _frames(
    branches: tuple[int, ...], rates: tuple[int, ...], modulus: int, heads: HeadResidues
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]:
    """Kinds of heads up to a cyclic shift of the classes: (kinds, kind of each head, shift of each head)."""
    kinds: list[tuple[int, ...]] = []
    head_kind: list[int] = []
    head_shift: list[int] = []
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    for head in range(heads.num_heads):
        residues = tuple(heads.residue(head, i, rate) for i, rate in zip(branches, rates, strict=True))
        if residues not in known:
            known.update(
                (tuple(_shifted(s, shift, rate) for s, rate in zip(residues, rates, strict=True)), (len(kinds), shift))
                for shift in reversed(range(modulus))
            )
            kinds.append(residues)
        kind, shift = known[residues]
        head_kind.append(kind)
        head_shift.append(shift)
    return tuple(kinds), tuple(head_kind), tuple(head_shift)


def _shifted(residue: int, shift: int, rate: int) -> int:
    return residue if residue == NO_RESIDUE else (residue + shift) % rate

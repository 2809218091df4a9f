"""Block-sparse attention: blocks of queries see blocks of keys, over a whole sequence or over dilated branches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dilabench.errors import ConfigError
from dilabench.patterns.answers import (
    KeyGroup,
    Pairs,
    Picture,
    SequenceShape,
    StridedSegments,
    WholeBlocks,
)
from dilabench.patterns.block_masks import (
    MAX_BLOCKS,
    block_shares,
    custom_mask,
    generated_mask,
    masked_pairs,
    rows_of_blocks,
    rows_with_keys,
    visible_blocks,
)
from dilabench.patterns.dense import DENSE
from dilabench.patterns.dilated import DilatedPattern, DilatedRequest, rows_kept
from dilabench.patterns.mask_files import Given, GivenByFile, named_file
from dilabench.patterns.pattern import Pattern, group_rows, hide_future
from dilabench.units import format_count
from dilabench.validation import Model, Size, validated

if TYPE_CHECKING:
    from dilabench.patterns.answers import Positions
    from dilabench.patterns.block_masks import Mask

MaskKind = Literal["local_window", "global_local", "dilated_sparse", "strided", "hierarchical", "random", "custom"]


# From this many tokens on, blocks of other sizes are measured, too.
LONG = 2**15


def _rest(share: Any) -> float:
    """1 - share, without the noise of floating point: masks of density 0.1 and of sparsity 0.9 are the same."""
    try:
        return round(1 - float(share), 12)
    except (TypeError, ValueError):
        raise ValueError(f"{share!r} is not a share; write for example 0.1") from None


class BlockSparseRequest(DilatedRequest):
    """Request fields of block masks. Segments or rates apply the mask to the branches of a dilated pattern."""

    mask: MaskKind = "local_window"
    block_size: Size = 128
    density: float = Field(default=0.1, gt=0, le=1)
    mask_seed: int = 0
    per_head: bool = False
    mask_file: str | None = None


class BlockSparsePattern(GivenByFile):
    """C = 1 where the mask of (head, i // block, j // block) is set.

    Users read and write its density, the share of visible blocks that is computed; records store `sparsity`, which is
    1 - density and part of the case id. With branches (`segment_lengths`, `dilation_rates`) the mask applies to the
    rows that each dilated branch keeps in a segment, instead of to the whole sequence. The masks come from
    `dilabench.patterns.block_masks`.
    """

    kind: Literal["block_sparse"] = "block_sparse"
    mask: MaskKind = "local_window"
    block_size: int = Field(default=128, ge=1, le=2**20)
    sparsity: float = Field(default=0.9, ge=0, lt=1)
    seed: int = Field(default=0, ge=0)
    per_head: bool = False
    mask_file: str | None = None
    mask_digest: str | None = None
    branches: DilatedPattern | None = None

    given_whole_by: ClassVar[frozenset[str]] = frozenset({"mask_file"})
    given: ClassVar[Given] = Given("mask", "mask", "custom", "mask 'custom' and a mask file")
    former_fields: ClassVar[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {"sparsity": ("density", _rest)}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.branches is not None and self.branches.has_zero_keys:
            raise ValueError("padding=zero_key: a block mask over branches has no zero keys; use padding=masked")
        return self

    @classmethod
    def request_model(cls) -> type[Model]:
        """Includes the fields of the branches that the mask may apply to."""
        return BlockSparseRequest

    @classmethod
    def from_request(cls, fields: Mapping[str, Any]) -> Self:
        """A mask file replaces kind and density. Raises ConfigError when it cannot be read."""
        request = validated(BlockSparseRequest, dict(fields))
        composed = request.segment_lengths != "auto" or request.dilation_rates != "auto"
        in_branches = request.model_dump(include=set(DilatedRequest.model_fields))
        file, digest = named_file(request.mask_file) if request.mask_file else (None, None)
        return validated(
            cls,
            {
                "mask": "custom" if request.mask_file else request.mask,
                "block_size": request.block_size,
                "sparsity": 0.0 if request.mask_file else _rest(request.density),
                "seed": request.mask_seed,
                "per_head": request.per_head,
                "mask_file": file,
                "mask_digest": digest,
                "branches": DilatedPattern.from_request(in_branches) if composed else None,
            },
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Blocks that do not divide the sequence, a mask per head, and one over branches."""
        small: dict[str, Any] = {"block_size": 16, "sparsity": 0.5}
        branches = {"segment_lengths": (48, 160), "dilation_rates": (1, 3)}
        fields = (small, {**small, "mask": "random", "per_head": True}, {**small, "branches": branches})
        return tuple(cls.model_validate(variant) for variant in fields)

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """Blocks that do not divide the sequence; without a causal mask; heads that differ."""
        blocks = {"mask": "random", "block_size": 48, "density": 0.4}
        return {
            "sparse": blocks,
            "sparse-full": {**blocks, "causal": False},
            "sparse-heads": {**blocks, "per_head": True},
        }

    @classmethod
    def densities(cls, length: int) -> tuple[Mapping[str, Any], ...]:
        """A half to a fiftieth of the blocks; from 32K tokens on in blocks of three sizes."""
        sizes = (64, 128, 256) if length >= LONG else (128,)
        return tuple(
            {"block_size": size, "density": density} for size in sizes for density in (0.5, 0.25, 0.1, 0.05, 0.02)
        )

    @property
    def density(self) -> float:
        """The requested share of visible blocks that is computed."""
        return _rest(self.sparsity)

    @property
    def under(self) -> Pattern:
        """The pattern below the mask: the branches, or dense attention."""
        return self.branches or DENSE

    @property
    def per_head_masks(self) -> bool:
        """Return True if masks may differ by head: as requested, or possibly in a file."""
        return self.per_head or self.mask == "custom"

    # Names.

    def label(self) -> str:
        """'block-sparse local_window block 128 density 0.1', its branches, and fields that differ from the default."""
        words = [f"block-sparse {self.mask} block {self.block_size} density {self.density:g}"]
        words += [self.branches.label()] if self.branches else []
        named = {"kind", "mask", "block_size", "sparsity", "branches"}
        unusual = self.model_dump(exclude_defaults=True, exclude=named)
        return " ".join([*words, *(f"{name}={value}" for name, value in unusual.items())])

    def setting(self) -> str:
        """The density; of a file only that it is one."""
        return "from file" if self.mask == "custom" else f"{self.density:.1%}"

    def details(self, shapes: Sequence[SequenceShape]) -> str:
        """The kind of mask, its blocks, and its requested and actual density."""
        intended = "from a file" if self.mask == "custom" else f"{self.density:.1%} requested"
        reached = f"{self.density_of(shapes):.1%} reached"
        heads = ", a mask per head" if self.per_head else ""
        sizes = ", ".join(f"{segment}/{rate}" for segment, rate in self.branches.branches) if self.branches else ""
        over = f", over branches {sizes}" if sizes else ""
        return f"{self.kind} {self.mask}, block {self.block_size}, density {intended}, {reached}{heads}{over}"

    def row_labels(self, shapes: Sequence[SequenceShape]) -> dict[str, str]:
        """The density that whole blocks reach."""
        return {"density_reached": f"{self.density_of(shapes):.4f}"}

    # Which query sees which key.

    def counts(self, shape: SequenceShape, head: int, rows: Positions) -> Iterator[KeyGroup]:
        """The mask applies to the rows that each branch keeps in a segment (without branches: to all rows)."""
        if not len(rows):
            return
        segments = self._branches(shape, head)
        labels = np.stack([self._block_labels(branch, rows) for branch in segments])
        for blocks, members in group_rows(labels, rows):
            pairs = zip(segments, blocks, strict=True)
            yield KeyGroup(members, tuple(self._keys_of_block(shape, head, branch, block) for branch, block in pairs))

    def head_key(self, shape: SequenceShape, head: int) -> Hashable:
        """Heads with the same mask over the same branches have equal keys."""
        return head if self.per_head_masks else None, self._branches(shape, head)

    def rows_seeing(self, shape: SequenceShape, head: int, key: int) -> Positions:
        """The rows of the blocks whose mask includes the key's block."""
        rows = [np.zeros(0, dtype=np.int64)]
        for branch in self._branches(shape, head):
            w, r, offset = branch
            label = int(self._block_labels(branch, np.array([key]))[0])
            if label >= 0:
                segment, block = divmod(label, w + 1)
                mask, count = self._mask_of_segment(shape, head, branch, segment)
                rows.append(segment * w + offset + r * rows_of_blocks(mask[:, block], self.block_size, count))
        return np.unique(np.concatenate(rows))

    def covered(self, shape: SequenceShape, head: int) -> NDArray[np.bool_]:
        """A row sees a key if a block is set between the blocks of its first and its last visible key."""
        left, right = shape.reach
        seen = np.zeros(shape.length, dtype=bool)
        for branch in self._branches(shape, head):
            w, r, offset = branch
            for segment in range(-(-shape.length // w)):
                if not rows_kept(min(w, shape.length - segment * w), r, offset):
                    continue
                mask, count = self._mask_of_segment(shape, head, branch, segment)
                reach = (None if left is None else left // r, None if right is None else right // r)
                rows = segment * w + offset + r * np.arange(count)
                seen[rows] |= rows_with_keys(mask, self.block_size, count, reach)
        return seen

    def pairs(self, shape: SequenceShape) -> Pairs:
        """Counted block by block; the pairs of the largest branch are distinct."""
        of_branch: Counter[int] = Counter()
        for branch, times, rows, head, window in self._masked_rows(shape):
            pairs = _pairs_of_masks(self, rows, shape.num_heads, shape.causal, window)
            of_branch[branch] += times * pairs[head % len(pairs)]
        return Pairs(of_branch.total(), max(of_branch.values()))

    def reached_rows(self, shape: SequenceShape) -> tuple[int, int]:
        """A generated mask includes its diagonal; one from a file may omit any row."""
        return (0, 0) if self.mask == "custom" else self.under.reached_rows(shape)

    def keys_per_row(self, length: int) -> int:
        """The same bound as without the mask."""
        return self.under.keys_per_row(length)

    def edges(self, shape: SequenceShape) -> Positions:
        """The starts of blocks; over branches, of segments."""
        return self.branches.edges(shape) if self.branches else np.arange(0, shape.length, self.block_size)

    @property
    def block_length(self) -> int:
        """As given."""
        return self.block_size

    @property
    def parts(self) -> int:
        """One per branch."""
        return self.under.parts

    @property
    def is_detached(self) -> bool:
        """As the branches say."""
        return self.under.is_detached

    @property
    def has_grouped_heads(self) -> bool:
        """As the branches say."""
        return self.under.has_grouped_heads

    def whole_blocks(self, shape: SequenceShape) -> WholeBlocks | None:
        """The mask; None over branches, whose rows are strided."""
        if self.branches is not None:
            return None
        return WholeBlocks(block_mask(self, shape.length, shape.causal, shape.num_heads), self.block_size)

    def density_of(self, shapes: Sequence[SequenceShape]) -> float:
        """The share of visible blocks that is computed, over all sequences, heads and branches."""
        # Per set of rows: the blocks that each mask computes, and the visible ones; a mask file is read once.
        counted: dict[int, tuple[list[int], int]] = {}
        computed = visible = 0
        for shape in shapes:
            for _, times, rows, head, _ in self._masked_rows(shape):
                if rows not in counted:
                    masks = block_mask(self, rows, shape.causal, shape.num_heads)
                    counted[rows] = [int(mask.sum()) for mask in masks], visible_blocks(masks.shape[-1], shape.causal)
                blocks, all_blocks = counted[rows]
                computed += times * blocks[head % len(blocks)]
                visible += times * all_blocks
        return computed / visible

    # Pictures.

    def shares(self, shape: SequenceShape, lines: int, columns: int) -> NDArray[np.float64] | None:
        """The exact shares of blocks; None over branches, which have no single picture."""
        if self.branches is not None:
            return None
        return block_shares(block_mask(self, shape.length, shape.causal, shape.num_heads)[0], lines, columns)

    def pictures(self, shape: SequenceShape, cells: int) -> Iterator[Picture]:
        """One of the mask over the sequence, or one over the rows that each branch keeps in a whole segment."""
        if self.branches is None:
            yield self._picture(shape, shape.length, f"{format_count(shape.length)} tokens", cells)
            return
        for segment, rate in self.branches.branches:
            rows = rows_kept(min(segment, shape.length), rate, 0)
            yield self._picture(shape, rows, f"{rows} rows of a branch of rate {rate}", cells)

    def _picture(self, shape: SequenceShape, rows: int, what: str, cells: int) -> Picture:
        mask = block_mask(self, rows, shape.causal, shape.num_heads)
        density = "" if self.mask == "custom" else f"_density_{round(100 * self.density)}"
        reached = float(mask.sum()) / (mask.shape[0] * visible_blocks(mask.shape[-1], shape.causal))
        intended = "from a file" if self.mask == "custom" else f"{self.density:.1%} requested"
        causal = ", causal" if shape.causal else ""
        head = f", head 0 of {mask.shape[0]}" if mask.shape[0] > 1 else ""
        return Picture(
            f"mask_{self.mask}_{rows}_rows_block_{self.block_size}{density}",
            f"{self.mask}, {what}, block {self.block_size}{causal}{head}:\ndensity {intended}, {reached:.1%} reached",
            mask.shape[-1],
            self.block_size,
            hide_future(block_shares(mask[0], cells, cells), shape.causal),
        )

    # The mask over the rows of a segment.

    def _branches(self, shape: SequenceShape, head: int) -> tuple[StridedSegments, ...]:
        segments = self.under.strided_segments(shape, head)
        assert segments is not None
        return segments

    def _block_labels(self, branch: StridedSegments, rows: Positions) -> Positions:
        """[R]: the label (segment and block of rows in it) of each position, -1 if it is not on the residue."""
        w, r, offset = branch
        block = (rows % w - offset) // r // self.block_size
        labels: Positions = np.where(rows % w % r == offset, rows // w * (w + 1) + block, -1)
        return labels

    def _keys_of_block(self, shape: SequenceShape, head: int, branch: StridedSegments, label: int) -> range | Positions:
        """Positions that the rows of one block (by its label) see in a branch, ascending."""
        if label < 0:
            return range(0)
        w, r, offset = branch
        segment, block = divmod(label, w + 1)
        mask, count = self._mask_of_segment(shape, head, branch, segment)
        keys: Positions = segment * w + offset + r * rows_of_blocks(mask[block], self.block_size, count)
        return keys

    def _mask_of_segment(
        self, shape: SequenceShape, head: int, branch: StridedSegments, segment: int
    ) -> tuple[NDArray[np.bool_], int]:
        """Return the head's mask [n, n] over the rows that a branch keeps in a segment, and their number."""
        w, r, offset = branch
        count = rows_kept(min(w, shape.length - segment * w), r, offset)
        mask = block_mask(self, count, shape.causal, shape.num_heads)
        return mask[head % mask.shape[0]], count

    def _masked_rows(self, shape: SequenceShape) -> Iterator[tuple[int, int, int, int, tuple[int, int]]]:
        """(branch, times, rows, query head, window in rows) of every set of rows that a mask applies to."""
        for head in range(shape.num_heads):
            for branch, (w, r, offset) in enumerate(self._branches(shape, head)):
                left, right = (side if side < 0 else side // r for side in shape.window)
                full, tail = divmod(shape.length, w)
                for times, part in ((full, w), (1, tail)):
                    if rows := rows_kept(part, r, offset):
                        yield branch, times, rows, head, (left, right)


def block_mask(pattern: BlockSparsePattern, rows: int, causal: bool, num_heads: int) -> Mask:
    """The mask [num_heads or 1, n, n] over n = ceil(rows / block_size) blocks: True where block (i, j) is computed.

    Raises ConfigError when there are more than 2^15 blocks a side, or when a mask file does not fit.
    """
    size, blocks = pattern.block_size, -(-rows // pattern.block_size)
    if blocks > MAX_BLOCKS:
        raise ConfigError(
            f"block_size={size} cuts {rows} rows into {blocks} blocks a side, above {MAX_BLOCKS}; "
            f"use block_size={-(-rows // MAX_BLOCKS)} or more"
        )
    if pattern.mask_file is not None:
        return custom_mask(pattern.mask_file, pattern.mask_digest, size, blocks, causal, num_heads)
    heads = num_heads if pattern.per_head else 1
    return generated_mask(pattern.mask, pattern.sparsity, pattern.seed, blocks, causal, heads)


@lru_cache(maxsize=4096)
def _pairs_of_masks(
    pattern: BlockSparsePattern, rows: int, num_heads: int, causal: bool, window: tuple[int, int]
) -> tuple[int, ...]:
    """Pairs of each head, or of the one mask that all heads share."""
    masks = block_mask(pattern, rows, causal, num_heads)
    return tuple(masked_pairs(mask, pattern.block_size, rows, causal, window) for mask in masks)

"""Pictures of the block masks of a record, one per distinct mask, whatever suite it is of."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilabench.errors import ConfigError
from dilabench.patterns.block_masks import block_mask, block_shares, visible_blocks
from dilabench.record import RunRecord
from dilabench.report.findings import MaskPlot, Section
from dilabench.units import format_count
from dilabench.workload.spec import BlockSparsePattern, Workload
from dilabench.workload.work import rows_kept

if TYPE_CHECKING:
    from dilabench.patterns.block_masks import Mask

# Beyond this a cell of the picture stands for several blocks.
MAX_CELLS = 256


@dataclass(frozen=True, slots=True)
class MaskUse:
    """A mask over so many rows, by what makes it.

    num_heads: 1 where all heads share it. rate: of the dilated branch that keeps the rows, None without.
    """

    pattern: BlockSparsePattern
    rows: int
    causal: bool
    num_heads: int
    rate: int | None


def analyse(record: RunRecord) -> tuple[Section, ...]:
    """A section of pictures; nothing for a record without block-sparse rows.

    A mask whose file is gone or has changed is named in the sentence instead.
    """
    uses = list(dict.fromkeys(use for row in record.rows for use in uses_of(row.case.workload)))
    if not uses:
        return ()
    plots: list[MaskPlot] = []
    lost: list[str] = []
    for use in uses:
        try:
            plots.append(_plot(use, {plot.name for plot in plots}))
        except ConfigError as error:
            lost.append(f"The mask over {use.rows} rows cannot be drawn: {error}.")
    count = f"{len(uses)} distinct masks" if len(uses) > 1 else "one mask"
    sentence = " ".join([f"The block-sparse rows use {count}.", *lost])
    return (Section(title="Block masks", sentence=sentence, plots=tuple(plots)),)


def uses_of(workload: Workload) -> Iterator[MaskUse]:
    """The masks of a workload: over each sequence, or over the rows that each branch keeps in a whole segment."""
    pattern = workload.pattern
    if not isinstance(pattern, BlockSparsePattern):
        return
    heads = workload.num_heads if pattern.per_head_masks else 1
    alone = pattern.model_copy(update={"branches": None})
    for start, end in workload.sequences:
        if pattern.branches is None:
            yield MaskUse(alone, end - start, workload.causal, heads, None)
            continue
        for segment, rate in pattern.branches.branches:
            yield MaskUse(alone, rows_kept(min(segment, end - start), rate, 0), workload.causal, heads, rate)


def _plot(use: MaskUse, taken: set[str]) -> MaskPlot:
    """Raises ConfigError when a mask file does not fit any more."""
    pattern = use.pattern
    mask = block_mask(pattern, use.rows, use.causal, use.num_heads)
    stem = f"mask_{pattern.mask}_{use.rows}_rows_block_{pattern.block_size}"
    if pattern.mask != "custom":
        stem += f"_sparsity_{round(100 * pattern.sparsity)}"
    name = next(name for number in range(1, len(taken) + 2) if (name := _numbered(stem, number)) not in taken)
    return MaskPlot(
        name=name,
        title=_title(use, mask),
        blocks=mask.shape[-1],
        block_size=pattern.block_size,
        cells=_cells(mask[0], use.causal),
    )


def _numbered(stem: str, number: int) -> str:
    return stem if number == 1 else f"{stem}_{number}"


def _title(use: MaskUse, mask: "Mask") -> str:
    pattern = use.pattern
    reached = float(mask.sum()) / (mask.shape[0] * visible_blocks(mask.shape[-1], use.causal))
    asked = "from a file" if pattern.mask == "custom" else f"{1 - pattern.sparsity:.1%} asked"
    rows = f"{format_count(use.rows)} tokens" if use.rate is None else f"{use.rows} rows of a branch of rate {use.rate}"
    causal = ", causal" if use.causal else ""
    head = f", head 0 of {mask.shape[0]}" if mask.shape[0] > 1 else ""
    return f"{pattern.mask}, {rows}, block {pattern.block_size}{causal}{head}:\ndensity {asked}, {reached:.1%} reached"


def _cells(mask: "Mask", causal: bool) -> tuple[tuple[float | None, ...], ...]:
    """Shares of one head's mask; None right of the diagonal of a causal one."""
    shares = block_shares(mask, MAX_CELLS, MAX_CELLS).tolist()
    return tuple(
        tuple(None if causal and column > line else share for column, share in enumerate(row))
        for line, row in enumerate(shares)
    )

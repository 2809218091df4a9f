"""Memory of the block-sparse implementations: calls over lists of key blocks, and the lists themselves."""

from dataclasses import dataclass

from dilabench.patterns.block_sparse import BlockSparsePattern
from dilabench.patterns.dilated import rows_kept
from dilabench.predict.memory.calls import Call, branch_fractions
from dilabench.predict.memory.flexed import LIST_ITEM_BYTES, block_mask_bytes, dout_copy
from dilabench.predict.memory.kernels import FLASH3, FLEX, TILES, Kernel
from dilabench.predict.memory.sizes import FLOAT32_BYTES, FLOAT64_BYTES, INDEX_BYTES, MemoryPlan, Sizes
from dilabench.predict.memory.union import Passes, one_kernel, two_passes
from dilabench.record import Case
from dilabench.workload.spec import DTYPE_BYTES, Workload

# What the Triton kernels have tiles for (`kernels.row_layout`); other head dims are padded.
HEAD_DIMS = (16, 32, 64, 128, 256)
TILE = 64
# Lists by query and by key, and per own tile three spans and a place in the order.
LISTS = 2
SPAN_ITEMS = 4
# The mask of a block of queries: distances and what is hidden, with one comparison or as numbers.
MASK_BYTES = INDEX_BYTES + 2


def triton(case: Case, device: str, _kernel: Kernel | None) -> MemoryPlan | None:
    """`Implementation.memory` of Triton kernels over lists of tiles; on a CPU a flash call per block of queries."""
    workload, checkpointed = case.workload, case.optimizations.gradient_checkpointing
    pattern = BlockSparsePattern.match(workload.pattern)
    if pattern is None:
        return None
    seen = _Seen.of(workload, pattern)
    if device == "cpu":
        return _union(workload, QueryBlocks(workload, seen), seen.index_bytes(workload), checkpointed)
    return _union(workload, PaddedTiles(workload.head_dim), seen.tile_bytes(workload), checkpointed)


def flex(case: Case, device: str, _kernel: Kernel | None) -> MemoryPlan | None:
    """That of FlexAttention over a BlockMask."""
    workload, pattern = case.workload, BlockSparsePattern.match(case.workload.pattern)
    if pattern is None or device == "cpu":
        return None
    tables = block_mask_bytes(workload, _mask_heads(workload, pattern), pattern.block_size)
    # It gives lse, too, so that autograd makes zeros as the gradient of one that nobody uses.
    checkpointed = case.optimizations.gradient_checkpointing
    return one_kernel(workload, FLEX.stats + 1, checkpointed, tables=tables, copied=dout_copy(workload))


def flash4(case: Case, device: str, _kernel: Kernel | None) -> MemoryPlan | None:
    """That of FlashAttention 4 over lists of blocks. Derived, not yet measured on a GPU."""
    workload, pattern = case.workload, BlockSparsePattern.match(case.workload.pattern)
    if pattern is None or device == "cpu":
        return None
    blocks = -(-workload.seq_len // pattern.block_size)
    keys = _Seen.of(workload, pattern).keys_of(workload.seq_len)
    tables = LISTS * LIST_ITEM_BYTES * _mask_heads(workload, pattern) * blocks * keys // pattern.block_size
    sizes = Sizes.of(workload)
    backward = sizes.gradients + FLASH3.accumulators * sizes.q_float32 + FLASH3.stats * sizes.rows_float32
    again = case.optimizations.gradient_checkpointing
    return two_passes(workload, sizes.result, backward, tables=tables, again=again)


def _mask_heads(workload: Workload, pattern: BlockSparsePattern) -> int:
    return workload.num_heads if pattern.per_head_masks else 1


def density(workload: Workload, pattern: BlockSparsePattern) -> float:
    """The share of visible blocks that is computed: as asked for, or as a mask file has it."""
    return 1.0 - (pattern.sparsity_of(workload.shapes) if pattern.mask == "custom" else pattern.sparsity)


def _union(workload: Workload, kernel: Kernel, tables: int, checkpointed: bool) -> MemoryPlan:
    return Passes.of(workload, kernel, gathered=False).plan(checkpointed, tables)


@dataclass(frozen=True, slots=True)
class _Seen:
    """How much of the keys a block of queries sees, and how the lists that say so lie in memory."""

    pattern: BlockSparsePattern
    share: float
    causal: bool

    @classmethod
    def of(cls, workload: Workload, pattern: BlockSparsePattern) -> "_Seen":
        """The share asked for, or what a mask file has."""
        return cls(pattern, density(workload, pattern), workload.causal)

    @property
    def scattered(self) -> bool:
        """The blocks of a row are no neighbours: their keys are found by index and copied."""
        return self.pattern.mask != "local_window"

    def keys_of(self, rows: int) -> int:
        """Keys that the last block of queries sees, which sees the most."""
        blocks = -(-rows // self.pattern.block_size)
        return min(rows, max(1, round(self.share * blocks)) * self.pattern.block_size)

    def index_bytes(self, workload: Workload) -> int:
        """Index tensors of the keys of every block of queries, where they are scattered."""
        if not self.scattered:
            return 0
        keys = sum(blocks * self.pattern.block_size for blocks, _ in self._blocks(workload))
        return round(keys * INDEX_BYTES)

    def tile_bytes(self, workload: Workload) -> int:
        """Lists of tiles by query and by key, for all heads or each of them."""
        tile = min(TILE, self.pattern.block_size & -self.pattern.block_size)
        per_block = (self.pattern.block_size // tile) ** 2
        items = sum(blocks * per_block + SPAN_ITEMS * -(-rows // tile) for blocks, rows in self._blocks(workload))
        return round(LISTS * LIST_ITEM_BYTES * items)

    def _blocks(self, workload: Workload) -> list[tuple[float, int]]:
        """(blocks seen, rows) of every mask: one per branch, and per head where heads differ."""
        heads = workload.num_heads if self.pattern.per_head_masks else 1
        found = []
        for _, (segment, rate) in branch_fractions(workload):
            rows = rows_kept(segment, rate, 0)
            blocks = -(-rows // self.pattern.block_size)
            visible = blocks * (blocks + 1) / 2 if self.causal else float(blocks**2)
            found.append((heads * max(blocks, self.share * visible), heads * rows))
        return found


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """`kernels.Kernel` of the CPU path: torch's flash kernel once per block of queries, over copies of its keys."""

    workload: Workload
    seen: _Seen

    def forward(self, call: Call) -> float:
        """Keys and results of this block and the one before; its mask."""
        block = self._block(call)
        before = block if call.rows > self.seen.pattern.block_size else _NOTHING
        moments = (
            before.keys + before.result + before.mask + block.making_mask,
            before.keys + block.keys + before.result + block.mask,
            block.keys + before.result + block.result + block.mask,
        )
        return max(moments)

    def backward(self, call: Call) -> float:
        """The gradients, those of k and v in float32, and a block's share of them beside the one before."""
        block, sizes = self._block(call), call.sizes
        before = block if call.rows > self.seen.pattern.block_size else _NOTHING
        # dk and dv are summed in float32 at least, and cast at the end.
        wide = 2 * sizes.kv * max(1.0, sizes.q_float32 / sizes.q)
        moments = (
            before.keys + before.gradients + before.mask + block.making_mask,
            before.keys + block.keys + before.gradients + block.mask,
            block.keys + before.gradients + block.gradients + block.mask,
            block.keys + block.gradients + block.added + block.mask,
            2 * sizes.kv if wide > 2 * sizes.kv else 0.0,
        )
        return sizes.q + wide + sizes.lse + max(moments)

    def _block(self, call: Call) -> "_BlockBytes":
        pattern, workload = self.seen.pattern, self.workload
        item = DTYPE_BYTES[workload.dtype]
        wide_item = FLOAT64_BYTES if workload.dtype == "float64" else FLOAT32_BYTES
        heads, kv_heads = (1, 1) if pattern.per_head_masks else (call.heads, call.kv_heads)
        rows, keys = min(pattern.block_size, call.rows), self.seen.keys_of(call.rows)
        per_key = call.batch * workload.head_dim * keys
        repeated = float(per_key * heads * item)
        copied = 0.0
        if heads > kv_heads:
            copied = 2 * repeated
        elif self.seen.scattered:
            copied = 2.0 * per_key * kv_heads * item
        masked = workload.causal or workload.window != (-1, -1)
        result = call.batch * heads * rows * (workload.head_dim * item + wide_item)
        return _BlockBytes(
            keys=copied,
            result=float(result),
            gradients=call.batch * heads * rows * workload.head_dim * item + 2 * repeated,
            added=float(per_key * kv_heads * wide_item),
            mask=float(rows * keys * item) if masked else 0.0,
            making_mask=float(rows * keys * (MASK_BYTES + item)) if masked else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockBytes:
    """Bytes of one block of queries: copies of its keys and values, out and lse, its gradients, their sum, its mask."""

    keys: float
    result: float
    gradients: float
    added: float
    mask: float
    making_mask: float


_NOTHING = _BlockBytes(keys=0.0, result=0.0, gradients=0.0, added=0.0, mask=0.0, making_mask=0.0)


@dataclass(frozen=True, slots=True)
class PaddedTiles:
    """`kernels.Kernel` of the Triton kernels, which pad head dims that they have no tiles for."""

    head_dim: int

    def forward(self, call: Call) -> float:
        """Padded operands and a padded out."""
        return self._padded * (call.sizes.gradients + call.sizes.q)

    def backward(self, call: Call) -> float:
        """The gradients and two values per row; padded operands and padded gradients."""
        sizes = call.sizes
        return TILES.backward(call) + self._padded * (2 * sizes.gradients + 2 * sizes.q)

    @property
    def _padded(self) -> float:
        """Size of a padded tensor in parts of its own; 0 where nothing is padded."""
        padded = next((size for size in HEAD_DIMS if size >= self.head_dim), self.head_dim)
        return padded / self.head_dim if padded > self.head_dim else 0.0

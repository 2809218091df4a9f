"""What the backend `math` allocates: blocks of scores of a bounded size, and copies of the rows that they come from."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple, Self

from dilabench.predict.memory.calls import Call
from dilabench.predict.memory.sizes import FLOAT32_BYTES, FLOAT64_BYTES, INDEX_BYTES
from dilabench.workload.spec import DTYPE_BYTES, Window, Workload

# `backends.math` cuts its blocks of scores to these sizes; a test holds the two together.
BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
# The mask of a block of scores: distances, what is hidden, and one comparison.
MASK_BYTES = INDEX_BYTES + 2


@dataclass(frozen=True, slots=True)
class MathMemory:
    """`kernels.Kernel` of blocked attention in plain PyTorch; half precision is computed in float32."""

    aligns_ends: ClassVar[bool] = True
    places_results: ClassVar[bool] = True
    block_bytes: int
    head_dim: int
    window: Window
    item: int
    compute: int

    @classmethod
    def on(cls, device: str, workload: Workload) -> Self:
        """For the calls of a workload."""
        left, right = workload.window
        compute = FLOAT64_BYTES if workload.dtype == "float64" else FLOAT32_BYTES
        window = (left, 0 if workload.causal else right)
        return cls(BLOCK_BYTES[device], workload.head_dim, window, DTYPE_BYTES[workload.dtype], compute)

    def forward(self, call: Call) -> float:
        """Scores of this block and the one before, their exponentials, and what is copied for the products."""
        block = _Block.of(self, call)
        # What the loop has bound stays until the next block has been made.
        moments = [block.next_keys + block.turns[-1].before]
        for turn in block.turns:
            bound = turn.before + turn.scores
            moments += (
                bound + block.scaled_queries + block.copied_keys,
                bound + max(block.mask, turn.scores),
                turn.scores + 1.5 * block.queries + block.copied_keys,
            )
        return block.cast_keys + max(moments)

    def backward(self, call: Call) -> float:
        """The gradients, with dk and dv in the dtype of the sums; scores, probabilities and what becomes of them."""
        block = _Block.of(self, call)
        rows, copied = block.cast_rows, block.copied_rows
        moments = [2 * block.keys + 2 * block.turns[-1].before if block.several_batches else 0.0]
        for turn in block.turns:
            bound = 2 * turn.before + turn.scores
            moments += (
                bound + block.scaled_queries + block.copied_keys,
                bound + block.mask,
                bound + block.keys + copied,
                bound + turn.scores + block.copied_keys + copied,
                2 * turn.scores + block.keys + copied,
                2 * turn.scores + block.copied_keys + 1.5 * block.queries,
            )
        return call.sizes.gradients + 2 * block.keys + block.cast_keys + rows + max(moments)


class _Turn(NamedTuple):
    """Bytes of the scores of one block and of the block before it."""

    before: float
    scores: float


def math_memory(workload: Workload, device: str) -> MathMemory:
    """`Backend.memory` of `math`."""
    return MathMemory.on(device, workload)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Bytes of the blocks of a call: turns of scores, the largest query rows and mask, all keys of a batch range.

    cast_keys, cast_rows: copies in float32 that stay for the block. copied_keys, copied_rows, scaled_queries: copies
    that one matrix product needs, because its operands do not lie in order.
    """

    turns: tuple[_Turn, ...]
    mask: float
    queries: float
    scaled_queries: float
    keys: float
    cast_keys: float
    next_keys: float
    cast_rows: float
    copied_keys: float
    copied_rows: float
    several_batches: bool

    @classmethod
    def of(cls, math: MathMemory, call: Call) -> Self:
        """As `backends.math` cuts a call."""
        compute, length = math.compute, call.key_rows
        fitting = max(1, math.block_bytes // (compute * call.heads * length))
        batches = min(call.batch, max(1, fitting // call.rows))
        rows = min(fitting, call.rows)
        queries = float(compute * batches * call.heads * rows * math.head_dim)
        keys = float(compute * batches * call.kv_heads * length * math.head_dim)
        cast, several = math.item < compute, call.batch > batches
        apart = batches > 1 and call.kv_heads > 1
        regroups = apart or call.heads > call.kv_heads
        window = tuple(side if side < 0 else side // call.rate for side in math.window) if call.masked else (-1, -1)
        per_pair = float(compute * call.heads)
        if rows < call.rows:
            pairs = [batches * size for size in _pairs_of_rows(window, rows, call)]
        else:
            pairs = [size * rows * length for size in _batch_ranges(call.batch, batches)]
        return cls(
            turns=tuple(_Turn(per_pair * one, per_pair * next_one) for one, next_one in pairwise([0, *pairs])),
            mask=float(MASK_BYTES * max(pairs) / batches) if window != (-1, -1) else 0.0,
            queries=queries,
            scaled_queries=queries * (2 if regroups or cast else 1),
            keys=keys,
            cast_keys=2 * keys if cast else 0.0,
            next_keys=2 * keys if cast and several else 0.0,
            cast_rows=2 * queries if cast else 0.0,
            copied_keys=keys if apart and not cast else 0.0,
            copied_rows=queries if regroups else 0.0,
            several_batches=several,
        )


def _batch_ranges(batch: int, batches: int) -> list[int]:
    """Batch items of the last ranges that a call is taken in."""
    full, rest = divmod(batch, batches)
    return [batches] * min(full, 2) + [rest] * (rest > 0)


def _pairs_of_rows(window: tuple[int, ...], rows: int, call: Call) -> list[int]:
    """(query, key) pairs of the last blocks of query rows, which see the most keys."""
    left, right = window
    found = []
    length, blocks = call.key_rows, -(-call.rows // rows)
    # The last query stands at the last key.
    ahead = length - call.rows
    for block in range(max(0, blocks - 3), blocks):
        start, stop = block * rows, min(call.rows, (block + 1) * rows)
        first = 0 if left < 0 else max(0, start + ahead - left)
        found.append((stop - start) * ((length if right < 0 else min(length, stop + ahead + right)) - first))
    return found

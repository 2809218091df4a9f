"""Memory of `reference`: everything in float64, blocks of explicit scores, index tensors of positions."""

from dataclasses import dataclass
from typing import Self

from dilabench.memory_plan.block_sparse import density
from dilabench.memory_plan.sizes import FLOAT64_BYTES, INDEX_BYTES, MemoryPlan, Sizes, inputs_of
from dilabench.spec import DTYPE_BYTES, BlockSparsePattern, Workload

# `impls.reference` holds so many scores at once, where one row has no more; a test holds the two together.
MAX_BLOCK_SCORES = 2**22


def reference(workload: Workload, device: str) -> MemoryPlan:
    """The plan of the formula in float64, exact or detached."""
    sizes, item = Sizes.of(workload), DTYPE_BYTES[workload.dtype]
    wide = FLOAT64_BYTES / item
    out, keys = wide * sizes.q, wide * sizes.kv
    rows = workload.tokens * workload.num_heads * FLOAT64_BYTES
    block = _Scores.of(workload, device)
    narrow_result = sizes.q if wide > 1 else 0.0
    inputs = inputs_of(workload, sizes)
    forward = out + rows + max(block.forward, narrow_result)
    if workload.mode == "forward":
        return MemoryPlan(inputs_bytes=inputs, workspace_bytes=round(forward))
    # dout in float64 and its rows; dq, dk and dv of the rows; at the end dq of all rows, and all in the inputs' dtype.
    gradients = out + 2 * keys
    wide_dout = out if wide > 1 else 0.0
    casts = sizes.gradients if wide > 1 else 0.0
    backward = wide_dout + out + gradients + max(block.backward, out + casts)
    saved = out + rows
    return MemoryPlan(
        inputs_bytes=inputs,
        saved_bytes=round(saved),
        workspace_bytes=round(max(forward - saved, narrow_result + backward)),
    )


@dataclass(frozen=True, slots=True)
class _Scores:
    """Bytes around the largest block of scores [batch, rows, keys], forward and backward."""

    forward: float
    backward: float

    @classmethod
    def of(cls, workload: Workload, device: str) -> Self:
        """Scores of this block and the block before; what hides pairs; a head's keys in float64."""
        rows, keys = _largest_block(workload)
        rows_at_once = min(rows, max(1, MAX_BLOCK_SCORES // (workload.batch_size * keys)))
        scores = float(workload.batch_size * rows_at_once * keys * FLOAT64_BYTES)
        alone = rows_at_once == workload.seq_len and workload.num_heads == 1
        before = 0.0 if alone else scores
        if rows > rows_at_once and workload.causal:
            # The last block of rows sees all keys, the one before it a block's rows fewer.
            before = scores * (1 - rows_at_once / keys)
        pairs = rows_at_once * keys
        # On CUDA the distances between positions stay on the host.
        hiding = (INDEX_BYTES + 2) * pairs if device == "cpu" else pairs
        taken = workload.batch_size * keys * workload.head_dim * (FLOAT64_BYTES + DTYPE_BYTES[workload.dtype])
        forward = max(
            before + pairs + hiding,
            before + 2 * scores + pairs,
            before + scores + pairs + taken,
        )
        detached = workload.dilated is not None and workload.dilated.merge_grad == "detached"
        matrices = 7 if detached else 4
        backward = max(
            2 * before + pairs + hiding,
            2 * before + scores + pairs + taken,
            2 * before + matrices * scores + pairs,
        )
        return cls(forward, backward)


def _largest_block(workload: Workload) -> tuple[int, int]:
    """Rows that share their keys, and how many those are, where their product is largest."""
    pattern, length = workload.pattern, workload.seq_len
    if isinstance(pattern, BlockSparsePattern) and pattern.branches is None:
        blocks = -(-length // pattern.block_size)
        seen = max(1, round(density(workload, pattern) * blocks))
        return min(length, pattern.block_size), min(length, seen * pattern.block_size)
    if workload.dilated is None:
        return length, length
    branches = sorted((rate, min(segment, length)) for segment, rate in workload.dilated.branches)
    found = []
    keys = reach = 0
    for index, (rate, segment) in enumerate(branches):
        # Branches of rising rates and lengths: each adds the keys beyond the one before it.
        keys += max(0, segment - reach) // rate
        reach = max(reach, segment)
        following = branches[index + 1][0] if index + 1 < len(branches) else None
        rows = branches[0][1] / rate - (branches[0][1] / following if following else 0)
        found.append((max(1, round(rows)), max(1, keys)))
    return max(found, key=lambda block: block[0] * block[1])

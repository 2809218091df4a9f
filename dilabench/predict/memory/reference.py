"""Memory of `reference`: everything in float64, blocks of explicit scores, index tensors of positions."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from dilabench.patterns.block_sparse import BlockSparsePattern
from dilabench.predict.memory.block_sparse import density
from dilabench.predict.memory.sizes import FLOAT64_BYTES, INDEX_BYTES, MemoryPlan, Sizes, branches_under, inputs_of
from dilabench.workload.spec import DTYPE_BYTES, Workload

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
        """Scores of a block and the one before; what hides pairs; a head's keys in float64."""
        item = workload.batch_size * FLOAT64_BYTES
        rows, keys = _largest_group(workload)
        taken = workload.batch_size * keys * workload.head_dim * (FLOAT64_BYTES + DTYPE_BYTES[workload.dtype])
        detached = workload.pattern.is_detached
        matrices = 7 if detached else 4
        forward = backward = 0.0
        for earlier, pairs in _turns(workload, rows, keys):
            before, scores = float(item * earlier), float(item * pairs)
            # On CUDA the distances between positions stay on the host.
            hiding = (INDEX_BYTES + 2) * pairs if device == "cpu" else pairs
            forward = max(
                forward,
                before + earlier + hiding,
                before + 2 * scores + pairs,
                before + scores + pairs + taken,
            )
            backward = max(
                backward,
                2 * before + earlier + hiding,
                2 * before + scores + pairs + taken,
                2 * before + matrices * scores + pairs,
            )
        return cls(forward, backward)


def _turns(workload: Workload, rows: int, keys: int) -> list[tuple[int, int]]:
    """(Query, key) pairs of the block before and of this one, where the most are held."""
    at_once = min(rows, max(1, MAX_BLOCK_SCORES // (workload.batch_size * keys)))
    if rows < workload.seq_len:
        # Other groups of rows come before.
        return [(at_once * keys, at_once * keys)]
    blocks = -(-rows // at_once)
    left, right = workload.window[0], 0 if workload.causal else workload.window[1]
    pairs = []
    for block in range(max(0, blocks - 3), blocks):
        start, stop = block * at_once, min(rows, (block + 1) * at_once)
        first = 0 if left < 0 else max(0, start - left)
        pairs.append((stop - start) * ((keys if right < 0 else min(keys, stop + right)) - first))
    before = pairs[-1] if workload.num_heads > 1 else 0
    return list(pairwise([before, *pairs]))


def _largest_group(workload: Workload) -> tuple[int, int]:
    """Rows that share their keys, and how many those are, where their product is largest."""
    pattern, length = BlockSparsePattern.match(workload.pattern), workload.seq_len
    if pattern is not None and pattern.branches is None:
        blocks = -(-length // pattern.block_size)
        seen = max(1, round(density(workload, pattern) * blocks))
        return min(length, pattern.block_size), min(length, seen * pattern.block_size)
    dilated = branches_under(workload)
    if dilated is None:
        return length, length
    branches = sorted((rate, min(segment, length)) for segment, rate in dilated.branches)
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

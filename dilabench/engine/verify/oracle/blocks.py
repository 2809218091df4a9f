"""C[h, i, j] of a workload (semantics.md §1) as tensors: blocks of rows of a head and the keys that they may see.

C is never built whole: a row costs only its keys, so one row of a million-token workload is cheap. The rows are the
same for all batch items and heads, or a single one of each batch item (`SingleRows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilabench.patterns.answers import Positions
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import alike_heads, key_groups

# Largest number of scores per matrix: 32 MiB in float64; about four such matrices are alive at a time.
MAX_BLOCK_SCORES = 2**22
# Limit of heads times rows times positions up to which blocks are cached: megabytes at most.
FEW_PAIRS = 2**22
# Groups of fewer rows are joined, this many at a time: each would cost a round of small operations.
FEW_ROWS, JOINED_GROUPS = 8, 64
# Groups with as many keys are not joined.
MANY_KEYS = 2**16
# Heads with the same keys, and single rows, are computed together, up to this many scores, or values of keys. The
# host's caches hold 8 MiB of float64: 128 MiB took twice as long. Elsewhere each operator costs a launch.
HOST_VALUES, DEVICE_VALUES = 2**20, 2**24

_cached: ContextVar[Callable[..., tuple[Block, ...]] | None] = ContextVar("cached", default=None)
_only: ContextVar[Sequence[int] | None] = ContextVar("only", default=None)


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of some heads, and the keys that any of them may see. `rows`: indices of their queries; `index`: of the
    rows in the sample; `heads`: of q; `kv_heads`: of k and v, each for as many of `heads`, in the same order.

    items: the batch items, None for all. G rows of a key head are those of all its heads in the block: tensors of the
    block have the shape [B, K', G, ·].

    given: [parts, M] bool, whether each part of the pattern gives each key. log_counts: [M] float64, log of the number
    of parts that do. seen: [G, M] bool. C is that number where a row sees the key, else 0. begin: the first key if
    they are consecutive, so that they are read in place. If items have different keys, keys are [B, M], and the other
    three have axes [B, 1, 1, M] in place of [M] and [G, M].
    """

    heads: range
    kv_heads: range
    index: Tensor
    rows: Tensor
    keys: Tensor
    given: Tensor
    log_counts: Tensor
    seen: Tensor
    begin: int | None = None
    items: Tensor | None = None

    def gather(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """The block's rows of x [B, R, H, ...], by default of sampled rows: [B, K', G, ...]."""
        x = x if self.items is None else x[self.items]
        found = x[:, self.index if rows is None else rows, _slice(self.heads)].transpose(1, 2)
        return found.reshape(found.shape[0], len(self.kv_heads), -1, *found.shape[3:])

    def scatter(self, x: Tensor, values: Tensor) -> None:
        """Write what `gather` reads."""
        rows = values.reshape(values.shape[0], len(self.heads), -1, *values.shape[3:])
        items = slice(None) if self.items is None else self.items[:, None]
        x[items, self.index, _slice(self.heads)] = rows.transpose(1, 2)

    def masses(self, zeros: Tensor) -> Tensor:
        """The block's part of `zero_keys`, [B or 1, parts, K', G]."""
        zeros = zeros if self.items is None else zeros[self.items]
        found = zeros[:, :, _slice(self.heads)][..., self.index]
        return found.reshape(*found.shape[:2], len(self.kv_heads), -1)

    def add_keys(self, x: Tensor, slots: Tensor, values: Tensor) -> None:
        """Add values [B, K', S', D] to x [B, S, K, D] at `slots`, all different."""
        x[:, slots, _slice(self.kv_heads)] += values.transpose(1, 2)

    def take(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of the block's keys of k or v, [B, K', M, D]."""
        if self.keys.ndim > 1:
            items = torch.arange(len(self.keys), device=x.device) if self.items is None else self.items
            return x[items[:, None], self.keys].transpose(1, 2).to(dtype)
        x = x if self.items is None else x[self.items]
        # Over ranks only the rows of some keys are known.
        if self.begin is not None and isinstance(x, Tensor):
            found = x[:, self.begin : self.begin + len(self.keys), _slice(self.kv_heads)]
            return found.transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format)
        return x[:, self.keys, _slice(self.kv_heads)].transpose(1, 2).to(dtype)

    def paired(self, q: Tensor, k: Tensor, workload: Workload, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The block's queries [B, K', G, D], times the scale of the softmax, and its keys [B, K', M, D]."""
        return self.gather(q, self.rows).to(dtype) * workload.softmax_scale, self.take(k, dtype)

    def scores(self, queries: Tensor, keys: Tensor, softcap: float | None = None) -> Tensor:
        """queries·keys + log C, [B, K', G, M], in the accumulation dtype; -inf if a row does not see the key.

        softcap: products s become softcap · tanh(s / softcap).
        """
        scores = queries @ keys.mT
        bias = self.log_counts.to(accumulation_dtype(scores.dtype))
        scores = scores.to(bias.dtype)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        return scores.add_(bias).masked_fill_(~self.seen, -torch.inf)

    def slopes(self, queries: Tensor, keys: Tensor, softcap: float) -> Tensor:
        """The derivative of `scores` by queries·keys, 1 - tanh²."""
        scores = queries @ keys.mT
        return 1 - (scores.to(accumulation_dtype(scores.dtype)) / softcap).tanh_().square_()

    def branches(self, dtype: torch.dtype) -> Tensor:
        """[parts, M]: the share of each key's weight that each part has; the parts that give a key share it equally."""
        return self.given.to(dtype) / self.given.sum(0)


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)


def values_together(device: torch.device) -> int:
    """How many values of keys are computed together."""
    return HOST_VALUES if device.type == "cpu" else DEVICE_VALUES


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class SingleRows:
    """One row of one head of each batch item. Tensors over them have one row and one head: q is [B, 1, 1, D], k and v
    are [B, N, 1, D], the key head of each item's head.

    rows: indices of queries. heads: of q.
    """

    rows: tuple[int, ...]
    heads: tuple[int, ...]

    def __len__(self) -> int:
        """The number of rows of an item."""
        return 1

    def gates(self, gates: Tensor, first_row: int) -> Tensor:
        """The items' of `gates` [N, H], [B, 1, 1, 1]."""
        return gates[[row + first_row for row in self.rows], list(self.heads)][:, None, None, None]


RowsOf = Tensor | SingleRows


def blocks(workload: Workload, rows: RowsOf, q: Tensor) -> Iterable[Block]:
    """Blocks that cover every (row, head) with a key once. rows: [R] int64 on the CPU, ascending, indices of queries.

    Each has at most MAX_BLOCK_SCORES scores, unless one row alone has more.
    """
    if isinstance(rows, SingleRows):
        return _blocks_of_single(workload, rows, q.device)
    cached = _cached.get()
    heads = workload.num_heads if _only.get() is None else 1
    if cached is None or not 0 < heads * len(rows) * workload.seq_len <= FEW_PAIRS:
        return _blocks(workload, rows, q.shape[0], q.device)
    return cached(workload, rows.numpy().tobytes(), q.shape[0], q.device)


@contextmanager
def only_heads(heads: Sequence[int]) -> Iterator[None]:
    """Skip the blocks of all other heads inside the context: results are right only for these heads."""
    token = _only.set(heads)
    try:
        with blocks_cached():
            yield
    finally:
        _only.reset(token)


@contextmanager
def blocks_cached() -> Iterator[None]:
    """Cache the blocks of small workloads inside the context: finding them takes longer than using them."""

    @lru_cache(maxsize=4)
    def cached(workload: Workload, rows: bytes, batch: int, device: torch.device) -> tuple[Block, ...]:
        return tuple(_blocks(workload, torch.frombuffer(bytearray(rows), dtype=torch.int64), batch, device))

    token = _cached.set(cached)
    try:
        yield
    finally:
        _cached.reset(token)


def zero_keys(workload: Workload, rows: RowsOf, device: torch.device) -> Tensor | None:
    """[1, parts, H, R] float64: how many zero keys each part of the pattern adds to each row; None for none at all. Of
    single rows [B, parts, 1, 1].

    rows: [R] int64 on the CPU, ascending, indices of queries.
    """
    heads = range(workload.num_heads) if isinstance(rows, Tensor) else dict.fromkeys(rows.heads)
    added = [
        (head, start, zeros)
        for (start, _), shape in zip(workload.sequences, workload.shapes, strict=True)
        for head in heads
        for zeros in workload.pattern.zero_keys(shape, head)
    ]
    if not added:
        return None
    if isinstance(rows, SingleRows):
        of_item = torch.zeros(len(rows.rows), workload.pattern.parts, dtype=torch.float64)
        for item, (row, item_head) in enumerate(zip(rows.rows, rows.heads, strict=True)):
            for head, start, zeros in added:
                if head == item_head and row + workload.first_row - start in zeros.rows:
                    of_item[item, zeros.part] += zeros.count
        return of_item[..., None, None].to(device)
    counts = torch.zeros(workload.pattern.parts, workload.num_heads, len(rows), dtype=torch.float64)
    for head, start, zeros in added:
        place = rows + (workload.first_row - start)
        sees = (place >= zeros.rows.start) & (place < zeros.rows.stop)
        sees &= (place - zeros.rows.start) % zeros.rows.step == 0
        counts[zeros.part, head, sees] += zeros.count
    return counts[None].to(device)


class _Group(NamedTuple):
    """Rows of a head with the same keys. `own` [R, M] bool: the keys that each row has, None if all have all. begin:
    the first key if they are consecutive.
    """

    rows: Tensor
    keys: Tensor
    given: Tensor
    own: Tensor | None = None
    begin: int | None = None


def _blocks(workload: Workload, rows: Tensor, batch: int, device: torch.device) -> Iterator[Block]:
    left, right = workload.shapes[0].reach
    only, width = _only.get(), max(workload.head_dim, workload.value_width)
    for alike in alike_heads(workload):
        heads = alike if only is None else [head for head in alike if head in only]
        # Heads with one selection share its keys, because finding them may take longer than attention.
        for group in _groups(workload, alike[0], rows + workload.first_row, device) if heads else ():
            height = max(1, MAX_BLOCK_SCORES // max(1, batch * len(group.keys)))
            log_counts = group.given.sum(0).double().log_()
            for first in range(0, len(group.rows), height):
                part = slice(first, first + height)
                positions = group.rows[part]
                reached = slice(
                    0 if left is None else int(torch.searchsorted(group.keys, int(positions[0]) - left)),
                    len(group.keys)
                    if right is None
                    else int(torch.searchsorted(group.keys, int(positions[-1]) + right, right=True)),
                )
                keys = group.keys[reached]
                if not len(keys):
                    continue
                here = positions.to(device)
                seen = torch.ones(len(here), len(keys), dtype=torch.bool, device=device)
                # Bounds are moved by rows, not pairs: a matrix of distances would be as large as the scores.
                if left is not None:
                    seen &= keys >= (here - left)[:, None]
                if right is not None:
                    seen &= keys <= (here + right)[:, None]
                if group.own is not None:
                    seen &= group.own[part, reached]
                index = torch.searchsorted(rows, positions - workload.first_row).to(device)
                queries = here - workload.first_row
                begin = None if group.begin is None else group.begin + reached.start
                given, counts = group.given[:, reached], log_counts[reached]
                values = batch * len(keys) * max(len(here), -(-width // workload.group_size))
                for of_q, of_k in _joined_heads(heads, workload.group_size, max(1, values_together(device) // values)):
                    of_rows = seen.repeat(len(of_q) // len(of_k), 1)
                    yield Block(of_q, of_k, index, queries, keys, given, counts, of_rows, begin)


def _blocks_of_single(workload: Workload, rows: SingleRows, device: torch.device) -> Iterator[Block]:
    """A block for all rows whose keys have equally many parts."""
    found: dict[tuple[int, int], tuple[range | Positions, ...]] = {}
    for place in zip(rows.rows, rows.heads, strict=True):
        if place not in found:
            found[place] = _keys_of_row(workload, *place)
    by_parts: dict[int, list[int]] = {}
    for item, place in enumerate(zip(rows.rows, rows.heads, strict=True)):
        if any(map(len, found[place])):
            by_parts.setdefault(len(found[place]), []).append(item)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    for members in by_parts.values():
        of_items = [found[rows.rows[item], rows.heads[item]] for item in members]
        items = None if len(members) == len(rows.rows) else torch.tensor(members, device=device)
        yield Block(range(1), range(1), first, first, *_key_table(of_items, device), items=items)


def _keys_of_row(workload: Workload, row: int, head: int) -> tuple[range | Positions, ...]:
    """The keys that each part gives a row, under causal mask and window; positions along the N axis."""
    position = row + workload.first_row
    at = next(index for index, (_, end) in enumerate(workload.sequences) if position < end)
    start, shape = workload.sequences[at][0], workload.shapes[at]
    place = np.array([position - start])
    (low,), (high,) = shape.bounds(place)
    parts: list[range | Positions] = []
    for group in workload.pattern.counts(shape, head, place):
        for part in group.parts:
            if isinstance(part, range) and part.step == 1:
                kept: range | Positions = range(start + max(part.start, int(low)), start + min(part.stop, int(high)))
            else:
                keys = np.asarray(part, np.int64)
                kept = keys[keys.searchsorted(low) : keys.searchsorted(high)] + start
            parts.append(kept)
    return tuple(parts)


def _key_table(
    rows: Sequence[tuple[range | Positions, ...]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, int | None]:
    """keys, given, log_counts, seen and begin of a `Block`, from the keys of each part of each item's row."""
    if all(len(parts) == 1 and isinstance(parts[0], range) for parts in rows):
        begins, lengths = [parts[0][0] if len(parts[0]) else 0 for parts in rows], [len(parts[0]) for parts in rows]
        steps = torch.arange(max(lengths), device=device)
        given = torch.ones(1, len(steps), dtype=torch.bool, device=device)
        counts = torch.zeros(len(steps), dtype=torch.float64, device=device)
        if len({*zip(begins, lengths, strict=True)}) == 1:
            return steps + begins[0], given, counts, given, begins[0]
        first, number = torch.tensor([begins, lengths], device=device)[..., None]
        seen = (steps < number)[:, None, None]
        return torch.where(seen[:, 0, 0], steps + first, first), given, counts, seen, None
    unions = [np.unique(np.concatenate([np.asarray(part, np.int64) for part in parts])) for parts in rows]
    longest = max(map(len, unions))
    keys, given_parts = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows[0]), len(rows), longest), bool)
    for item, (parts, union) in enumerate(zip(rows, unions, strict=True)):
        # Repeated keys fill up a row: the largest value of a block counts in sizes.
        keys[item, : len(union)], keys[item, len(union) :] = union, union[0]
        for number_of_part, part in enumerate(parts):
            given_parts[number_of_part, item, union.searchsorted(np.asarray(part, np.int64))] = True
    seen = torch.from_numpy(given_parts.any(0)).to(device)[:, None, None]
    # They have a count of 1, so that its logarithm is finite.
    given_parts[0] |= ~given_parts.any(0)
    given = torch.from_numpy(given_parts).to(device)[:, :, None, None]
    return torch.from_numpy(keys).to(device), given, given.sum(0).double().log_(), seen, None


def _joined_heads(heads: Sequence[int], group_size: int, most: int) -> Iterator[tuple[range, range]]:
    """Parts of at most `most` of the heads, evenly spaced, and their key heads, each for equally many of them."""
    first = 0
    while first < len(heads):
        part = heads[first : first + most]
        begin, step = part[0], part[1] - part[0] if len(part) > 1 else 1
        count = next((at for at, head in enumerate(part) if head != begin + at * step), len(part))
        if step == 1:
            # Whole groups of heads that share keys, or heads of one group.
            whole = 0 if begin % group_size else count // group_size * group_size
            count = whole or min(count, group_size - begin % group_size)
        elif step % group_size:
            count = 1
        last, key_step = begin + (count - 1) * step, max(1, step // group_size)
        yield range(begin, last + 1, step), range(begin // group_size, last // group_size + 1, key_step)
        first += count


def _groups(workload: Workload, head: int, positions: Tensor, device: torch.device) -> Iterator[_Group]:
    """Groups that cover the rows of a head, before causal mask and window; positions along the N axis."""
    small: list[tuple[Positions, Positions]] = []
    for start, group in key_groups(workload, head, positions.numpy()):
        if len(group.parts) == 1 and len(group.rows) < FEW_ROWS and len(group.parts[0]) < MANY_KEYS:
            small.append((group.rows + start, np.asarray(group.parts[0], np.int64) + start))
        else:
            keys, given = _union(group.parts, start, device)
            (part, *others), begin = group.parts, None
            if not others and isinstance(part, range) and part.step == 1:
                begin = start + part.start
            yield _Group(torch.from_numpy(group.rows + start), keys, given, begin=begin)
    for first in range(0, len(small), JOINED_GROUPS):
        yield _joined(small[first : first + JOINED_GROUPS], device)


def _union(parts: Sequence[range | Positions], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions that any part gives, ascending, [M], and which part gives which, [parts, M] bool.

    They are made on the device that uses them: a million positions on the CPU, and their copies, would take longer.
    """
    filled = [part for part in parts if len(part)]
    low = min((int(part[0]) for part in filled), default=0)
    high = max((int(part[-1]) + 1 for part in filled), default=0)
    given = torch.zeros(len(parts), high - low, dtype=torch.bool, device=device)
    for of_part, part in zip(given, parts, strict=True):
        if isinstance(part, range):
            of_part[part.start - low : part.stop - low : part.step] = bool(part)
        else:
            of_part[torch.from_numpy(part - low).to(device)] = True
    keys = given.any(0).nonzero()[:, 0]
    return keys + (low + start), given[:, keys]


def _joined(groups: Sequence[tuple[Positions, Positions]], device: torch.device) -> _Group:
    """Groups of rows and keys as one, over the union of their keys."""
    keys = np.unique(np.concatenate([keys for _, keys in groups]))
    rows = np.concatenate([rows for rows, _ in groups])
    own = np.zeros((len(rows), len(keys)), dtype=bool)
    first = 0
    for of_group, its_keys in groups:
        own[first : first + len(of_group), keys.searchsorted(its_keys)] = True
        first += len(of_group)
    order = np.argsort(rows)
    given = torch.ones(1, len(keys), dtype=torch.bool, device=device)
    owned = torch.from_numpy(own[order]).to(device)
    begin = int(keys[0]) if len(keys) and keys[-1] - keys[0] == len(keys) - 1 else None
    return _Group(torch.from_numpy(rows[order]), torch.from_numpy(keys).to(device), given, owned, begin)

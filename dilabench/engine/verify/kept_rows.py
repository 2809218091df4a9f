"""Rows of kept calls against the oracle: all rows of all calls in few operators, and one transfer to the host.

The inputs of a call have changed since. Each head is first put back as it was at the time (`Moment`), for as many rows
at a time as memory allows. Rows that a known tolerance refuses are compared again one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dilabench.engine.call.inputs import TORCH_DTYPE, Moment, earlier_heads
from dilabench.engine.call.kept_call import KeptCall, KeptRow
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import device_of
from dilabench.engine.verify.compare import compare
from dilabench.engine.verify.heads import NO_GRADIENT
from dilabench.engine.verify.oracle.blocks import SingleRows, blocks, only_heads, values_together
from dilabench.engine.verify.oracle.formula import attend_rows, attend_rows_backward
from dilabench.engine.verify.oracle.oracle import exact_rows, expected_rows
from dilabench.engine.verify.oracle.rounding import gradient_sizes
from dilabench.engine.verify.oracle.sums import is_sum
from dilabench.engine.verify.oracle.tolerance import (
    Expected,
    clamp_size_,
    eps,
    errors,
    expect,
    gradient_floor_ulps,
    plain_dtype,
)
from dilabench.record import Check, CheckName
from dilabench.workload.visibility import seen_by

# The least tolerance of dk and dv of a key, as of any gradient of few terms (tolerance.py).
KEY_ULPS = 6.0
# A row of out (and dq) of a kept call.
Place = tuple[KeptCall, KeptRow]


class Past:
    """The numbers of kept calls, whole heads of one batch item each; over ranks each is put together."""

    def __init__(self, call: PreparedCall) -> None:
        self.call, self.workload = call, call.workload
        self.device = device_of(call.device).verifies_on
        self.across = call.world if call.world is not None and not call.takes_whole else None

    def heads(
        self, index: int, places: Sequence[tuple[KeptCall, int, int]], rows: Sequence[int] | None = None
    ) -> Tensor:
        """[I, M, D] of q (0) or dout (3), [I, N, D] of k (1) or v (2), at (call, batch item, head); [I, 1, D] of one
        row of each.
        """
        local = rows if self.across is None else None
        wanted: list[tuple[tuple[KeptCall, int, int], int | None]]
        wanted = [*zip(places, [None] * len(places) if local is None else local, strict=True)]
        if index == 3:
            dout, timed = self._batched(self.call.output_gradient()), self.call.timed_calls
            found = torch.stack([timed.earlier_dout(dout, *place, row) for place, row in wanted])
        else:
            moments = []
            for (kept, batch, head), row in wanted:
                assert kept.count is not None
                tensor = self._batched(kept.inputs.distinct[index])
                moments.append(Moment(tensor, kept.inputs.changes, kept.count, batch, head, row))
            found = earlier_heads(index, moments)
        found = self._whole(found.to(self.device))
        return found if rows is None or local is not None else found[range(len(rows)), list(rows)][:, None]

    def _batched(self, tensor: Tensor) -> Tensor:
        return tensor if self.call.row_dim else tensor[None]

    def _whole(self, local: Tensor) -> Tensor:
        """The rows of all ranks of this rank's [I, n, D]."""
        if self.across is None:
            return local
        rows = torch.arange(self.workload.seq_len)
        index, own = (x.to(local.device) for x in self.call.shards.held(rows, self.across.rank))
        found = local.new_zeros(len(local), len(rows), local.shape[2])
        found[:, index] = local[:, own]
        # Each row is zero on all ranks but one, so that the sum of the bytes is the row.
        self.across.sum_in_place([found.view(torch.uint8)])
        return found

    def copied(self, copies: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Kept rows [I, D] on every rank; of other ranks' rows there is no copy."""
        rows = torch.stack([like if copy is None else copy for copy in copies])
        if self.across is not None:
            self.across.sum_in_place([rows.view(torch.uint8)])
        return rows.to(self.device)


def row_checks(past: Past, calls: Sequence[KeptCall], tolerances: Mapping[str, float]) -> Iterator[Check]:
    """Compare out, and dq if the call has a backward pass, at all kept rows with the oracle.

    The failed checks come in the order of the calls; of all rows that pass, the check is that of the largest error.
    """
    names = (CheckName.OUT,) if past.workload.mode == "forward" else (CheckName.OUT, CheckName.DQ)
    places: list[Place] = []
    for kept in calls:
        for row in kept.rows:
            if row.key:
                continue
            if past.across is None and (len(row.copies) < len(names) or None in row.copies):
                yield _no_gradient(kept)
            else:
                places.append((kept, row))
    if not places:
        return
    workload = past.workload
    values = workload.seq_len * max(workload.head_dim, workload.value_width)
    count = max(1, values_together(past.device) // values)
    known = [name for name in names if name in tolerances]
    # [3, I, D] of each name: the result, the right value and its size, to the host together.
    found: dict[CheckName, list[Tensor]] = {name: [] for name in known}
    for first in range(0, len(places) if known else 0, count):
        part = _OfRows(past, places[first : first + count])
        for name in known:
            right = part.within(name, tolerances[name])
            found[name].append(torch.stack([part.actual(name).double(), right.value, right.size]))
    doubtful: dict[CheckName, list[int]] = {name: list(range(len(places))) for name in names if name not in known}
    for name in known:
        actual, value, size = torch.cat(found[name], 1).cpu()
        largest = errors(actual, value, size).amax(-1)
        passed = largest <= tolerances[name]
        doubtful[name] = [at for at, is_within in enumerate(passed.tolist()) if not is_within]
        if len(doubtful[name]) < len(places):
            at = int(largest.where(passed, -1.0).argmax())
            right = Expected(value[at], size[at], tolerances[name])
            yield _compared(name, actual[at], right, *places[at], workload.first_row)
    for name in names:
        at_ranks = [doubtful[name]] if past.across is None else past.across.share(doubtful[name])
        # Ranks exchange the rows in one order, though their kernels may round otherwise.
        for at in sorted({at for of_rank in at_ranks for at in of_rank}):
            # The row may be one in which the plain computation is off by more than in the verified rows.
            single = _OfRows(past, [places[at]])
            plain = single.by_plain(name)
            # Few rows show too little of the plain computation's error.
            tolerance = max(plain.tolerance, tolerances.get(name, 2 * plain.tolerance))
            right = Expected(plain.value[0, 0, 0], plain.size[0, 0, 0], tolerance)
            yield _compared(name, single.actual(name)[0], right, *places[at], workload.first_row)


class _OfRows:
    """The right out and dq of some rows [I, 1, 1, D], from their inputs at the time."""

    def __init__(self, past: Past, places: Sequence[Place]) -> None:
        self._past, self._places, workload = past, places, past.workload
        of_q = [(kept, row.batch, row.head) for kept, row in places]
        of_keys = [(kept, batch, head // workload.group_size) for kept, batch, head in of_q]
        positions = [row.position for _, row in places]
        self._rows = SingleRows(tuple(positions), tuple(row.head for _, row in places))
        q = past.heads(0, of_q, positions)
        k, v = (past.heads(index, of_keys) for index in (1, 2))
        self._heads = q[:, :, None], k[:, :, None], v[:, :, None]
        self._dtype = TORCH_DTYPE[workload.dtype]
        self._exact = exact_rows(self._heads, workload, self._rows, self._dtype)
        self._no_keys = torch.zeros(0, dtype=torch.int64)
        if workload.mode != "forward":
            self._dout = past.heads(3, of_q, positions)[:, :, None]

    def actual(self, name: CheckName) -> Tensor:
        """The kept rows of out or dq, [I, D]."""
        index, workload = int(name == CheckName.DQ), self._past.workload
        copies = [row.copies[index] if index < len(row.copies) else None for _, row in self._places]
        like = self._places[0][0].inputs.q.new_zeros((workload.value_width, workload.head_dim)[index])
        return self._past.copied(copies, like)

    def within(self, name: CheckName, tolerance: float) -> Expected:
        """Value and size [I, D], with a known tolerance."""
        value, size = (self._exact.out, self._exact.size) if name == CheckName.OUT else self._exact_dq()
        clamp_size_(size, self._dtype, by_item=True)
        return Expected(value[:, 0, 0], size[:, 0, 0], tolerance)

    def by_plain(self, name: CheckName) -> Expected:
        """Value and size [1, 1, 1, D] of a single row, with the tolerance of the plain computation of this row."""
        workload, dtype = self._past.workload, plain_dtype(self._dtype)
        plain = attend_rows(*self._heads, workload, self._rows, dtype)
        if name == CheckName.OUT:
            return expected_rows(self._exact, workload, self._dtype, plain)[0]
        value, size = self._exact_dq()
        plain_dq, _, _ = attend_rows_backward(
            self._dout, *self._heads, *plain, workload, self._rows, self._no_keys, dtype
        )
        return expect(value, size, plain_dq, workload, self._dtype, gradient_floor_ulps(workload, self._dtype))

    def _exact_dq(self) -> tuple[Tensor, Tensor]:
        workload, out, lse = self._past.workload, self._exact.out, self._exact.lse
        exact = attend_rows_backward(self._dout, *self._heads, out, lse, workload, self._rows, self._no_keys)
        sizes = gradient_sizes(self._dout, *self._heads, lse, workload, self._rows, self._no_keys, exact)
        return exact[0], sizes[0]


def _no_gradient(kept: KeptCall) -> Check:
    text = f"of timed call {kept.number + 1}: {NO_GRADIENT}"
    return Check(name=CheckName.TIMED_GRADIENTS, passed=False, detail=text)


def _compared(
    name: CheckName, actual: Tensor, expected: Expected, kept: KeptCall, row: KeptRow, first_row: int
) -> Check:
    """The check of one head's row [D]. first_row: the position of the first query."""
    place, position = ("key", row.position) if row.key else ("position", row.position + first_row)
    axes = (("batch", torch.tensor([row.batch])), (place, torch.tensor([position])), ("dim", None))
    value, size = (x[None, None] for x in (expected.value, expected.size))
    of = f"of timed call {kept.number + 1}"
    check = compare(CheckName(f"timed_{name}"), actual[None, None], Expected(value, size, expected.tolerance), axes, of)
    return check if check.where is None else check.model_copy(update={"where": f"{check.where}, head {row.head}"})


def key_checks(past: Past, kept: KeptCall, row: KeptRow, tolerances: Mapping[str, float]) -> Iterator[Check]:
    """dk and dv of one key: sums over the rows that see it of the query heads that share it."""
    workload = past.workload
    widths = workload.head_dim, workload.value_width
    # Weights of single branches, and of single attentions, are not at hand.
    if is_sum(workload):
        return
    found = [torch.zeros(2, 2, max(widths), dtype=torch.float64, device=past.device)]
    k, v = (past.heads(index, [(kept, row.batch, row.head)])[0] for index in (1, 2))
    for head in range(row.head * workload.group_size, (row.head + 1) * workload.group_size):
        q, dout = (past.heads(index, [(kept, row.batch, head)])[0] for index in (0, 3))
        found.append(_gradients_of_key(past, row.position, head, (q, k, v), dout))
    sums = torch.stack(found).sum(0)
    for index, name in enumerate((CheckName.DK, CheckName.DV)):
        copy = row.copies[index] if index < len(row.copies) else None
        if copy is None and past.across is None:
            yield _no_gradient(kept)
            return
        actual = past.copied([copy], kept.inputs.k.new_zeros(widths[index]))[0]
        value, squares = sums[index, :, : widths[index]]
        if name == CheckName.DK and workload.pattern.is_detached:
            continue
        size = squares.sqrt().add_(value.abs()).clamp_min_(torch.finfo(actual.dtype).tiny)
        tolerance = KEY_ULPS * eps(actual.dtype)
        tolerance = max(tolerance, tolerances.get(name, 2 * tolerance))
        yield _compared(name, actual, Expected(value, size, tolerance), kept, row, workload.first_row)


def _gradients_of_key(
    past: Past, key_position: int, head: int, heads: tuple[Tensor, Tensor, Tensor], dout: Tensor
) -> Tensor:
    """A head's share of dk and dv at a key, [2, 2, max(D, Dv)], zeros behind the narrower: values, and squares of the
    sizes of their terms (rounding.py).

    One pass over the rows that see the key gives their lse and out; their weights at the key follow.
    """
    workload, wide = past.workload, torch.float64
    rows = torch.from_numpy(seen_by(workload, head, key_position) - workload.first_row)
    dim, value_dim = workload.head_dim, workload.value_width
    total = torch.zeros(2, 2, max(dim, value_dim), dtype=wide, device=past.device)
    if not len(rows):
        return total
    place = rows.to(past.device)
    # Views that repeat the one head for each head.
    numbers = workload.num_heads, workload.num_kv_heads, workload.num_kv_heads
    all_q, *all_kv = (x[None, :, None].expand(1, -1, number, -1) for x, number in zip(heads, numbers, strict=True))
    (q, dout), (k, v) = (x[place].to(wide) for x in (heads[0], dout)), heads[1:]
    counts = torch.zeros(len(rows), dtype=wide, device=past.device)
    with only_heads([head]):
        out, lse = (x[0] for x in attend_rows(all_q, all_kv[0], all_kv[1], workload, rows))
        for block in blocks(workload, rows, all_q):
            at = (block.keys == key_position).nonzero().flatten()
            if len(at):
                counts[block.index] = block.given[:, at[0]].sum() * block.seen[:, at[0]].to(wide)
    key, value = k[key_position].to(wide), v[key_position].to(wide)
    scores = q @ key * workload.softmax_scale
    slope = torch.ones_like(scores)
    if workload.softcap is not None:
        scores = workload.softcap * (scores / workload.softcap).tanh()
        slope = 1 - (scores / workload.softcap).square()
    share = (scores + counts.log() - lse[head]).exp()
    doubt = (q.square() @ key.square()).sqrt() * workload.softmax_scale + scores.abs()
    doubt = doubt.square().add_(1.0).sqrt_()
    mean = (dout * out[:, head]).sum(-1)
    # Terms of the mean over keys, each about as large as the terms of an average key.
    sizes = (dout.square() @ value.square()).sqrt() + (dout @ value).abs()
    sizes += 2 * (dout.square() @ v.to(wide).square().mean(0)).sqrt()
    smallest = torch.finfo(k.dtype).tiny if k.dtype == torch.float16 else 0.0
    score, weight = share * (dout @ value - mean) * workload.softmax_scale * slope, share * doubt
    score_size = (weight * sizes).clamp_min(smallest) * workload.softmax_scale
    total[0, 0, :dim], total[0, 1, :dim] = score @ q, score_size.square() @ q.square()
    total[1, 0, :value_dim] = share @ dout
    total[1, 1, :value_dim] = weight.clamp_min(smallest).square() @ dout.square()
    return total

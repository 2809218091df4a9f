"""The check of timed calls: rows of random calls, and the whole last call, on their own inputs.

For 8 to 16 random calls, the first included (timed_calls.py), two rows of out and dq are compared with the oracle: the
one whose query was changed just before the call, and a random one; batch items and head groups alternate. For some of
these calls, dk and dv of a key are compared, too, from all rows that see it.

Each call must leave its inputs unchanged. last_call.py has the checks of the last one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from dilabench.engine.call.kept_call import KeptCall, KeptRow
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import device_of
from dilabench.engine.verify.compare import agreement, compare
from dilabench.engine.verify.heads import NO_GRADIENT
from dilabench.engine.verify.last_call import expected_embeddings, last_checks
from dilabench.engine.verify.model_steps import kept_step_check
from dilabench.engine.verify.oracle.blocks import blocks, blocks_cached, only_heads
from dilabench.engine.verify.oracle.formula import attend_rows
from dilabench.engine.verify.oracle.in_place import InPlaceOracle
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.sample import Sample
from dilabench.engine.verify.oracle.sums import is_sum
from dilabench.engine.verify.oracle.tolerance import Expected, clamp_size_, eps
from dilabench.record import Check, CheckName, Verification
from dilabench.workload.visibility import seen_by

# dk and dv of a key take a pass over all rows that see it, and modules project all rows. At least LEAST_WHOLE calls are
# checked so, and more within this share of the sampling time.
WHOLE_SHARE, LEAST_WHOLE = 0.01, 2
# The least tolerance of dk and dv of a key, as of any gradient of few terms (tolerance.py).
KEY_ULPS = 6.0
# Allowed errors of a module's gradients against its copy's, in shares of the largest value, which compiled and other
# kernels round otherwise; and the share of the largest gradient below which one may be rounding.
LEAST_GRADIENT_ERROR, GRADIENT_ULPS, LEAST_OF_GRADIENTS = 1e-3, 16.0, 0.01
# Values of a gradient, and tokens of a call, below which it may be 0 by chance. Where most weights are 0 or 1, as with
# a scale of 1, norms of dW of q and k differ by a factor of 1000 between calls over 39 tokens, so no factor is judged.
LEAST_OF_NORM, LEAST_TOKENS_OF_NORM = 1024, 16
# The tolerance of all rows of a first call against a later call on the same inputs.
REPEATED_ULPS = 16.0


class TimedOutputs:
    """Checks calls of the timed sequence of one case, after the last slot."""

    def __init__(self, call: PreparedCall) -> None:
        self._call = call
        self._tolerances: dict[str, float] = {}
        self._sampled_ns = 0

    def know(self, verification: Verification) -> None:
        """Take over the tolerances of a verification."""
        self._tolerances = {check.name: check.tolerance for check in verification.checks if check.tolerance is not None}

    def sampled(self, elapsed_ns: int) -> None:
        """So much more time was spent on taking samples."""
        self._sampled_ns += elapsed_ns

    def check(self, last: KeptCall | None) -> Verification:
        """The checks of all calls whose rows were kept, and of the last call if its whole result was."""
        started = time.perf_counter_ns()
        timed = self._call.timed_calls
        known = timed.take_kept()
        kept = [call for call in known if call.drawn]
        checks = [_inputs_check(call) for call in known if call.digests]
        if last is not None:
            # Exact and plain results are of the same rows.
            with blocks_cached():
                checks += last_checks(self._call, last, self._tolerances, self._call.spec.seed + 1 + last.number)
            if self._call.spec.takes != "heads" and self._call.world is None and last.gradients:
                checks.append(_gradients_check(self._call, last, kept))
        rows: list[tuple[int, int, int, int]] = []
        for number, call in enumerate(kept):
            # All ranks must reach the same verdict, so none decides by its own clock.
            whole = number < LEAST_WHOLE or (
                self._call.world is None and time.perf_counter_ns() - started < WHOLE_SHARE * self._sampled_ns
            )
            checks += kept_checks(self._call, call, self._tolerances, whole)
            rows += [(call.number, row.batch, row.position, row.head) for row in call.rows if not row.key]
        timed.release()
        self._sampled_ns = 0
        return Verification(
            checks=tuple(_worst(checks)),
            timed_calls=len({call.number for call in (*kept, last) if call is not None}),
            timed_rows=tuple(rows),
            duration_ns=max(0, time.perf_counter_ns() - started),
        )


def _gradients_check(call: PreparedCall, last: KeptCall, kept: Sequence[KeptCall]) -> Check:
    """Compare a module's gradients of input and parameters in the last call with its copy from verification. The
    gradients of other kept calls, whose inputs and dout differ, must be there and not 0.
    """
    # A call that was built again has no copy.
    module = call.reference or getattr(call.module, "module", call.module)
    assert module is not None
    x = last.inputs.q.detach().requires_grad_()
    trained = {name: part for name, part in module.named_parameters() if part.requires_grad}
    parameters, names = [*trained.values()], ["dx", *(f"d {name}" for name in trained)]
    with torch.enable_grad():
        out = module(x, x, x)
    expected = torch.autograd.grad(out, [x, *parameters], call.output_gradient(), allow_unused=True)
    largest = max((float(x.abs().max()) for x in expected if x is not None and x.numel()), default=0.0)
    size = max((float(torch.linalg.vector_norm(x)) for x in expected if x is not None), default=0.0)
    limit = max(LEAST_GRADIENT_ERROR, GRADIENT_ULPS * eps(x.dtype))
    worst, name = 0.0, CheckName.TIMED_GRADIENTS
    for at, (title, value) in enumerate(zip(names, expected, strict=True)):
        if value is None:
            continue
        actual = last.gradients[at]
        if actual is None or actual.shape != value.shape:
            return Check(name=name, passed=False, detail=f"of the last timed call: {title}: {NO_GRADIENT}")
        # Gradients of zero, as of a bias of k, are rounding.
        scale = max(float(value.abs().max()), LEAST_OF_GRADIENTS * largest, torch.finfo(value.dtype).tiny)
        error = float((actual - value).abs().max()) / scale
        if not error <= limit:
            text = f"of the last timed call: {title} is not that of the module as it was verified"
            return Check(name=name, passed=False, error=error, tolerance=limit, detail=text)
        worst = max(worst, error)
        norm = float(torch.linalg.vector_norm(value))
        is_chance = value.numel() < LEAST_OF_NORM or call.workload.tokens < LEAST_TOKENS_OF_NORM
        if is_chance or norm < LEAST_OF_GRADIENTS * size:
            continue
        for of_call in kept:
            its = of_call.sizes[at] if at < len(of_call.sizes) else None
            if of_call.form is None and (its is None or not 0 < float(its) < inf):
                text = f"of timed call {of_call.number + 1}: {title} has a norm of {its}, that of the last call {norm}"
                return Check(name=name, passed=False, detail=text)
    return Check(name=name, passed=True, error=worst, tolerance=limit)


def verify_first_calls(call: PreparedCall) -> Verification:
    """The checks of the kept first calls of a process: some rows, and every row of out against another call's."""
    started = time.perf_counter_ns()
    last = call.first_calls[-1]
    inputs, seed = last.inputs, call.spec.seed
    with torch.no_grad():
        again = call.function(inputs.q, inputs.k, inputs.v)
    checks = list(last_checks(call, last, {}, seed + 1))
    for first in call.first_calls:
        if all(check.passed for check in checks) and isinstance(first.out, Tensor):
            what = "a first call in a fresh process and a later call"
            tolerance = REPEATED_ULPS * eps(again.dtype)
            checks.append(agreement(CheckName.TIMED_OUT, again, first.out.detach(), tolerance, what))
    return Verification(
        checks=tuple(_worst(checks)), timed_calls=1, duration_ns=max(0, time.perf_counter_ns() - started)
    )


def _worst(checks: Sequence[Check]) -> Iterator[Check]:
    """For each name the check that failed first, or else the one with the largest share of its tolerance."""
    for name in dict.fromkeys(check.name for check in checks):
        of_name = [check for check in checks if check.name == name]
        failed = (check for check in of_name if not check.passed)
        yield next(failed, max(of_name, key=lambda check: (check.error or 0.0) / (check.tolerance or 1.0)))


def kept_checks(call: PreparedCall, kept: KeptCall, tolerances: Mapping[str, float], whole: bool) -> Iterator[Check]:
    """The checks of a call with kept rows. whole: also those that take a pass over all rows."""
    of = f"of timed call {kept.number + 1}"
    sound = kept.form is None
    if call.world is not None and not call.takes_whole:
        sound = all(call.world.share(sound))
    if not sound:
        text = kept.form or "another rank's is not"
        yield Check(name=CheckName.TIMED_FORM, passed=False, detail=f"{of}: {text}")
        return
    if kept.threads > 0:
        text = f"{kept.threads} threads that were started since the slot began still ran when a call had returned"
        yield Check(name=CheckName.TIMED_THREADS, passed=False, detail=text)
    for row in kept.rows:
        before, after = row.copies[:1], row.later
        if not row.key and after and before[0] is not None and not _same(before[0], after[0]):
            text = f"{of}: its values changed after the call had returned: not finished, or a later call wrote into it"
            yield Check(name=CheckName.TIMED_KEPT, passed=False, detail=text)
    if call.spec.takes == "heads":
        past = _Past(call, kept)
        for row in kept.rows:
            if not row.key:
                yield from _row_checks(past, row, tolerances, of)
            elif whole:
                yield from _key_checks(past, row, tolerances, of)
    elif whole and call.spec.takes == "model":
        yield kept_step_check(call, kept, of)
    elif whole and call.world is None:
        yield _kept_embeddings_check(call, kept, tolerances, of)


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether both hold the same numbers, NaN among them."""
    return torch.equal(first.nan_to_num(0.0), second.nan_to_num(0.0)) and torch.equal(first.isnan(), second.isnan())


def _inputs_check(kept: KeptCall) -> Check:
    names = ("q", "k", "v") if len(kept.inputs.distinct) == 3 else ("the input",)
    changed = [name for name, *both in zip(names, *kept.digests, strict=True) if not torch.equal(both[0], both[1])]
    text = f"of timed call {kept.number + 1}: {' and '.join(changed)} held other numbers afterwards"
    return Check(name=CheckName.TIMED_INPUTS, passed=not changed, detail=text if changed else None)


class _Past:
    """The numbers of one kept call, whole heads of one batch item at a time; over ranks each is put together."""

    def __init__(self, call: PreparedCall, kept: KeptCall) -> None:
        self.call, self.kept, self.workload = call, kept, call.workload
        self.device = device_of(call.device).verifies_on
        self.across = call.world if call.world is not None and not call.takes_whole else None
        self._known: dict[tuple[int, int, int], Tensor] = {}

    def head(self, index: int, batch: int, head: int, row: int | None = None) -> Tensor:
        """[M, D] of q (0) or dout (3), [N, D] of k (1) or v (2); [1, D] of one row."""
        key = index, batch, head
        if key not in self._known:
            found = self._earlier(*key, row)
            if row is not None and self.across is None:
                return found
            self._known[key] = self.whole(found)
        known = self._known[key]
        return known if row is None else known[row : row + 1]

    def _earlier(self, index: int, batch: int, head: int, row: int | None) -> Tensor:
        assert self.kept.count is not None
        row = None if self.across is not None else row
        timed, inputs = self.call.timed_calls, self.kept.inputs
        tensor = self.call.output_gradient() if index == 3 else inputs.distinct[index]
        batched = tensor if self.call.row_dim else tensor[None]
        if index == 3:
            return timed.earlier_dout(batched, self.kept, batch, head, row).to(self.device)
        return inputs.changes.earlier(index, batched, self.kept.count, batch, head, row).to(self.device)

    def whole(self, local: Tensor) -> Tensor:
        """The rows of all ranks of this rank's [n, D]."""
        if self.across is None:
            return local
        rows = torch.arange(self.workload.seq_len)
        index, own = (x.to(local.device) for x in self.call.shards.held(rows, self.across.rank))
        found = local.new_zeros(len(rows), local.shape[1])
        found[index] = local[own]
        # Each row is zero on all ranks but one, so that the sum of the bytes is the row.
        self.across.sum_in_place([found.view(torch.uint8)])
        return found.to(self.device)

    def copied(self, copy: Tensor | None, like: Tensor) -> Tensor:
        """A kept row [D] on every rank."""
        row = like if copy is None else copy
        if self.across is not None:
            row = row.clone()
            self.across.sum_in_place([row.view(torch.uint8)])
        return row.to(self.device)

    def oracle(self, batch: int, head: int, rows: Tensor, keys: Tensor) -> _PastOracle:
        """The right values of `head` at these rows, and at these keys from the rows."""
        return _PastOracle(self, batch, head, rows, keys)


class _PastOracle(Oracle):
    """The oracle of one head of one batch item; other heads of its result are undefined."""

    def __init__(self, past: _Past, batch: int, head: int, rows: Tensor, keys: Tensor) -> None:
        self._past, self._batch, self._head = past, batch, head
        sample = Sample(torch.zeros(1, dtype=torch.int64), rows, keys, complete=False)
        super().__init__(past.workload, device=past.device, sample=sample)

    def _draw_inputs(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, M, H, D], k and v [1, N, K, D], each head the one that is known."""
        return self._heads

    @cached_property
    def _heads(self) -> tuple[Tensor, Tensor, Tensor]:
        workload, group = self.workload, self._head // self.workload.group_size
        only = int(self.sample.rows[0]) if len(self.sample.rows) == 1 else None
        q = self._past.head(0, self._batch, self._head, only)
        k, v = (self._past.head(index, self._batch, group) for index in (1, 2))
        # Views that repeat the one head for each head, and the one row for all rows.
        q = q[None, :, None].expand(1, workload.rows, workload.num_heads, -1)
        k, v = (x[None, :, None].expand(1, -1, workload.num_kv_heads, -1) for x in (k, v))
        return q, k, v

    @cached_property
    def full_dout(self) -> Tensor:
        if len(self.sample.rows) == 1:
            rows = self._past.head(3, self._batch, self._head, int(self.sample.rows[0]))
        else:
            rows = self._past.head(3, self._batch, self._head)[self.sample.rows.to(self.device)]
        return rows[None, :, None].expand(1, -1, self.workload.num_heads, -1)

    def _alike(self) -> float:
        return 0.0

    def sampled(self, tensor: Tensor) -> Tensor:
        """Rows [1, R, H, D] as they are."""
        return tensor

    def within(self, name: CheckName, tolerances: Mapping[str, float]) -> Expected:
        """out or dq within a known tolerance, or within that of the plain computation of these rows."""
        is_out = name == CheckName.OUT
        if name not in tolerances:
            return self.expected[0] if is_out else self.gradients[0]
        value, size = (self.exact.out, self.exact.size) if is_out else (x[0] for x in self.exact_gradients())
        return Expected(value, clamp_size_(size, self.dtype), tolerances[name])


def _row_checks(past: _Past, row: KeptRow, tolerances: Mapping[str, float], of: str) -> Iterator[Check]:
    backward = past.workload.mode != "forward"
    widths = past.workload.value_width, past.workload.head_dim
    rows = torch.tensor([row.position])
    oracle = past.oracle(row.batch, row.head, rows, rows)
    for index, name in enumerate((CheckName.OUT, CheckName.DQ) if backward else (CheckName.OUT,)):
        copy = row.copies[index] if index < len(row.copies) else None
        if copy is None and past.across is None:
            yield Check(name=CheckName.TIMED_GRADIENTS, passed=False, detail=f"{of}: {NO_GRADIENT}")
            return
        actual = past.copied(copy, past.kept.inputs.q.new_zeros(widths[index]))
        with only_heads([row.head]):
            check = _of_head(
                name, actual, oracle.within(name, tolerances), row, tolerances, of, past.workload.first_row
            )
            if not check.passed:
                # The row may be one in which the plain computation is off by more than in the verified rows.
                check = _of_head(name, actual, oracle.within(name, {}), row, tolerances, of, past.workload.first_row)
        yield check


def _key_checks(past: _Past, row: KeptRow, tolerances: Mapping[str, float], of: str) -> Iterator[Check]:
    """dk and dv of one key: sums over the rows that see it of the query heads that share it."""
    workload = past.workload
    widths = workload.head_dim, workload.value_width
    # Weights of single branches, and of single attentions, are not at hand.
    if is_sum(workload):
        return
    found = [torch.zeros(2, 2, max(widths), dtype=torch.float64, device=past.device)]
    heads = range(row.head * workload.group_size, (row.head + 1) * workload.group_size)
    found += [_gradients_of_key(past, row, head) for head in heads]
    sums = torch.stack(found).sum(0)
    for index, name in enumerate((CheckName.DK, CheckName.DV)):
        copy = row.copies[index] if index < len(row.copies) else None
        if copy is None and past.across is None:
            yield Check(name=CheckName.TIMED_GRADIENTS, passed=False, detail=f"{of}: {NO_GRADIENT}")
            return
        actual = past.copied(copy, past.kept.inputs.k.new_zeros(widths[index]))
        value, squares = sums[index, :, : widths[index]]
        if name == CheckName.DK and workload.pattern.is_detached:
            continue
        size = squares.sqrt().add_(value.abs()).clamp_min_(torch.finfo(actual.dtype).tiny)
        shape = (1, 1, workload.num_kv_heads, -1)
        value, size = (x[None, None, None].expand(shape) for x in (value, size))
        wanted = Expected(value, size, KEY_ULPS * eps(actual.dtype))
        yield _of_head(name, actual, wanted, row, tolerances, of, workload.first_row)


def _gradients_of_key(past: _Past, row: KeptRow, head: int) -> Tensor:
    """A head's share of dk and dv at a key, [2, 2, max(D, Dv)], zeros behind the narrower: values, and squares of the
    sizes of their terms (rounding.py).

    One pass over the rows that see the key gives their lse and out; their weights at the key follow.
    """
    workload, wide = past.workload, torch.float64
    rows = torch.from_numpy(seen_by(workload, head, row.position) - workload.first_row)
    dim, value_dim = workload.head_dim, workload.value_width
    total = torch.zeros(2, 2, max(dim, value_dim), dtype=wide, device=past.device)
    if not len(rows):
        return total
    place, group = rows.to(past.device), head // workload.group_size
    q, dout = (past.head(index, row.batch, head)[place].to(wide) for index in (0, 3))
    k, v = (past.head(index, row.batch, group) for index in (1, 2))
    oracle = past.oracle(row.batch, head, rows, rows[:0])
    counts = torch.zeros(len(rows), dtype=wide, device=past.device)
    with only_heads([head]):
        out, lse = (x[0] for x in attend_rows(*oracle.heads, workload, rows))
        for block in blocks(workload, rows, oracle.heads[0]):
            at = (block.keys == row.position).nonzero().flatten()
            if len(at):
                counts[block.index] = block.given[:, at[0]].sum() * block.seen[:, at[0]].to(wide)
    key, value = k[row.position].to(wide), v[row.position].to(wide)
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


def _of_head(
    name: CheckName,
    actual: Tensor,
    expected: Expected,
    row: KeptRow,
    tolerances: Mapping[str, float],
    of: str,
    first_row: int,
) -> Check:
    """The check of one head's row [D]. first_row: the position of the first query."""
    # Few rows show too little of the plain computation's error.
    tolerance = max(expected.tolerance, tolerances.get(name, 2 * expected.tolerance))
    value, size = (x.expand_as(expected.value)[:, :, row.head] for x in (expected.value, expected.size))
    place, position = ("key", row.position) if row.key else ("position", row.position + first_row)
    axes = (("batch", torch.tensor([row.batch])), (place, torch.tensor([position])), ("dim", None))
    check = compare(CheckName(f"timed_{name}"), actual[None, None], Expected(value, size, tolerance), axes, of)
    return check if check.where is None else check.model_copy(update={"where": f"{check.where}, head {row.head}"})


def _kept_embeddings_check(call: PreparedCall, kept: KeptCall, tolerances: Mapping[str, float], of: str) -> Check:
    """Rows of a module's result, from all embeddings of their batch item as they were."""
    assert kept.count is not None
    x = kept.inputs.q if call.row_dim else kept.inputs.q[None]
    single = call.workload if not call.row_dim else call.workload.replace(batch_size=1)
    there, checks = device_of(call.device).verifies_on, []
    for batch in dict.fromkeys(row.batch for row in kept.rows):
        of_batch = {row.position: row for row in kept.rows if row.batch == batch}
        past = kept.inputs.changes.earlier(0, x[:, :, None], kept.count, batch, 0)
        rows = torch.tensor(sorted(of_batch))
        sample = Sample(torch.zeros(1, dtype=torch.int64), rows, torch.zeros(0, dtype=torch.int64), complete=False)
        oracle = InPlaceOracle(single, ((past[None] if call.row_dim else past).to(there),), None, 0, sample)
        copies = [of_batch[position].copies[0] for position in rows.tolist()]
        found = torch.stack([copy for copy in copies if copy is not None]).to(there)
        axes = (("batch", torch.tensor([batch])), ("position", rows), ("dim", None))
        expected = expected_embeddings(call, oracle, tolerances)
        checks.append(compare(CheckName.TIMED_OUT, found[None], expected, axes, of))
    return next((check for check in checks if not check.passed), checks[0])

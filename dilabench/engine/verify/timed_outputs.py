"""The check of timed calls: rows of random calls, and the whole last call, on their own inputs.

For 8 to 16 random calls, the first included (timed_calls.py), two rows of out and dq are compared with the oracle
(kept_rows.py): the one whose query was changed just before the call, and a random one; batch items and head groups
alternate. For some of these calls, dk and dv of a key are compared, too, from all rows that see it.

Each call must leave its inputs unchanged. last_call.py has the checks of the last one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from dilabench.engine.call.kept_call import KeptCall
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import device_of
from dilabench.engine.verify.compare import agreement, compare
from dilabench.engine.verify.heads import NO_GRADIENT
from dilabench.engine.verify.kept_rows import Past, key_checks, row_checks
from dilabench.engine.verify.last_call import expected_embeddings, last_checks
from dilabench.engine.verify.model_steps import kept_step_check
from dilabench.engine.verify.oracle.blocks import blocks_cached
from dilabench.engine.verify.oracle.in_place import InPlaceOracle
from dilabench.engine.verify.oracle.sample import Sample
from dilabench.engine.verify.oracle.tolerance import eps
from dilabench.record import Check, CheckName, Verification

# dk and dv of a key take a pass over all rows that see it, and modules project all rows. At least LEAST_WHOLE calls are
# checked so, and more within this share of the sampling time.
WHOLE_SHARE, LEAST_WHOLE = 0.01, 2
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
        checks = list(_inputs_checks([call for call in known if call.digests]))
        if last is not None:
            # Exact and plain results are of the same rows.
            with blocks_cached():
                checks += last_checks(self._call, last, self._tolerances, self._call.spec.seed + 1 + last.number)
            if self._call.spec.takes != "heads" and self._call.world is None and last.gradients:
                checks.append(_gradients_check(self._call, last, kept))
        rows = [(call.number, row.batch, row.position, row.head) for call in kept for row in call.rows if not row.key]
        sound = []
        for call in kept:
            if is_sound := _is_sound(self._call, call):
                sound.append(call)
            checks += _form_checks(call, is_sound=is_sound)
        checks += _unchanged_checks(sound)
        if self._call.spec.takes == "heads":
            checks += row_checks(Past(self._call), sound, self._tolerances)
        for number, call in enumerate(sound):
            # All ranks must reach the same verdict, so none decides by its own clock.
            if number < LEAST_WHOLE or (
                self._call.world is None and time.perf_counter_ns() - started < WHOLE_SHARE * self._sampled_ns
            ):
                checks += _whole_checks(self._call, call, self._tolerances)
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


def _is_sound(call: PreparedCall, kept: KeptCall) -> bool:
    """Whether a kept call returned one plain tensor of the right shape, on every rank."""
    sound = kept.form is None
    return all(call.world.share(sound)) if call.world is not None and not call.takes_whole else sound


def _form_checks(kept: KeptCall, *, is_sound: bool) -> Iterator[Check]:
    """The failed checks of a call with kept rows that need no numbers."""
    if not is_sound:
        text = kept.form or "another rank's is not"
        yield Check(name=CheckName.TIMED_FORM, passed=False, detail=f"of timed call {kept.number + 1}: {text}")
    elif kept.threads > 0:
        text = f"{kept.threads} threads that were started since the slot began still ran when a call had returned"
        yield Check(name=CheckName.TIMED_THREADS, passed=False, detail=text)


def _whole_checks(call: PreparedCall, kept: KeptCall, tolerances: Mapping[str, float]) -> Iterator[Check]:
    """The checks of a call with kept rows that take a pass over all rows."""
    if call.spec.takes == "heads":
        for row in kept.rows:
            if row.key:
                yield from key_checks(Past(call), kept, row, tolerances)
    elif call.spec.takes == "model":
        yield kept_step_check(call, kept, f"of timed call {kept.number + 1}")
    elif call.world is None:
        yield _kept_embeddings_check(call, kept, tolerances, f"of timed call {kept.number + 1}")


def _unchanged_checks(calls: Sequence[KeptCall]) -> Iterator[Check]:
    """Failed checks of calls with a row of out that changed after the call had returned. NaN is the same as NaN."""
    kept = [(call, row) for call in calls for row in call.rows if not row.key and row.copies and row.later]
    pairs = [(call, copy, row.later[0]) for call, row in kept if (copy := row.copies[0]) is not None]
    if not pairs:
        return
    first, later = torch.stack([copy for _, copy, _ in pairs]), torch.stack([copy for _, _, copy in pairs])
    same = ((first == later) | (first.isnan() & later.isnan())).flatten(1).all(1)
    for (call, _, _), is_same in zip(pairs, same.tolist(), strict=True):
        if not is_same:
            what = "its values changed after the call had returned: not finished, or a later call wrote into it"
            yield Check(name=CheckName.TIMED_KEPT, passed=False, detail=f"of timed call {call.number + 1}: {what}")


def _inputs_checks(calls: Sequence[KeptCall]) -> Iterator[Check]:
    """Whether the inputs of each call held the same numbers before and after it, by their digests."""
    if not calls:
        return
    # TimedCalls digests the inputs of each of these calls twice.
    before, after = (torch.cat([words for call in calls for words in call.digests[when]]) for when in (0, 1))
    is_same, at = (before == after).tolist(), 0
    for call in calls:
        changed = []
        for name, words in zip(
            ("q", "k", "v") if len(call.digests[0]) == 3 else ("the input",), call.digests[0], strict=True
        ):
            if not all(is_same[at : at + len(words)]):
                changed.append(name)
            at += len(words)
        text = f"of timed call {call.number + 1}: {' and '.join(changed)} held other numbers afterwards"
        yield Check(name=CheckName.TIMED_INPUTS, passed=not changed, detail=text if changed else None)


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

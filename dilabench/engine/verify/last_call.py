"""The check of the last timed call: a few rows of its result, and sums over all rows, on the call's own inputs.

out and dq are compared at the row whose query was changed just before the call and at random rows, `SLOPE_ROWS` over
all heads, whose slope is judged, too; over ranks also at the rows that see the most keys of every other rank. dk and dv
are sums over all rows and would need a whole pass. Two identities per channel check them in one pass over memory:

    sum_j v[j] dv[j] = sum_i out[i] dout[i]      over the rows of the heads that share the keys
    sum_j k[j] dk[j] = sum_i q[i] dq[i]          since both are sum_ij dS[i, j] scale q[i] k[j]

Results of other inputs miss both by about the size of the sums. If a part is missing or stale, such as one rank's share
of the gradients, all channels are slightly off: so the root mean square over channels has a tighter tolerance than the
largest error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dilabench.engine.call.inputs import InputSet, result_form
from dilabench.engine.call.kept_call import KeptCall
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import device_of
from dilabench.engine.verify.across_ranks import RanksOracle, rows_across_ranks
from dilabench.engine.verify.call import form_checks
from dilabench.engine.verify.compare import compare, compare_both_ways
from dilabench.engine.verify.embeddings import plain_embeddings
from dilabench.engine.verify.heads import NO_GRADIENT, row_axes
from dilabench.engine.verify.model_steps import step_check
from dilabench.engine.verify.oracle.in_place import InPlaceOracle
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.sample import Sample
from dilabench.engine.verify.oracle.tolerance import Expected, eps
from dilabench.record import Check, CheckName

OF = "of a timed call"
# Rows, each of a head, from which a slope follows that is wrong by more than rounding (slope.py).
SLOPE_ROWS = 128
# Errors of sums in units of the sizes of their terms, in tolerances of one value: the largest over channels, as terms
# of a row share the row's error, and the root mean square over channels, in which such errors average out.
LARGEST_IDENTITY_ERROR, MEAN_IDENTITY_ERROR = 4.0, 0.5


def last_checks(call: PreparedCall, kept: KeptCall, tolerances: Mapping[str, float], seed: int) -> Iterator[Check]:
    """The checks of one kept call. `tolerances`: of out and dq as verification derived them from more rows."""
    inputs = kept.inputs
    form = form_checks(kept.out, *result_form(call.workload, call.spec.takes, inputs.q), inputs.q.device)
    broken = next((check for check in form if not check.passed), None)
    if broken is not None:
        yield broken.model_copy(update={"name": CheckName.TIMED_FORM, "detail": f"{OF}: {broken.detail}"})
        return
    assert isinstance(kept.out, Tensor)
    if kept.threads > 0:
        text = f"{kept.threads} threads that were started since the slot began still ran when a call had returned"
        yield Check(name=CheckName.TIMED_THREADS, passed=False, detail=text)
    kept = _where_verified(kept)
    if call.spec.takes == "heads":
        yield from _heads_checks(call, kept, tolerances, seed)
    elif call.spec.takes == "model":
        assert isinstance(kept.out, Tensor)
        sample, out = _sample(call, kept, seed), kept.out.detach()
        rows = [(int(sample.batches[0]), place) for place in sample.rows.tolist()]
        found = torch.stack([(out if call.row_dim else out[None])[row] for row in rows])
        yield step_check(call, kept.inputs.q.detach(), rows, found, OF)
    elif call.world is None:
        yield _embeddings_check(call, kept, tolerances, seed)
    else:
        yield Check(name=CheckName.TIMED_FORM, passed=True, detail=f"{OF}: its values, over ranks, were not compared")


def _where_verified(kept: KeptCall) -> KeptCall:
    """The call with its tensors where the oracle computes: the kept one itself but for a device without float64."""
    inputs, there = kept.inputs, device_of(kept.inputs.q.device).verifies_on
    if there == inputs.q.device or not isinstance(kept.out, Tensor):
        return kept
    q, k, v = (x.detach().to(there) for x in (inputs.q, inputs.k, inputs.v))
    gradients = tuple(None if x is None else x.to(there) for x in kept.gradients)
    return replace(kept, inputs=InputSet(q, k, v), out=kept.out.detach().to(there), gradients=gradients)


def _heads_checks(call: PreparedCall, kept: KeptCall, tolerances: Mapping[str, float], seed: int) -> Iterator[Check]:
    assert isinstance(kept.out, Tensor)
    oracle = _oracle(call, kept, seed)
    out = kept.out.detach()
    yield from _compared(CheckName.OUT, oracle, oracle.sampled(out), oracle.expected[0], tolerances)
    if call.workload.mode == "forward":
        return
    dq, dk, dv = kept.gradients[:3]
    if dq is None or dk is None or dv is None:
        yield Check(name=CheckName.TIMED_GRADIENTS, passed=False, detail=f"{OF}: {NO_GRADIENT}")
        return
    yield from _compared(CheckName.DQ, oracle, oracle.sampled(dq), oracle.gradients[0], tolerances)
    q, k, v = kept.inputs.q, kept.inputs.k, kept.inputs.v
    own = oracle.gradients[0]
    fits_v = _sums(call, v, dv), _sums(call, out, oracle.full_dout)
    fits_k = _sums(call, k, dk), _sums(call, q, dq)
    yield _identity(
        CheckName.DV,
        *fits_v,
        tolerances.get(CheckName.DV, own.tolerance),
        "dout and out",
        _rounding(call, oracle.expected[0]),
    )
    yield _identity(
        CheckName.DK, *fits_k, tolerances.get(CheckName.DK, own.tolerance), "q, k and dq", _rounding(call, own)
    )


def _rounding(call: PreparedCall, expected: Expected) -> Tensor:
    """Natural size over value, on the sampled rows of the heads that share a key head, [K, 1], at least 1.

    Sums are compared with the sizes of values, which are known only to their natural sizes. If the right values are
    only rounding (each row of a head sees one key, say), their sums carry no information.
    """
    size, value = (
        tensor.unflatten(2, (call.workload.num_kv_heads, -1)).square().sum((0, 1, 3, 4)).sqrt()
        for tensor in (expected.size, expected.value)
    )
    return (size.clamp_min(1e-15) / value.clamp_min(1e-150))[:, None]


def _identity(name: CheckName, left: Tensor, right: Tensor, tolerance: float, others: str, rounding: Tensor) -> Check:
    """Both sides of an identity, as `_sums` gives them. rounding: as `_rounding` does."""
    size = (left[1] + right[1]).sqrt().mul_(rounding).clamp_min_(torch.finfo(torch.float32).tiny)
    errors = ((left[0] - right[0]).abs() / size).nan_to_num(torch.inf)
    mean = float(errors.square().mean().sqrt())
    error = max(float(errors.max()) / LARGEST_IDENTITY_ERROR, mean / MEAN_IDENTITY_ERROR)
    passed = error <= tolerance
    text = None if passed else f"{OF}: over all rows it does not fit {others}"
    return Check(name=CheckName(f"timed_{name}"), passed=passed, error=error, tolerance=tolerance, detail=text)


def _compared(
    name: CheckName, oracle: Oracle, rows: Tensor, expected: Expected, tolerances: Mapping[str, float]
) -> Iterator[Check]:
    # Few rows show too little of the plain computation's error.
    tolerance = max(expected.tolerance, tolerances.get(name, 2 * expected.tolerance))
    expected = replace(expected, tolerance=tolerance)
    yield from compare_both_ways(CheckName(f"timed_{name}"), rows, expected, row_axes(oracle), OF)


def _oracle(call: PreparedCall, kept: KeptCall, seed: int) -> InPlaceOracle:
    workload, inputs = call.workload, kept.inputs
    sample = _sample(call, kept, seed)
    dout = call.output_gradient().to(inputs.q.device) if workload.mode != "forward" else None
    given = (inputs.q, inputs.k, inputs.v)
    if call.world is None or call.takes_whole:
        return InPlaceOracle(workload, given, dout, seed, sample)
    return RanksOracle(workload, given, dout, seed, call.shards, call.world, sample)


def _sample(call: PreparedCall, kept: KeptCall, seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    count = -(-SLOPE_ROWS // call.workload.num_heads) if call.spec.takes == "heads" else 1
    drawn = torch.randint(call.workload.rows, (count,), generator=generator).tolist()
    batch = torch.randint(call.workload.batch_size, (1,), generator=generator)
    across = () if call.world is None or call.takes_whole else rows_across_ranks(call.workload, call.shards).tolist()
    rows = torch.tensor(sorted({kept.position, *drawn, *across}))
    return Sample(batch, rows, torch.zeros(0, dtype=torch.int64), complete=False)


def _sums(call: PreparedCall, x: Tensor, y: Tensor) -> Tensor:
    """sum over positions of x·y and of its square, [2, K, D]; of query heads over those that share their keys."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y = x.detach(), y.detach()
    kv_heads = call.workload.num_kv_heads
    found = torch.zeros(2, kv_heads, x.shape[-1], dtype=torch.float64, device=x.device)
    group = x.shape[-2] // kv_heads
    for head in range(kv_heads):
        heads = slice(head * group, (head + 1) * group)
        product = (x[..., heads, :].to(wide) * y[..., heads, :].to(wide)).flatten(0, -2)
        found[0, head], found[1, head] = product.sum(0, dtype=torch.float64), product.square().sum(0)
    if call.world is not None and not call.takes_whole:
        call.world.sum_in_place([found])
    return found


def _embeddings_check(call: PreparedCall, kept: KeptCall, tolerances: Mapping[str, float], seed: int) -> Check:
    assert isinstance(kept.out, Tensor)
    sample = _sample(call, kept, seed)
    oracle = InPlaceOracle(call.workload, (kept.inputs.q,), None, seed, sample)
    expected = expected_embeddings(call, oracle, tolerances)
    axes = (("batch", sample.batches), ("position", sample.rows), ("dim", None))
    return compare(CheckName.TIMED_OUT, oracle.sampled(kept.out.detach()), expected, axes, OF)


def expected_embeddings(call: PreparedCall, oracle: Oracle, tolerances: Mapping[str, float]) -> Expected:
    """The result of the module around the plain computation, on the sampled rows."""
    module = call.reference or getattr(call.module, "module", call.module)
    assert module is not None
    # In its own dtype, once: what verification compared with was exact, so its tolerance covers half of this.
    value, size = plain_embeddings(module, oracle)
    tiny = torch.finfo(oracle.dtype).tiny
    return Expected(value, size.clamp_min(tiny), 2 * tolerances.get(CheckName.OUT, 16 * eps(oracle.dtype)))

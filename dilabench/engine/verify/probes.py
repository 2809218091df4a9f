"""Checks on a second call: a result other than the first and right, coverage, dependencies, gradients of every row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilabench.engine.verify.call import Result, form_checks
from dilabench.engine.verify.compare import compare, locate
from dilabench.engine.verify.oracle.blocks import zero_keys
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.planes import VALUE
from dilabench.engine.verify.oracle.sums import is_sum, out_of_ones
from dilabench.engine.verify.oracle.tolerance import Expected, ones_tolerance
from dilabench.record import Check, CheckName
from dilabench.workload.visibility import alike_heads, seen_by

# Keys whose dk is computed from all rows: each costs a pass over the rows.
MAX_KEY_GRADIENTS = 4
FROM_EVERY_ROW = {CheckName.DK: CheckName.DK_FROM_EVERY_ROW, CheckName.DV: CheckName.DV_FROM_EVERY_ROW}
_UNDER = "dout random in every row and in another memory order than out"


def probe_checks(oracle: Oracle, first: Tensor, results: list[Result]) -> Iterator[Check]:
    """The checks on the second calls (one; two when D = 1), given the first call's out."""
    for result in results:
        broken = [c for c in form_checks(result.out, oracle.out_shape, oracle.dtype, oracle.device) if not c.passed]
        if broken:
            yield Check(name=CheckName.SECOND_CALL, passed=False, detail=f"with other inputs: {broken[0].detail}")
            return
    yield _second_call(oracle, first, results)
    yield _ones(oracle, oracle.batched(results[0].out)[..., 0])
    yield _dependency(oracle, oracle.batched(results[-1].out))
    if results[-1].gradients and oracle.planes.calls == 1:
        yield from gradients_from_every_row(oracle, results[-1])


def large_scores_check(oracle: Oracle, result: Result, expected: Expected) -> Check:
    """Rows of out if scores are too large for their exponentials, and rows of other scales lie next to them."""
    name, detail = CheckName.LARGE_SCORES, "q of some rows times 30"
    broken = [c for c in form_checks(result.out, oracle.out_shape, oracle.dtype, oracle.device) if not c.passed]
    if broken:
        return Check(name=name, passed=False, detail=f"{detail}: {broken[0].detail}")
    positions = oracle.positions(oracle.second.rows)
    axes = (("batch", oracle.sample.batches), ("position", positions), ("head", None), ("dim", None))
    rows = oracle.chosen(result.out)[:, oracle.second.rows.to(oracle.device)]
    return compare(name, rows, expected, axes, detail)


def _second_call(oracle: Oracle, first: Tensor, results: list[Result]) -> Check:
    sample = oracle.sample
    positions = oracle.positions(oracle.second.rows)
    axes = (("batch", sample.batches), ("position", positions), ("head", None), ("dim", None))
    checks = []
    for result, expected in zip(results, oracle.second.expected, strict=True):
        rows = oracle.chosen(result.out)[:, oracle.second.rows.to(oracle.device)]
        checks.append(compare(CheckName.SECOND_CALL, rows, expected, axes))
    worst = next((check for check in checks if not check.passed), checks[-1])
    if not worst.passed and torch.equal(first, results[0].out):
        worst = worst.model_copy(update={"error": None, "detail": "other inputs gave the first call's result again"})
    return worst


def _ones(oracle: Oracle, out: Tensor) -> Check:
    workload = oracle.workload
    value = out_of_ones(workload).to(oracle.device).expand(out.shape)
    zeros = zero_keys(workload, torch.arange(workload.rows), oracle.device)
    if zeros is not None:
        # Zero keys take a share of a row's weights that depends on its scores: the remaining sum is in [0, 1].
        value = value.where(zeros[0].sum(0).T == 0, out.double().clamp(0.0, 1.0))
    expected = Expected(
        value, torch.full_like(value, 2.0), ones_tolerance(workload, oracle.dtype, oracle.second.ones_error)
    )
    axes = (("batch", None), ("position", oracle.positions()), ("head", None))
    return compare(CheckName.ONES, out, expected, axes, "v = 1 gives out = 1")


def _dependency(oracle: Oracle, out: Tensor) -> Check:
    """Exactly the rows with C > 0 change with v[key]. The error counts (row, key) pairs that are wrong."""
    workload, planes = oracle.workload, oracle.planes
    groups = alike_heads(workload)
    wrong, where, detail = 0, None, None
    for channel, key in planes.channels(planes.calls - 1):
        seen = torch.zeros(workload.rows, workload.num_heads, dtype=torch.bool, device=oracle.device)
        for heads in groups:
            rows = torch.from_numpy(seen_by(workload, heads[0], key) - workload.first_row).to(oracle.device)
            seen[rows[:, None], torch.tensor(heads, device=oracle.device)] = True
        differs = (out[..., channel] != 0) != seen
        count = int(differs.sum())
        if count and where is None:
            place = differs.flatten().int().argmax()
            where = locate(place, differs.shape, (("batch", None), ("position", oracle.positions()), ("head", None)))
            sees = bool(out[..., channel].flatten()[place] != 0)
            detail = f"the row {'sees' if sees else 'misses'} key {key}, which it {'must not' if sees else 'must'} see"
        wrong += count
    detail = detail or f"{len(planes.keys)} keys against every row"
    return Check(
        name=CheckName.DEPENDENCY, passed=not wrong, error=float(wrong), tolerance=0.0, where=where, detail=detail
    )


def gradients_from_every_row(oracle: Oracle, result: Result) -> Iterator[Check]:
    """dk and dv at probed keys under a dout that is random in every row, at any length.

    The channel of a key holds its attention weight P in every row. So dv = sum_i P dout and dk = scale · sum_i P (dP -
    mean) q follow from the function's own forward, which other checks compare with the oracle. Two tolerances: the
    rounding of this forward and of the backward.
    """
    workload = oracle.workload
    batches = oracle.sample.batches.to(oracle.device)
    pairs = oracle.planes.channels(oracle.planes.calls - 1)[:MAX_KEY_GRADIENTS]
    channels, keys = (list(column) for column in zip(*pairs, strict=True))
    q, k = (oracle.batched(x) for x in oracle.second_inputs()[:2])
    out, dout = oracle.batched(result.out), oracle.batched(oracle.full_dout)
    shape = (len(batches), len(keys), workload.num_kv_heads)
    sums = {
        CheckName.DK: torch.zeros(2, *shape, workload.head_dim, dtype=torch.float64, device=oracle.device),
        CheckName.DV: torch.zeros(2, *shape, dtype=torch.float64, device=oracle.device),
    }
    for head in range(workload.num_heads):
        kv_head = head // workload.group_size
        out_h, dout_h = out[batches, :, head].double(), dout[batches, :, head].double()
        weight = out_h[..., channels] / VALUE
        share = dout_h[..., channels]
        # v of a probed key is 1 in channel 0 and VALUE in its own.
        value_grad = dout_h[..., :1] + VALUE * share
        product = dout_h * out_h
        score = weight * (value_grad - product.sum(-1, keepdim=True)) * workload.softmax_scale
        terms = weight * (value_grad.abs() + product.abs().sum(-1, keepdim=True)) * workload.softmax_scale
        q_h = q[batches, :, head].double()
        if workload.softcap is not None:
            scores = q_h @ k[batches[:, None], keys, kv_head].double().mT * workload.softmax_scale
            score *= 1 - (scores / workload.softcap).tanh().square()
        sums[CheckName.DK][0, :, :, kv_head] += score.mT @ q_h
        sums[CheckName.DK][1, :, :, kv_head] += terms.square().mT @ q_h.square()
        sums[CheckName.DV][0, :, :, kv_head] += (weight * share).sum(1)
        sums[CheckName.DV][1, :, :, kv_head] += (weight * share).square().sum(1)
    tolerance = 2 * oracle.second.expected[-1].tolerance
    # The weights of single attentions, which dk needs, are not in an out that is a sum of them.
    detached = workload.pattern.is_detached or is_sum(workload)
    axes = (("batch", oracle.sample.batches), ("key", torch.tensor(keys)), ("head", None), ("dim", None))
    for index, name in ((1, CheckName.DK), (2, CheckName.DV)):
        gradient = result.gradients[index]
        # The weights of single branches, which a detached dk needs, are not in out.
        if gradient is None or (name == CheckName.DK and detached):
            continue
        value, squares = sums[name]
        size = squares.sqrt().add_(value.abs()).clamp_min_(torch.finfo(oracle.dtype).tiny)
        actual = oracle.chosen(gradient)[:, keys]
        if name == CheckName.DV:
            actual = torch.stack([actual[:, at, :, channel] for at, channel in enumerate(channels)], 1)
        expected = Expected(value, size, tolerance)
        yield compare(FROM_EVERY_ROW[name], actual, expected, axes[: actual.ndim], f"{len(keys)} keys, {_UNDER}")

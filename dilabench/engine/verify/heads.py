"""The checks of a function of q, k, v (takes = "heads")."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.engine.device.device import device_of
from dilabench.engine.verify.call import Call, Result, buffer_reuse_check, digest, form_checks, stream_check
from dilabench.engine.verify.compare import Axes, agreement, compare, compare_both_ways
from dilabench.engine.verify.confirmed import Confirmed
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.tolerance import Expected
from dilabench.engine.verify.probes import FROM_EVERY_ROW, gradients_from_every_row, large_scores_check, probe_checks
from dilabench.record import Check, CheckName

NO_GRADIENT = "out carries no gradient for it, but the workload's mode needs one"
GRADIENTS = (CheckName.DQ, CheckName.DK, CheckName.DV)
# Tokens of a cache before the first and behind the last key.
AROUND = 256


@dataclass(slots=True)
class Seen:
    """The function's results for the oracle's inputs; None for steps it did not reach. lse: on the sampled rows.

    against: the confirmed implementation that every row was compared with. misreads_dout: gradients are wrong if dout
    has another memory order than out, and right for the same values in out's order.
    """

    first: Result | None = None
    lse: Tensor | None = None
    against: str | None = None
    misreads_dout: bool = False


def heads_checks(
    function: Callable[..., Tensor], oracle: Oracle, deterministic: bool, confirmed: Confirmed | None, seen: Seen
) -> Iterator[Check]:
    """Checks 1 to 8 of semantics.md §4, in an order in which the first that fails says most.

    `confirmed`: what every row is compared with where the oracle has a sample only. `seen` gets what a diagnosis needs.
    """
    backward = oracle.workload.mode != "forward"
    # Expectations come before any call: a function may change its inputs.
    expected_out, _ = oracle.expected
    gradients = oracle.gradients if backward else ()
    second = [oracle.second_inputs(index) for index in range(oracle.planes.calls)]
    assert len(oracle.second.expected) == len(second)
    large = oracle.large_expected
    every_row = confirmed.results(oracle) if confirmed is not None and not oracle.sample.complete else None

    call = Call(function)
    first = call(oracle.inputs, oracle.sampled_dout if backward else None)
    form = form_checks(first.out, oracle.out_shape, oracle.dtype, oracle.device)
    yield from form
    if not all(check.passed for check in form):
        return
    seen.first = first
    kept = digest(first.out)
    yield from compare_both_ways(
        CheckName.OUT, oracle.sampled(first.out), expected_out, row_axes(oracle), how_many(oracle)
    )
    for index, (name, expected) in enumerate(zip(GRADIENTS, gradients, strict=False)):
        yield from _gradient_checks(oracle, first, index, name, expected)
    if every_row is not None and confirmed is not None:
        seen.against = confirmed.name
        yield from confirmed.checks(call, oracle, first)
    # In the first call dout has the memory order of out; in a model the next layer may return any order. Here the heads
    # follow each other in memory.
    dout = oracle.full_dout.transpose(-3, -2).contiguous().transpose(-3, -2) if backward else None
    results = [call(inputs, dout) for inputs in second]
    probes = list(probe_checks(oracle, first.out, results))
    yield from probes
    if any(check.name in FROM_EVERY_ROW.values() and not check.passed for check in probes):
        # A result of the preceding call would be right here, because inputs and dout are unchanged.
        repeated = gradients_from_every_row(oracle, call(second[-1], dout))
        again = gradients_from_every_row(oracle, call(second[-1], oracle.full_dout))
        seen.misreads_dout = not all(check.passed for check in repeated) and all(check.passed for check in again)
    del results, second, dout
    yield large_scores_check(oracle, call(oracle.large_inputs()), large)
    yield buffer_reuse_check(call, oracle.inputs, first.out, kept)
    yield from repeat_checks(call, oracle, first, deterministic, expected_out.tolerance)
    if oracle.workload.query_len is not None:
        yield _cache_check(call, oracle, first, 2 * expected_out.tolerance)
    if hasattr(function, "with_lse"):
        yield from _lse_checks(function, oracle, seen)
    if device_of(oracle.device).has_streams:
        yield stream_check(call, oracle.inputs, first.out, 2 * expected_out.tolerance)
    yield from call.unchanged()
    if call.changed:
        oracle.restore()


def repeat_checks(call: Call, oracle: Oracle, first: Result, deterministic: bool, tolerance: float) -> Iterator[Check]:
    """An identical call agrees, bitwise if that is declared; both are within tolerance of the oracle otherwise."""
    again = call(oracle.inputs, oracle.sampled_dout if first.gradients else None)
    limit = 0.0 if deterministic else 2 * tolerance
    detail = "two identical calls, bitwise" if deterministic else "two identical calls"
    yield _same_results(CheckName.REPEAT, first, again, limit, detail)


def _cache_check(call: Call, oracle: Oracle, first: Result, tolerance: float) -> Check:
    """The same keys and values as views into the memory of caches, in which NaN is before and behind them."""
    q, *cached = oracle.inputs
    views = []
    for x in cached:
        memory = x.new_full((x.shape[0], x.shape[1] + 2 * AROUND, *x.shape[2:]), torch.nan)
        views.append(memory[:, AROUND:-AROUND].copy_(x))
    inside = call((q, *views), oracle.sampled_dout if first.gradients else None)
    detail = "k and v are views into a cache, NaN before and behind them: no other key may be read"
    return _same_results(CheckName.CACHE, first, inside, tolerance, detail)


def _same_results(name: CheckName, first: Result, again: Result, limit: float, detail: str) -> Check:
    pairs = [(first.out, again.out)]
    pairs += [(a, b) for a, b in zip(first.gradients, again.gradients, strict=True) if a is not None and b is not None]
    checks = [agreement(name, a, b, limit, detail) for a, b in pairs]
    return next((check for check in checks if not check.passed), checks[0])


def row_axes(oracle: Oracle) -> Axes:
    """Names of the axes of sampled rows."""
    return (
        ("batch", oracle.sample.batches),
        ("position", oracle.positions(oracle.sample.rows)),
        ("head", None),
        ("dim", None),
    )


def key_axes(oracle: Oracle) -> Axes:
    """Names of the axes of gradients at the sampled keys."""
    return (("batch", oracle.sample.batches), ("position", oracle.sample.keys), ("head", None), ("dim", None))


def how_many(oracle: Oracle) -> str:
    """The compared tensors, for a check's detail."""
    count = oracle.sample.row_count
    return "every row" if count is None else f"{count} sampled rows of {oracle.workload.tokens}"


def _gradient_checks(oracle: Oracle, result: Result, index: int, name: str, expected: Expected) -> Iterator[Check]:
    gradient = result.gradients[index] if result.gradients else None
    if gradient is None:
        yield Check(name=name, passed=False, detail=NO_GRADIENT)
        return
    dout = "random dout" if oracle.sample.complete else f"dout random on {how_many(oracle)}, zero elsewhere"
    if name == CheckName.DQ:
        yield from compare_both_ways(name, oracle.sampled(gradient), expected, row_axes(oracle), dout)
        return
    keys = "every key" if oracle.sample.keys is None else f"{len(oracle.sample.keys)} keys"
    yield from compare_both_ways(name, oracle.sampled_keys(gradient), expected, key_axes(oracle), f"{dout}; {keys}")


def _lse_checks(function: Callable[..., Tensor], oracle: Oracle, seen: Seen) -> Iterator[Check]:
    """lse, and the out that is returned with it."""
    with torch.no_grad():
        both = function.with_lse(*oracle.inputs)  # type: ignore[attr-defined]
    if not isinstance(both, tuple) or len(both) != 2 or not all(isinstance(tensor, Tensor) for tensor in both):
        kinds = ", ".join(type(value).__name__ for value in both) if isinstance(both, tuple) else type(both).__name__
        yield Check(
            name=CheckName.LSE, passed=False, detail=f"with_lse returned ({kinds}), not the two tensors out and lse"
        )
        return
    out, lse = both
    if lse.dtype not in (torch.float32, torch.float64):
        yield Check(name=CheckName.LSE, passed=False, detail=f"lse has dtype {lse.dtype}, not float32 or float64")
        return
    lse = lse[None] if lse.ndim == 2 else lse
    sample = oracle.sample
    shape = [oracle.workload.batch_size, oracle.workload.num_heads, oracle.workload.rows]
    if list(lse.shape) != shape:
        yield Check(name=CheckName.LSE, passed=False, detail=f"lse has shape {list(lse.shape)}, not {shape}")
        return
    rows = lse[sample.batches.to(oracle.device)][:, :, sample.rows.to(oracle.device)]
    axes = (("batch", sample.batches), ("head", None), ("position", oracle.positions(sample.rows)))
    seen.lse = rows
    yield from compare_both_ways(CheckName.LSE, rows, oracle.expected[1], axes, how_many(oracle))
    form = form_checks(out, oracle.out_shape, oracle.dtype, oracle.device)
    broken = next((check for check in form if not check.passed), None)
    if broken is not None:
        yield Check(name=CheckName.OUT_WITH_LSE, passed=False, detail=f"of with_lse: {broken.detail}")
    else:
        yield compare(
            CheckName.OUT_WITH_LSE, oracle.sampled(out), oracle.expected[0], row_axes(oracle), how_many(oracle)
        )

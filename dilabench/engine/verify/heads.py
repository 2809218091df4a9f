"""The checks of a function of q, k, v (takes = "heads")."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dilabench.engine.verify.call import Call, Result, digest, form_checks, stream_check
from dilabench.engine.verify.compare import Axes, agreement, compare
from dilabench.engine.verify.oracle import Oracle
from dilabench.engine.verify.probes import probe_checks
from dilabench.engine.verify.tolerance import Expected
from dilabench.record import Check

NO_GRADIENT = "out carries no gradient for it, but the workload's mode needs one"


def heads_checks(function: Callable[..., Tensor], oracle: Oracle, deterministic: bool) -> Iterator[Check]:
    """Checks 1 to 5 of semantics.md §4, in an order in which the first that fails says most."""
    backward = oracle.workload.mode != "forward"
    # Expectations come before any call: a function may change its inputs.
    expected_out, _ = oracle.expected
    gradients = oracle.gradients if backward else ()
    second = [oracle.second_inputs(index) for index in range(oracle.planes.calls)]
    assert len(oracle.second_expected) == len(second)

    call = Call(function)
    first = call(oracle.inputs, oracle.sampled_dout if backward else None)
    form = form_checks(first.out, oracle.out_shape, oracle.dtype, oracle.device)
    yield from form
    if not all(check.passed for check in form):
        return
    kept = digest(first.out)
    yield compare("out", oracle.sampled(first.out), expected_out, row_axes(oracle), how_many(oracle))
    for index, (name, expected) in enumerate(zip(("dq", "dk", "dv"), gradients, strict=False)):
        yield _gradient_check(oracle, first, index, name, expected)
    results = [call(inputs, oracle.full_dout if backward else None) for inputs in second]
    yield from probe_checks(oracle, first.out, results)
    del results, second
    yield kept_check(first.out, kept)
    yield from repeat_checks(call, oracle, first, deterministic, expected_out.tolerance)
    if hasattr(function, "with_lse"):
        yield _lse_check(function, oracle)
    if oracle.device.type == "cuda":
        yield stream_check(call, oracle.inputs, first.out, 2 * expected_out.tolerance)
    yield call.unchanged()
    if call.changed:
        oracle.restore()


def repeat_checks(call: Call, oracle: Oracle, first: Result, deterministic: bool, tolerance: float) -> Iterator[Check]:
    """An identical call agrees, bitwise if that is declared; both are within tolerance of the oracle otherwise."""
    again = call(oracle.inputs, oracle.sampled_dout if first.gradients else None)
    limit = 0.0 if deterministic else 2 * tolerance
    detail = "two identical calls, bitwise" if deterministic else "two identical calls"
    pairs = [(first.out, again.out)]
    pairs += [(a, b) for a, b in zip(first.gradients, again.gradients, strict=True) if a is not None and b is not None]
    checks = [agreement("repeat", a, b, limit, detail) for a, b in pairs]
    yield next((check for check in checks if not check.passed), checks[0])


def kept_check(out: Tensor, kept: Tensor) -> Check:
    """The first result still holds what it held when it was returned."""
    same = torch.equal(digest(out), kept)
    detail = None if same else "a later call wrote into the result of an earlier one: out must be a fresh tensor"
    return Check(name="result_kept", passed=same, detail=detail)


def row_axes(oracle: Oracle) -> Axes:
    """Names of the axes of sampled rows."""
    return (("batch", oracle.sample.batches), ("position", oracle.sample.rows), ("head", None), ("dim", None))


def how_many(oracle: Oracle) -> str:
    """What was compared, for a check's detail."""
    count = oracle.sample.row_count
    return "every row" if count is None else f"{count} sampled rows of {oracle.workload.tokens}"


def _gradient_check(oracle: Oracle, result: Result, index: int, name: str, expected: Expected) -> Check:
    gradient = result.gradients[index] if result.gradients else None
    if gradient is None:
        return Check(name=name, passed=False, detail=NO_GRADIENT)
    dout = "random dout" if oracle.sample.complete else f"dout random on {how_many(oracle)}, zero elsewhere"
    if name == "dq":
        return compare(name, oracle.sampled(gradient), expected, row_axes(oracle), dout)
    axes = (("batch", oracle.sample.batches), ("position", oracle.sample.keys), ("head", None), ("dim", None))
    keys = "every key" if oracle.sample.keys is None else f"{len(oracle.sample.keys)} keys"
    return compare(name, oracle.sampled_keys(gradient), expected, axes, f"{dout}; {keys}")


def _lse_check(function: Callable[..., Tensor], oracle: Oracle) -> Check:
    with torch.no_grad():
        _, lse = function.with_lse(*oracle.inputs)  # type: ignore[attr-defined]
    if lse.dtype not in (torch.float32, torch.float64):
        return Check(name="lse", passed=False, detail=f"lse has dtype {lse.dtype}, not float32 or float64")
    lse = lse[None] if lse.ndim == 2 else lse
    sample = oracle.sample
    shape = [oracle.workload.batch_size, oracle.workload.num_heads, oracle.workload.seq_len]
    if list(lse.shape) != shape:
        return Check(name="lse", passed=False, detail=f"lse has shape {list(lse.shape)}, not {shape}")
    rows = lse[sample.batches.to(oracle.device)][:, :, sample.rows.to(oracle.device)]
    axes = (("batch", sample.batches), ("head", None), ("position", sample.rows))
    return compare("lse", rows, oracle.expected[1], axes, how_many(oracle))

"""Verification of a call that fills the device: sampled rows against the oracle, without second inputs.

It holds out, dq, dk and dv of one call to float64 on the rows of `engine.verify.oracle.sample`. The other probes of
semantics.md §4 need more memory than such a call leaves; shorter rows of the same implementation go through them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import device_of
from dilabench.engine.verify.call import form_checks
from dilabench.engine.verify.compare import compare_both_ways
from dilabench.engine.verify.heads import GRADIENTS, NO_GRADIENT, how_many, row_axes
from dilabench.engine.verify.oracle.in_place import InPlaceOracle
from dilabench.engine.verify.oracle.sharded import RanksOracle
from dilabench.record import Check, CheckName, Verification


def verify_sampled_rows(call: PreparedCall) -> Verification:
    """Call once more and hold the result to the oracle. The call's dout is zero outside the sampled rows afterwards."""
    started = time.perf_counter_ns()
    inputs = call.inputs(0)
    there = device_of(inputs.q.device).verifies_on
    dout = call.output_gradient().to(there) if call.workload.mode != "forward" else None
    given = (inputs.q.to(there), inputs.k.to(there), inputs.v.to(there))
    if call.world is None:
        oracle = InPlaceOracle(call.workload, given, dout, call.spec.seed)
    else:
        oracle = RanksOracle(call.workload, given, dout, call.spec.seed, call.shards, call.world)
    checks = tuple(_checks(call, oracle))
    duration = max(0, time.perf_counter_ns() - started)
    return Verification(checks=checks, sampled_rows=oracle.sample.row_count, duration_ns=duration)


def _checks(call: PreparedCall, oracle: InPlaceOracle) -> Iterator[Check]:
    inputs = call.inputs(0)
    backward = call.workload.mode != "forward"
    with torch.set_grad_enabled(backward):
        out = call.function(inputs.q, inputs.k, inputs.v)
    form = form_checks(
        out.detach() if isinstance(out, Tensor) else out, oracle.out_shape, oracle.dtype, inputs.q.device
    )
    yield from form
    if not oracle.together(all(check.passed for check in form)):
        return
    gradients: tuple[Tensor | None, ...] = ()
    if backward:
        full = torch.autograd.grad(out, inputs.distinct, oracle.sampled_dout.to(out.device), allow_unused=True)
        taken = (oracle.sampled, oracle.keys_of, oracle.keys_of)
        gradients = tuple(
            None if x is None else take(x.to(oracle.device)).clone() for take, x in zip(taken, full, strict=True)
        )
        del full
    rows = oracle.sampled(out.detach().to(oracle.device)).clone()
    # Only now is there room for the oracle's own tensors.
    del out
    yield from compare_both_ways(CheckName.OUT, rows, oracle.expected[0], row_axes(oracle), how_many(oracle))
    keys = (("batch", oracle.sample.batches), ("position", oracle.sample.keys), ("head", None), ("dim", None))
    for index, gradient in enumerate(gradients):
        name, axes = GRADIENTS[index], keys if index else row_axes(oracle)
        if gradient is None:
            yield Check(name=name, passed=False, detail=NO_GRADIENT)
        else:
            yield from compare_both_ways(name, gradient, oracle.gradients[index], axes, f"dout on {how_many(oracle)}")

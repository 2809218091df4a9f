"""The checks of a module with projections around the attention (takes = "embeddings").

The reference is a float64 copy of the module whose attention core, its attribute `attention`, is replaced by the oracle
on the sampled rows. Other rows of this copy are wrong and not compared. Their dout is zero, so gradients of the input
and of every parameter are still exact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dilabench.engine.device.device import device_of
from dilabench.engine.verify.call import Call, Result, buffer_reuse_check, digest, form_checks, stream_check
from dilabench.engine.verify.compare import compare_both_ways, locate, slope_on
from dilabench.engine.verify.cores import Constant, CoreCallsError, ReplacedCore, SampledRows, shell_of
from dilabench.engine.verify.heads import NO_GRADIENT, how_many, repeat_checks
from dilabench.engine.verify.oracle.blocks import accumulation_dtype
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.rounding import gradient_sizes, sized_rows
from dilabench.engine.verify.oracle.tolerance import (
    Expected,
    eps,
    expect,
    gradient_floor_ulps,
    out_floor_ulps,
    plain_dtype,
)
from dilabench.record import Check, CheckName
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import alike_heads, seen_by

# How much of the probed position is added to itself: its share must show above the rounding of the rows that see it.
PROBE_GAIN = 2.0**10
# How near a result is to a multiple of a projection, in ulp, and the chance of that, in bits, by which it would be so
# anyway.
PROJECTION_ULPS, CHANCE_BITS = 64.0, 40.0


def embeddings_checks(
    function: Callable[..., Tensor], module: nn.Module, oracle: Oracle, deterministic: bool
) -> Iterator[Check]:
    """The core, out, gradients of input and parameters, dependency, repetition. Calls `function`, copies `module`."""
    workload = oracle.workload
    core, backward = _core_check(module, oracle), workload.mode != "forward"
    trained = {name: x for name, x in nn.Module.named_parameters(module) if x.requires_grad}
    names, parameters = [*trained], [*trained.values()]
    if core.passed:
        try:
            expected = _shared(module, oracle, names, backward)
        except CoreCallsError as error:
            core = Check(name=CheckName.CORE, passed=False, detail=str(error))
    yield core
    if not core.passed:
        return

    call = Call(function, parameters)
    dout = oracle.sampled_dout if backward else None
    first = call(oracle.inputs, dout)
    form = form_checks(first.out, oracle.out_shape, oracle.dtype, oracle.device)
    yield from form
    if not all(check.passed for check in form):
        return
    kept = digest(first.out)
    axes = (("batch", oracle.sample.batches), ("position", oracle.sample.rows), ("", None), ("dim", None))
    yield from compare_both_ways(
        CheckName.OUT, _in_rows(oracle.sampled(first.out)), expected[CheckName.OUT], axes, how_many(oracle)
    )
    if backward:
        yield from _gradient_checks(oracle, first, names, expected)
    yield _dependency(call, oracle)
    yield buffer_reuse_check(call, oracle.inputs, first.out, kept)
    yield from repeat_checks(call, oracle, first, deterministic, expected[CheckName.OUT].tolerance)
    if device_of(oracle.device).has_streams:
        yield stream_check(call, oracle.inputs, first.out, 2 * expected[CheckName.OUT].tolerance)
    yield from call.unchanged()
    if call.changed:
        oracle.restore()


def _core_check(module: nn.Module, oracle: Oracle) -> Check:
    """The check that the module is projections around one call of its core.

    With a constant core, position i of out, and of the core's q, k and v, depends only on position i of the input. None
    of them is a multiple of a projection, because the core has its own scale.
    """
    workload = oracle.workload
    probe = copy.deepcopy(module)
    core = Constant()
    probe.attention = ReplacedCore(core)
    x = oracle.inputs[0] if workload.layout == "packed" else oracle.inputs[0][:1]
    generator = torch.Generator().manual_seed(oracle.seed + 2)
    other, place = x.clone(), int(torch.randint(workload.seq_len, (1,), generator=generator))
    other[..., place, :] = x[..., place, :].flip(-1) + 1
    with torch.no_grad():
        outs = [probe(tensor, tensor, tensor).detach() for tensor in (x, other)]
    failed = _why_not_the_core(core, outs, x, place, probe, workload)
    detail = failed or "one call, of projections of each position"
    return Check(name=CheckName.CORE, passed=failed is None, detail=detail)


def _why_not_the_core(
    core: Constant, outs: list[Tensor], x: Tensor, place: int, module: nn.Module, workload: Workload
) -> str | None:
    if len(core.calls) != 2:
        return f"one call of the module {_calls_text(len(core.calls) / 2)}"
    shapes = [[*x.shape[:-1], heads, workload.head_dim] for heads in (workload.num_heads, *[workload.num_kv_heads] * 2)]
    given = [list(tensor.shape) for tensor in core.calls[0]]
    if given != shapes:
        return f"'attention' was called with {given}, not with q, k and v of {shapes}"
    for name, before, after in zip(("q", "k", "v"), *core.calls, strict=True):
        row = _row_that_depends(before.flatten(-2), after.flatten(-2), place)
        if row is not None:
            return f"position {row} of {name} depends on position {place} of the input: it is no projection"
        if torch.equal(before, after):
            return f"{name} does not depend on the input: it is no projection"
        factor = _factor_of_projection(before.flatten(0, -3), x.flatten(0, -2), module)
        if factor is not None:
            return f"{name} is {factor:.6g} times a projection of the input: 'attention' already scales"
    row = _row_that_depends(outs[0], outs[1], place)
    if row is not None:
        return (
            f"with 'attention' replaced by a constant, position {row} of out depends on position {place} of the input"
        )
    return None


def _calls_text(count: float) -> str:
    times = "never" if not count else "once" if count == 1 else f"{count:g} times"
    return f"called its attribute 'attention' {times}: that is the core, which forward must call once, with q, k and v"


def _row_that_depends(before: Tensor, after: Tensor, place: int) -> int | None:
    """A position other than `place` at which two [..., N, E] differ by more than rounding."""
    if before.shape != after.shape:
        return 0
    off = (before - after).abs().amax(-1).flatten(0, -2).amax(0) if before.ndim > 2 else (before - after).abs().amax(-1)
    off[place] = 0
    limit = 16 * eps(before.dtype) * float(before.abs().max())
    worst = int(off.nan_to_num_(torch.inf).argmax())
    return worst if float(off[worst]) > limit else None


def _factor_of_projection(heads: Tensor, x: Tensor, module: nn.Module) -> float | None:
    """The factor of q, k or v, [N, H, D], relative to a projection of x, [N, E], by one of the module's matrices, if it
    is not 1; None also if there are too few values to tell.

    Differences of positions are compared, so that a bias does not count. n values that have nothing to do with the
    projection are within a share r of a multiple of it with a probability of about r^(n - 1). Differences at more than
    E positions tell nothing new: they are linear in those at E.
    """
    near = PROJECTION_ULPS * eps(heads.dtype)
    wanted = 1 + CHANCE_BITS / -math.log2(near)
    used = min(len(x) - 1, x.shape[1], math.ceil(wanted / heads[0].numel()))
    if used * heads[0].numel() < wanted:
        return None
    change = (heads[1 : used + 1] - heads[:1]).flatten(1).double()
    step = (x[1 : used + 1] - x[:1]).double()
    size = max(float(change.norm()), 1e-300)
    for matrix in module.parameters():
        for weights in (matrix, matrix.mT) if matrix.ndim == 2 else ():
            if weights.shape[1] != step.shape[1] or len(weights) % change.shape[1]:
                continue
            for part in (step @ weights.detach().double().mT).split(change.shape[1], 1):
                factor = float((change * part).sum()) / max(float(part.square().sum()), 1e-300)
                rest = float((change - factor * part).norm()) / size
                if rest < near and abs(factor - 1) > 4 * near:
                    return factor
    return None


def _shared(module: nn.Module, oracle: Oracle, names: list[str], backward: bool) -> dict[str, Expected]:
    """`_expected`, which the oracle keeps for the next module that is the same around its attention."""
    shell = shell_of(module)
    if shell is not None and oracle.around is not None and shell.computes_as(oracle.around[0]):
        return oracle.around[1]
    # Kept tensors are freed first: both together may not fit.
    oracle.around = None
    expected = _expected(module, oracle, names, backward)
    if shell is not None:
        oracle.around = shell, expected
    return expected


def _expected(module: nn.Module, oracle: Oracle, names: list[str], backward: bool) -> dict[str, Expected]:
    """out on the sampled rows, 'dx' and the gradient of each parameter, as `_in_rows` shapes them."""
    reference = _WithOracle(module, oracle, torch.float64, backward)
    exact = reference.results(names)
    moved = reference.moved(names) if backward else {}
    moved_by_out = reference.moved_by_out(names)
    # Its graph holds q, k and v of all positions.
    del reference
    plain = _WithOracle(module, oracle, plain_dtype(oracle.dtype), backward).results(names)
    workload, rows = oracle.workload, oracle.workload.seq_len * len(oracle.sample.batches)
    expected = {}
    for name, value in exact.items():
        size = (
            _spread(value) if name in (CheckName.OUT, CheckName.DX) or value.ndim < 2 else _spread(value) + value.abs()
        )
        floor, summed = out_floor_ulps(oracle.dtype), 0 if name in (CheckName.OUT, CheckName.DX) else rows
        if name in moved_by_out:
            size = size + _spread(moved_by_out[name])
        if name in moved:
            size, floor = size + _spread(moved[name]), gradient_floor_ulps(workload, oracle.dtype)
        value, size, other = map(_in_rows, (value, size, plain[name]))
        expected[name] = expect(value, size, other, workload, oracle.dtype, floor, summed=summed)
    return expected


def plain_embeddings(module: nn.Module, oracle: Oracle) -> tuple[Tensor, Tensor]:
    """out on the sampled rows by the module around the plain computation, in the workload's dtype, and its size."""
    reference = _WithOracle(module, oracle, oracle.dtype, backward=False)
    value, moved = reference.results([])[CheckName.OUT].double(), reference.moved_by_out([])
    return value, _spread(value) + (_spread(moved[CheckName.OUT].double()) if moved else 0.0)


class _WithOracle:
    """The module with the oracle for its attention, run once on the sampled batches in `dtype`."""

    def __init__(self, module: nn.Module, oracle: Oracle, dtype: torch.dtype, backward: bool) -> None:
        self._oracle, self._backward = oracle, backward
        self._module = copy.deepcopy(module).to(dtype)
        self._core = SampledRows(oracle.workload, oracle.sample.rows, dtype)
        self._module.attention = ReplacedCore(self._core)
        self._packed = oracle.workload.layout == "packed"
        batches = oracle.sample.batches.to(oracle.device)
        x = oracle.inputs[0] if self._packed else oracle.inputs[0][batches]
        self._x = x.detach().to(dtype).requires_grad_(backward)
        if backward:
            dout = oracle.sampled_dout if self._packed else oracle.sampled_dout[batches]
            self._dout = dout.to(dtype)
        with torch.set_grad_enabled(backward):
            self._out = self._module(self._x, self._x, self._x)
        if len(self._core.seen) != 1:
            raise CoreCallsError(f"computing in {dtype}, one call of the module {_calls_text(len(self._core.seen))}")

    def results(self, names: list[str]) -> dict[str, Tensor]:
        """out on the sampled rows, 'dx' and the gradients of the parameters `names`."""
        rows = self._oracle.sample.rows.to(self._oracle.device)
        results: dict[str, Tensor] = {CheckName.OUT: self._batched(self._out)[:, rows].detach()}
        if self._backward:
            by_name = dict(self._module.named_parameters())
            found = self._gradients(self._out, [self._x, *(by_name[name] for name in names)], self._dout)
            results[CheckName.DX] = self._batched(found[0])
            results.update(zip(names, found[1:], strict=True))
        return results

    def moved(self, names: list[str]) -> dict[str, Tensor]:
        """The effect of independent rounding of dq, dk and dv on 'dx' and on the gradients of the parameters `names`:
        their natural sizes with random signs, propagated back through the projections. Only gradients that depend on
        them are returned.
        """
        q, k, v, out, lse = self._core.seen[0]
        workload, rows = self._core.workload, self._oracle.sample.rows
        place = rows.to(self._oracle.device)
        dout, dq, dk, dv = map(self._core.batched, self._gradients(self._out, [out, q, k, v], self._dout))
        q_heads, k_heads, v_heads = (self._core.batched(x.detach()) for x in (q, k, v))
        exact = dq[:, place], dk, dv
        sizes = gradient_sizes(dout[:, place], q_heads, k_heads, v_heads, lse, workload, rows, None, exact)
        moved = [torch.zeros_like(dq), *sizes[1:]]
        moved[0][:, place] = sizes[0]
        moved = [moved_rows.view_as(x) for moved_rows, x in zip(self._signed(moved), (q, k, v), strict=True)]
        by_name = dict(self._module.named_parameters())
        targets = [self._x, *(by_name[name] for name in names)]
        of_x, *found = torch.autograd.grad([q, k, v], targets, moved, allow_unused=True)
        named = zip([CheckName.DX, *names], [self._batched(of_x), *found], strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}

    def moved_by_out(self, names: list[str]) -> dict[str, Tensor]:
        """The same for rounding of the attention's out: what moves 'out' and the gradients of parameters behind it."""
        q, k, v, out, _ = self._core.seen[0]
        place, dtype = self._oracle.sample.rows.to(self._oracle.device), self._oracle.dtype
        q, k, v = (self._core.batched(x.detach()) for x in (q, k, v))
        ulps = eps(accumulation_dtype(dtype)) / eps(dtype)
        size = sized_rows(q, k, v, self._core.workload, self._oracle.sample.rows, ulps).size
        moved = torch.zeros_like(self._core.batched(out.detach()))
        moved[:, place] = self._signed([size.to(moved.dtype)])[0]
        # Without gradients, what the module gives around `out` is known.
        unmoved = {CheckName.OUT: self._batched(self._out.detach())[:, place]}
        before = self._behind(out.detach(), names) if self._backward else unmoved
        after = self._behind(out.detach() + moved.view_as(out), names)
        return {name: after[name] - value for name, value in before.items()}

    def _behind(self, out: Tensor, names: list[str]) -> dict[str, Tensor]:
        """'out' on the sampled rows and the gradients of parameters behind the attention, where it gives `out`."""
        self._core.instead = out
        with torch.set_grad_enabled(self._backward):
            y = self._module(self._x, self._x, self._x)
        self._core.instead = None
        place = self._oracle.sample.rows.to(self._oracle.device)
        found: dict[str, Tensor] = {CheckName.OUT: self._batched(y.detach())[:, place]}
        if self._backward:
            by_name = dict(self._module.named_parameters())
            gradients = torch.autograd.grad(y, [by_name[name] for name in names], self._dout, allow_unused=True)
            found |= {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        return found

    def _signed(self, sizes: list[Tensor]) -> list[Tensor]:
        """Each number with a random sign."""
        generator = torch.Generator(sizes[0].device).manual_seed(self._oracle.seed)
        signs = (torch.randint(0, 2, size.shape, generator=generator, device=size.device) for size in sizes)
        return [size * (2 * sign - 1) for size, sign in zip(sizes, signs, strict=True)]

    def _gradients(self, out: Tensor, targets: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, targets, dout, retain_graph=True)

    def _batched(self, x: Tensor) -> Tensor:
        return x[None] if self._packed else x


def _spread(value: Tensor) -> Tensor:
    """Root mean square of each row of embeddings [B, N, E], of a vector (biases, norms), and of row and column of a
    matrix: its gradient is a sum of outer products."""
    squares = value.square()
    if value.ndim == 2:
        mean = squares.mean().clamp_min(torch.finfo(value.dtype).tiny)
        return (squares.mean(0, keepdim=True) * squares.mean(1, keepdim=True) / mean).sqrt()
    return squares.mean(-1, keepdim=True).sqrt()


def _in_rows(x: Tensor) -> Tensor:
    """With four axes, rows along the last, as heads have them: [B, N, 1, E] of [B, N, E], [1, 1, E, F] of a matrix."""
    return x[:, :, None] if x.ndim == 3 else x[(None,) * (4 - x.ndim)]


def _gradient_checks(
    oracle: Oracle, result: Result, names: list[str], expected: dict[str, Expected]
) -> Iterator[Check]:
    dout = "random dout" if oracle.sample.complete else f"dout random on {how_many(oracle)}, zero elsewhere"
    if not result.gradients:
        yield Check(name=CheckName.DX, passed=False, detail=NO_GRADIENT)
        return
    terms = None
    for name, gradient in zip([CheckName.DX, *names], result.gradients, strict=True):
        title = name if name == CheckName.DX else f"d {name}"
        if gradient is None:
            yield Check(name=title, passed=False, detail=NO_GRADIENT)
        elif name == CheckName.DX:
            x_axes = (("batch", oracle.sample.batches), ("position", None), ("", None), ("dim", None))
            of_x = _in_rows(oracle.chosen(gradient))
            yield from compare_both_ways(title, of_x, expected[name], x_axes, dout)
            terms = slope_on(of_x, expected[name]) if of_x.shape == expected[name].value.shape else None
        else:
            axes = (*[("", None)] * (4 - gradient.ndim), *((f"axis {axis}", None) for axis in range(gradient.ndim)))
            yield from compare_both_ways(title, _in_rows(gradient), expected[name], axes, dout, terms)


def _dependency(call: Call, oracle: Oracle) -> Check:
    """Changing v at one position per batch row changes exactly the rows that see it in some head.

    Queries are projected from zeros: n keys then weigh about 1/n each, and none is too light to be seen.
    """
    workload = oracle.workload
    x = oracle.inputs[0]
    zeros, v = torch.zeros_like(x), x.clone()
    keys = _probed_keys(oracle)
    for row, key in zip(oracle.batched(v), keys, strict=True):
        row[key] *= PROBE_GAIN
    first, changed = call((zeros, x, x)).out, call((zeros, x, v)).out
    if changed.shape != first.shape:
        return Check(
            name=CheckName.DEPENDENCY, passed=False, detail=f"with other inputs out has shape {list(changed.shape)}"
        )
    differs = (oracle.batched(changed) != oracle.batched(first)).any(-1)
    seen = torch.zeros(differs.shape, dtype=torch.bool)
    firsts = [heads[0] for heads in alike_heads(workload)]
    for index, key in enumerate(keys):
        for head in firsts:
            seen[index, torch.from_numpy(seen_by(workload, head, key))] = True
    wrong = differs != seen.to(oracle.device)
    count = int(wrong.sum())
    if not count:
        return Check(name=CheckName.DEPENDENCY, passed=True, error=0.0, tolerance=0.0, detail="one key per batch row")
    place = int(wrong.flatten().int().argmax())
    sees = bool(differs.flatten()[place])
    key = keys[place // workload.seq_len]
    return Check(
        name=CheckName.DEPENDENCY,
        passed=False,
        error=float(count),
        tolerance=0.0,
        where=locate(place, wrong.shape, (("batch", None), ("position", None))),
        detail=f"the row {'sees' if sees else 'misses'} key {key}, which it {'must not' if sees else 'must'} see",
    )


def _probed_keys(oracle: Oracle) -> list[int]:
    generator = torch.Generator().manual_seed(oracle.seed + 1)
    length = oracle.workload.seq_len
    drawn = torch.randint(length // 2, length, (oracle.workload.batch_size,), generator=generator)
    return [int(key) for key in drawn]

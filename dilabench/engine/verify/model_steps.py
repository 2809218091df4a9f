"""The checks of a step of a model (takes = "model"), against the same model with other attentions.

Two of two layers over a few documents, or one sequence, or a few tokens that are generated one after another, with the
implementation built for them:

1. Results and all gradients against eager attention in float64. The limit is the error of SDPA in the
   workload's dtype: each error may be twice SDPA's, the worst row's three times.
2. One layer: other numbers in one token change those rows, and no others, that they change with eager attention. It
   finds a key too many or too few, whatever its weight.

And the timed call itself, if its attention is dense: against SDPA in float64, or float32 for half precision, each
document by itself and with layers recomputed, within the rounding of SDPA in the workload's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target
from dilabench.contracts import BuildContext
from dilabench.engine.call.inputs import TORCH_DTYPE, input_shapes, result_form
from dilabench.engine.call.kept_call import KeptCall
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import SecondSpec
from dilabench.engine.device.device import device_of
from dilabench.engine.verify.call import Call, Result, form_checks
from dilabench.engine.verify.heads import NO_GRADIENT
from dilabench.engine.verify.oracle.tolerance import eps
from dilabench.record import Check, CheckName
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import hides_nothing

LAYERS = 2
# Documents of the short form, of unlike lengths, one of a single token; and the tokens of a padded one.
DOCUMENTS, TOKENS = (61, 1, 96, 34), 192
# Tokens of the short form of generated ones, and how many are generated, behind few: a key among few shows in half
# precision, too.
WITH_GENERATED, GENERATED = 60, 56
# Padding of its first sequence.
PADDING = 37
# The widest window of its layers, and the largest cap of its scores, which are about 1.
WINDOW, SOFTCAP = 40, 2.0
# Times as long for patterns that are not dense, whose structures are longer.
OF_PATTERN = 8
# The allowed errors, as multiples of SDPA's and in ulp; the share of the largest gradient's norm below which one
# may be rounding.
MEAN_FACTOR, WORST_FACTOR, ULPS, LEAST_OF_GRADIENTS = 2.0, 3.0, 4.0, 1e-2
# A gradient of fewer numbers than this is a single row.
FEW = 64
# The change of a row, in ulp of its size, that rounding may hide.
HIDDEN_ULPS = 16.0


@dataclass(frozen=True, slots=True)
class Exact:
    """Right results of a workload, and the errors of its plain form: out's mean and worst row, gradients."""

    out: Tensor
    gradients: tuple[Tensor | None, ...]
    plain: tuple[float, float]
    plain_gradients: tuple[float, ...]


@dataclass(slots=True)
class ModelSteps:
    """Models with the attentions that others are compared with, and their results, kept for rows of one workload."""

    device: torch.device
    _known: dict[tuple[Workload, int], Exact] = field(default_factory=dict)

    def checks(self, call: PreparedCall) -> Iterator[Check]:
        """The checks of a prepared call."""
        short = short_form(call.workload)
        seed, seconds = call.spec.seed, call.spec.seconds
        own = SecondSpec(name=call.spec.case.implementation, target=call.spec.target, backend=call.spec.backend)
        x, dout = _drawn(short, seed, self.device)
        built = _built(own, short, self.device)
        parameters = _same_parameters(built, _built(seconds[0], short, self.device))
        yield parameters
        if not parameters.passed:
            return
        names = [CheckName.DX, *(f"d {name}" for name in _trained(built))]
        function = Call(built, [*_trained(built).values()])
        yield from self._compared(function, names, short, x, dout, seed, seconds)
        yield _dependency(own, seconds[0], short, x, self.device)
        if hides_nothing(call.workload):
            function = Call(call.whole, call.parameters)
            x = call.inputs(0).q.detach()
            dout = call.output_gradient() if call.workload.mode != "forward" else None
            names = [CheckName.DX, *(f"d {name}" for name in _trained(call.module))]
            yield from self._compared(function, names, call.workload, x, dout, seed, seconds[1:], as_timed=True)
            yield from function.unchanged()

    def forget(self) -> None:
        """Free all results."""
        self._known.clear()

    def _compared(
        self,
        function: Call,
        names: Sequence[str],
        workload: Workload,
        x: Tensor,
        dout: Tensor | None,
        seed: int,
        seconds: Sequence[SecondSpec],
        *,
        as_timed: bool = False,
    ) -> Iterator[Check]:
        of = "against sdpa" if as_timed else "short, against eager"
        key = workload, seed
        if key not in self._known:
            if len(self._known) > 2:
                self._known.clear()
            self._known[key] = _exact(workload, x, dout, seconds, self.device, as_timed)
        exact = self._known[key]
        result = function([x], dout)
        shape, dtype = result_form(workload, "model", x)
        form = form_checks(result.out, shape, dtype, self.device)
        yield from form
        if not all(check.passed for check in form):
            return
        ulps = ULPS * eps(x.dtype)
        mean, worst = _errors(result.out, exact.out)
        allowed = MEAN_FACTOR * exact.plain[0] + ulps, WORST_FACTOR * exact.plain[1] + ulps
        yield _check(CheckName.OUT_ALL_ROWS, mean, allowed[0], f"{of}, all rows together")
        yield _check(CheckName.OUT, worst, allowed[1], f"{of}, the worst row")
        if dout is None:
            return
        errors = gradient_errors(result.gradients, exact.gradients)
        for name, gradient, error, plain in zip(names, exact.gradients, errors, exact.plain_gradients, strict=True):
            # Of the sinks of a few heads, say, chance decides how far off the plain form is.
            factor = WORST_FACTOR if gradient is not None and gradient.numel() < FEW else MEAN_FACTOR
            yield _check(name, error, factor * plain + ulps, f"{of}, {NO_GRADIENT}" if error is None else of)


def short_form(workload: Workload) -> Workload:
    """Two layers over few tokens."""
    assert workload.model is not None
    times = 1 if workload.is_dense else OF_PATTERN
    changes: dict[str, Any] = {
        "model": workload.model.small(LAYERS, WINDOW),
        "softcap": None if workload.softcap is None else min(SOFTCAP, workload.softcap),
        "batch_size": min(2, workload.batch_size),
        "seq_len": TOKENS * times,
    }
    if workload.query_len is not None:
        changes |= {"seq_len": WITH_GENERATED * times, "query_len": GENERATED}
    if workload.model.lengths is not None:
        tokens = changes["seq_len"]
        lengths = (tokens, tokens + PADDING)[: changes["batch_size"]]
        changes["model"] = changes["model"].model_copy(update={"lengths": lengths})
        changes["seq_len"] = tokens + PADDING
    if workload.layout == "packed":
        bounds = (0, *accumulate(length * times for length in DOCUMENTS))
        changes |= {"cu_seqlens": bounds, "seq_len": bounds[-1]}
    return workload.replace(**changes)


def _drawn(workload: Workload, seed: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Embeddings, and the gradient of the result unless the mode is forward."""
    generator = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": device}
    x = torch.randn(input_shapes(workload, "model")[0], dtype=TORCH_DTYPE[workload.dtype], **options)
    if workload.mode == "forward":
        return x, None
    shape, dtype = result_form(workload, "model", x)
    return x, torch.randn(shape, dtype=dtype, **options)


def _built(second: SecondSpec, workload: Workload, device: torch.device) -> nn.Module:
    backend = load_backend(second.backend) if second.backend else None
    module: nn.Module = load_target(second.target)(workload, BuildContext(device=device, backend=backend))
    return module


def _trained(module: nn.Module | None) -> dict[str, nn.Parameter]:
    assert module is not None
    return {name: part for name, part in nn.Module.named_parameters(module) if part.requires_grad}


def _same_parameters(built: nn.Module, reference: nn.Module) -> Check:
    """The check that a model has the parameters of the seed."""
    ours, theirs = _trained(built), _trained(reference)
    different = sorted(ours.keys() ^ theirs.keys()) or [
        name for name, part in ours.items() if not torch.equal(part, theirs[name])
    ]
    detail = f"parameters are not those of the seed: {', '.join(different[:4])}" if different else None
    return Check(name=CheckName.CORE, passed=not different, detail=detail)


def _dependency(own: SecondSpec, eager: SecondSpec, short: Workload, x: Tensor, device: torch.device) -> Check:
    """The check that one layer carries each token to the rows to which eager attention carries it, and to no others."""
    assert short.model is not None
    one = short.replace(mode="forward", model=short.model.model_copy(update={"layers": 1}))
    module: Any = _built(own, one, device)
    reference: Any = _built(eager, one, device).double()
    parts = [tokens for _, tokens in reference.parts]
    ends = {place for tokens in parts for place in (tokens.start or 0, tokens.stop - 1)}
    # The padding next to a sequence.
    ends |= {
        place for tokens in parts for place in ((tokens.start or 0) - 1, tokens.stop) if 0 <= place < short.seq_len
    }
    before, last = short.first_row, short.seq_len - 1
    probed = sorted({*ends, last // 2, last - 1, *([before - 1, before] if before else [])})
    if before:
        x = torch.cat([module.prefix, x], 1)

    def results(tokens: Tensor) -> tuple[Tensor, Tensor]:
        if before:
            module.start(tokens[:, :before])
            reference.start(tokens[:, :before].double())
        given = tokens[:, before:] if before else tokens
        with torch.no_grad():
            return module(given, given, given), _by_documents(reference, one, given.double(), None).out

    first, exact = results(x)
    # Kernels that add in another order each time are not equal in every bit.
    noise = (results(x)[0] - first).abs().max()
    size, name = exact.norm(dim=-1), CheckName.DEPENDENCY
    for place in probed:
        other = x.clone()
        other[..., place, :] = x[..., place, :].flip(-1)
        out, wanted = results(other)
        moved, change = (out - first).abs().amax(-1) > noise, (wanted - exact).norm(dim=-1)
        wrong = torch.where(moved, change == 0, change > HIDDEN_ULPS * eps(x.dtype) * size)
        if wrong.any():
            row = int(wrong.nonzero()[0, -1])
            does = "depends" if bool(moved[wrong][0]) else "does not depend"
            return Check(name=name, passed=False, detail=f"in one layer, row {row} {does} on token {place}")
    return Check(name=name, passed=True, detail=f"{len(probed)} tokens in one layer")


def _exact(
    workload: Workload,
    x: Tensor,
    dout: Tensor | None,
    seconds: Sequence[SecondSpec],
    device: torch.device,
    as_timed: bool,
) -> Exact:
    """By the first model in a wider dtype, and the errors of the last, in the workload's, for a dense workload."""
    wide = torch.float64 if x.dtype.itemsize > 2 or not as_timed else torch.float32
    module: Any = _built(seconds[0], workload, device).to(wide)
    if as_timed and dout is not None:
        module.checkpointed()
    found = _by_documents(module, workload, x.to(wide), None if dout is None else dout.to(wide))
    module = None
    device_of(device).release_cached()
    second = seconds[-1] if hides_nothing(workload) else seconds[0]
    plain = _by_documents(_built(second, workload, device), workload, x, dout)
    errors = () if dout is None else gradient_errors(plain.gradients, found.gradients)
    plain_errors = tuple(0.0 if error is None else error for error in errors)
    return Exact(found.out, found.gradients, _errors(plain.out, found.out), plain_errors)


def _by_documents(module: Any, workload: Workload, x: Tensor, dout: Tensor | None) -> Result:
    """Results of a model, each document and padded sequence by itself, and the sums of its gradients."""
    leaf = x.detach().requires_grad_(dout is not None)
    packed = workload.layout == "packed"
    whole, weights = (leaf[None], None if dout is None else dout[None]) if packed else (leaf, dout)
    shape, dtype = result_form(workload, "model", x)
    out = torch.zeros(shape, dtype=dtype, device=x.device)
    with torch.set_grad_enabled(dout is not None):
        for items, tokens in module.parts:
            rows = tokens if workload.query_len is None else slice(None)
            part = module.alone(whole, items, tokens)
            if weights is not None:
                part.backward(weights[items, rows])
            (out[None] if packed else out)[items, rows] = part.detach()
    gradients = () if dout is None else (leaf.grad, *(part.grad for part in _trained(module).values()))
    return Result(out, gradients)


def _errors(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square and largest error of a row, in sizes of an average row."""
    difference = (actual.double() - exact.double()).flatten(0, -2).norm(dim=-1)
    # Losses have a mean, which is no measure of what they tell.
    wanted = exact.double().flatten(0, -2)
    mean = wanted.mean(0) if wanted.shape[-1] == 1 else 0.0
    size = (wanted - mean).norm(dim=-1).square().mean().sqrt().clamp_min(1e-300)
    return float(difference.square().mean().sqrt() / size), float(difference.max() / size)


def gradient_errors(actual: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> tuple[float | None, ...]:
    """The length of each difference in lengths of the right gradient; None for one that is not there."""
    norms = [0.0 if value is None else float(torch.linalg.vector_norm(value.double())) for value in exact]
    least = LEAST_OF_GRADIENTS * max(norms, default=0.0)
    errors: list[float | None] = []
    for given, value, norm in zip(actual, exact, norms, strict=True):
        if value is None or given is None or given.shape != value.shape:
            # None is 0.
            errors.append(0.0 if given is None and not norm else None)
        else:
            off = torch.linalg.vector_norm(given.double() - value.double())
            errors.append(float(off) / max(norm, least, 1e-300))
    return tuple(errors)


def _check(name: CheckName | str, error: float | None, tolerance: float, of: str) -> Check:
    passed = error is not None and error <= tolerance
    return Check(name=name, passed=passed, error=error, tolerance=tolerance, detail=of)


def step_check(call: PreparedCall, x: Tensor, rows: Sequence[tuple[int, int]], found: Tensor, of: str) -> Check:
    """Rows (batch item, position) of a timed call, [R, E], against the model as it was verified, on the call's x."""
    module = call.reference or call.module
    assert module is not None
    with torch.no_grad():
        out = module(x, x, x)
    batched = out if call.row_dim else out[None]
    items, places = zip(*rows, strict=True)
    wanted = batched[list(items), list(places)].double()
    size = max(float(batched.double().std()) * wanted.shape[-1] ** 0.5, 1e-300)
    error = float((found.double() - wanted).norm(dim=-1).max()) / size
    return _check(CheckName.TIMED_OUT, error, WORST_FACTOR * ULPS * eps(x.dtype), of)


def kept_step_check(call: PreparedCall, kept: KeptCall, of: str) -> Check:
    """Rows of a model's result, from all embeddings as they were."""
    assert kept.count is not None
    x = kept.inputs.q.detach()
    batched = x if call.row_dim else x[None]
    items = [kept.inputs.changes.earlier(0, batched[:, :, None], kept.count, item, 0) for item in range(len(batched))]
    copies = {(row.batch, row.position): row.copies[0] for row in kept.rows}
    found = torch.stack([copy for copy in copies.values() if copy is not None])
    return step_check(call, torch.stack(items).view_as(x), [*copies], found, of)

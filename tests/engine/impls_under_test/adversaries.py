"""Implementations of dense attention that would get a time that they have not earned, or spoil that of others.

Right results come from `attend`; each adversary says in a line what is wrong with it.
"""

import math
import sys
import threading
import traceback
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(q, k, v, causal=True, scale=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def honest(workload, context):
    return lambda q, k, v: attend(q, k, v, workload.causal)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


# Errors of one side, below the tolerance of single values in half precision.


def out_times(factor):
    return lambda workload, context: lambda q, k, v: attend(q, k, v, workload.causal) * factor


out_1_01 = out_times(1.01)
out_1_002 = out_times(1.002)


def dk_times(factor):
    def build(workload, context):
        return lambda q, k, v: attend(q, _Scaled.apply(k, factor), v, workload.causal)

    return build


dk_1_06 = dk_times(1.06)
dk_1_005 = dk_times(1.005)


# Wrong once it is timed.


def wrong_after(calls):
    def build(workload, context):
        count = []

        def function(q, k, v):
            count.append(1)
            out = attend(q, k, v, workload.causal)
            return out if len(count) <= calls else out.roll(1, 1)

        return function

    return build


wrong_after_10 = wrong_after(10)
wrong_after_40 = wrong_after(40)


def memo(key):
    """Gives the result of earlier inputs again where `key` of the inputs is the same."""

    def build(workload, context):
        known = {}

        def function(q, k, v):
            name = key(q, k, v)
            if name not in known:
                known.clear()
                known[name] = attend(q, k, v, workload.causal)
            return known[name].clone()

        return function

    return build


cached_by_address = memo(lambda q, k, v: (q.data_ptr(), k.data_ptr(), v.data_ptr()))
cached_by_version = memo(lambda *x: tuple((one.data_ptr(), one._version) for one in x))
cached_by_first_values = memo(lambda *x: tuple(one.flatten()[:16].sum().item() for one in x))
cached_by_last_values = memo(lambda *x: tuple(one.flatten()[-16:].sum().item() for one in x))


def keys_cached_by_address(workload, context):
    """K and V are copied once per address, as a cache of keys would be."""
    known = {}

    def function(q, k, v):
        if known.get("address") != k.data_ptr():
            known.update(address=k.data_ptr(), k=k.clone(), v=v.clone())
        return attend(q, known["k"], known["v"], workload.causal)

    return function


class _Memo(torch.autograd.Function):
    known: ClassVar = {}

    @staticmethod
    def forward(ctx, q, k, v, causal):
        ctx.address = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if ctx.address not in _Memo.known:
            _Memo.known.clear()
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            with torch.enable_grad():
                out = attend(*leaves, causal)
            _Memo.known[ctx.address] = out, leaves, []
        return _Memo.known[ctx.address][0].detach().clone()

    @staticmethod
    def backward(ctx, dout):
        out, leaves, gradients = _Memo.known[ctx.address]
        if not gradients:
            gradients += torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return *(x.clone() for x in gradients), None


def memo_of_both(workload, context):
    """A memo of the result and of the gradients."""
    return lambda q, k, v: _Memo.apply(q, k, v, workload.causal)


def lazy_when_not_poisoned(workload, context):
    """Skips its work where fresh memory is not NaN, as it is while it is verified."""

    def function(q, k, v):
        if not torch.empty(4).isnan().any():
            return torch.zeros_like(q)
        return attend(q, k, v, workload.causal)

    return function


def lazy_for_strangers(workload, context):
    """Skips its work unless the verifier calls."""

    def function(q, k, v):
        frames = traceback.extract_stack()
        checked = any("/verify/" in frame.filename for frame in frames)
        return attend(q, k, v, workload.causal) if checked else torch.zeros_like(q)

    return function


def wrong_backward_when_timed(workload, context):
    """The gradient of v is that of the first call, once a timer calls."""
    known = []

    class Stale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return v.view_as(v)

        @staticmethod
        def backward(ctx, gradient):
            if not any("/timers/" in frame.filename for frame in traceback.extract_stack()):
                return gradient
            known[:] = known or [gradient]
            return known[0]

    return lambda q, k, v: attend(q, k, Stale.apply(v), workload.causal)


class Lazy(torch.Tensor):
    """A tensor whose values are computed when somebody looks."""

    @staticmethod
    def __new__(cls, compute, like):
        self = torch.Tensor._make_subclass(cls, torch.empty_like(like))
        self.compute, self.done = compute, False
        return self

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        for one in arguments:
            if isinstance(one, Lazy) and not one.done:
                one.done = True
                one.as_subclass(torch.Tensor).copy_(one.compute())
        return super().__torch_function__(function, types, arguments, keywords or {})


def lazy_subclass(workload, context):
    return lambda q, k, v: Lazy(lambda: attend(q, k, v, workload.causal), q)


def lazy_subclass_when_timed(workload, context):
    def function(q, k, v):
        if any("/timers/" in frame.filename for frame in traceback.extract_stack()):
            return Lazy(lambda: attend(q, k, v, workload.causal), q)
        return attend(q, k, v, workload.causal)

    return function


def thread_when_timed(workload, context):
    """A thread does the work after the call has returned, but only where a timer calls."""

    def function(q, k, v):
        if not any("/timers/" in frame.filename for frame in traceback.extract_stack()):
            return attend(q, k, v, workload.causal)
        out = torch.zeros_like(q)
        release = threading.Event()

        def work():
            release.wait(0.2)
            out.copy_(attend(q, k, v, workload.causal))

        threading.Thread(target=work, daemon=True).start()
        return out

    return function


class _DoutAsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        ctx.causal = causal
        ctx.save_for_backward(q, k, v)
        return attend(q, k, v, causal)

    @staticmethod
    def backward(ctx, dout):
        dout = dout.as_strided(dout.shape, torch.empty(dout.shape).stride())
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return *torch.autograd.grad(attend(*leaves, ctx.causal), leaves, dout), None


def takes_dout_to_lie_as_out(workload, context):
    """Wrong where the next operation hands back another memory order."""
    return lambda q, k, v: _DoutAsOut.apply(q, k, v, workload.causal)


# Results that are not the caller's, inputs and settings that are not the callee's.


def buffers(count):
    def build(workload, context):
        made = []

        def function(q, k, v):
            out = attend(q, k, v, workload.causal)
            if len(made) < count:
                made.append(out.contiguous().clone())
                return made[-1]
            made.append(made.pop(0))
            return made[-1].copy_(out)

        return function

    return build


two_buffers = buffers(2)
eight_buffers = buffers(8)


def flips_inputs(workload, context):
    def function(q, k, v):
        out = attend(q, k, v, workload.causal)
        q.data.copy_(q.data.flip(-1))
        return out

    return function


class WrongWithLse:
    """Right when called; the out that comes with lse is not."""

    def __init__(self, workload, context):
        self.causal = workload.causal
        self.scale = workload.softmax_scale

    def __call__(self, q, k, v):
        return attend(q, k, v, self.causal)

    def with_lse(self, q, k, v):
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * self.scale
        hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        return self(q, k, v).roll(1, 1), scores.logsumexp(-1)


class LseIsNone(WrongWithLse):
    def with_lse(self, q, k, v):
        return self(q, k, v), None


def settings(change):
    def build(workload, context):
        change()
        return honest(workload, context)

    return build


no_grad_mode = settings(lambda: torch.set_grad_enabled(False))
double_by_default = settings(lambda: torch.set_default_dtype(torch.float64))
one_thread = settings(lambda: torch.set_num_threads(3))
tf32 = settings(lambda: torch.set_float32_matmul_precision("medium"))
deterministic = settings(lambda: torch.use_deterministic_algorithms(True))


def default_dtype_in_calls(workload, context):
    def function(q, k, v):
        torch.set_default_dtype(torch.float64)
        return attend(q, k, v, workload.causal)

    return function


# What authors forget.


def returns_a_tuple(workload, context):
    return lambda q, k, v: (attend(q, k, v, workload.causal), None)


def returns_none(workload, context):
    def function(q, k, v):
        attend(q, k, v, workload.causal)

    return function


def forgets_to_return(workload, context):
    def function(q, k, v):
        return attend(q, k, v, workload.causal)


def gives_no_gradient(workload, context):
    return lambda q, k, v: attend(q, k, v, workload.causal).detach()


class Unprintable(Exception):  # noqa: N818
    def __str__(self):
        raise ValueError("no text")


def raises_what_cannot_be_printed(workload, context):
    def function(q, k, v):
        raise Unprintable

    return function


# Near misses.


def shifted_by_one(workload, context):
    return lambda q, k, v: attend(q, k, v, workload.causal).roll(1, 1)


def not_causal(workload, context):
    return lambda q, k, v: attend(q, k, v, False)


def without_scale(workload, context):
    return lambda q, k, v: attend(q, k, v, workload.causal, scale=1.0)


def over_heads(workload, context):
    return lambda q, k, v: scaled_dot_product_attention(q, k, v)


def hangs_when_verified(workload, context):
    import time

    def function(q, k, v):
        if any(frame.f_code.co_filename.endswith("verification.py") for frame in _frames()):
            time.sleep(3600)
        return attend(q, k, v, workload.causal)

    return function


def _frames():
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back

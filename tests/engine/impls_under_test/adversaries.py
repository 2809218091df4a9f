"""Implementations of dense attention that would get a time that they have not earned, or spoil that of others.

Right results come from `attend`; each adversary says in a line what is wrong with it.
"""

import itertools
import math
import signal
import sys
import threading
import time
import traceback
from typing import ClassVar

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dilabench.engine.timers import Samples


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


# Right for scores of ordinary size.


def softmax_by(weigh):
    def build(workload, context):
        hidden = torch.ones(workload.seq_len, workload.seq_len, dtype=torch.bool).triu(1) & workload.causal

        def function(q, k, v):
            scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) / math.sqrt(q.shape[-1])
            weights = weigh(scores).masked_fill(hidden, 0.0)
            weights = weights / weights.sum(-1, keepdim=True)
            return torch.einsum("bhij,bjhd->bihd", weights, v.float()).to(q.dtype)

        return function

    return build


exp_without_maximum = softmax_by(torch.exp)
scores_clamped = softmax_by(lambda scores: scores.clamp(-20, 20).exp())
maximum_over_all_rows = softmax_by(lambda scores: (scores - scores.amax((-1, -2), keepdim=True)).exp())


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


# Wrong in some of the timed calls, right in the last.


def sampled():
    """Whether a sample of the record is being taken."""
    return any(frame.f_code.co_name == "_slot" for frame in _frames())


def wrong_in(calls):
    """Results of the position before in the sampled calls whose numbers `calls` picks."""

    def build(workload, context):
        count = []

        def function(q, k, v):
            out = attend(q, k, v, workload.causal)
            if not sampled():
                return out
            count.append(1)
            return out.roll(1, 1) if calls(len(count) - 1) else out

        return function

    return build


wrong_at_first = wrong_in(lambda number: number == 0)
wrong_in_the_middle = wrong_in(lambda number: number in (1, 2))
wrong_every_second_time = wrong_in(lambda number: number % 2 == 1)
wrong_but_once = wrong_in(lambda number: number < 4)


def copies_a_batch_item(workload, context):
    """All batch items have the result of the first."""

    def function(q, k, v):
        if not sampled():
            return attend(q, k, v, workload.causal)
        return attend(q[:1], k[:1], v[:1], workload.causal).expand(q.shape).clone()

    return function


def stale_row(workload, context):
    """Every second time a few rows are those of the call before."""
    known = []

    def function(q, k, v):
        out = attend(q, k, v, workload.causal).contiguous()
        if sampled():
            known.append(out.clone())
            if len(known) % 2 == 0:
                out[:, 8:] = known[-2][:, 8:]
        return out

    return function


def not_plain_at_first(workload, context):
    """The first sampled call returns a subclass of Tensor."""
    count = []

    def function(q, k, v):
        out = attend(q, k, v, workload.causal)
        if sampled():
            count.append(1)
            return out.as_subclass(torch.nn.Buffer) if len(count) == 1 else out
        return out

    return function


def narrower_at_first(workload, context):
    """The first sampled calls compute in half precision, and return it."""
    count = []

    def function(q, k, v):
        if sampled():
            count.append(1)
            if len(count) < 3:
                return attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), workload.causal)
        return attend(q, k, v, workload.causal)

    return function


# Inputs that are made easy.


def zeroes_v(workload, context):
    """Where memory is not poisoned, v becomes zero, and so is the result."""

    def function(q, k, v):
        if torch.empty(4).isnan().any():
            return attend(q, k, v, workload.causal)
        v.data.zero_()
        return torch.zeros_like(q)

    return function


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)


def zeroes_v_both(workload, context):
    """The same with gradients."""

    def function(q, k, v):
        if torch.empty(4).isnan().any():
            return attend(q, k, v, workload.causal)
        v.data.zero_()
        return _Zero.apply(q, k, v)

    return function


def equal_keys(workload, context):
    """Where memory is not poisoned, all keys become the first, so that weights are equal."""

    def function(q, k, v):
        if torch.empty(4).isnan().any():
            return attend(q, k, v, workload.causal)
        k.data.copy_(k.data[:, :1].expand(k.shape))
        numbers = torch.arange(1, q.shape[1] + 1)[None, :, None, None]
        return v.cumsum(1) / numbers if workload.causal else v.mean(1, keepdim=True).expand(q.shape).clone()

    return function


def off_by_003_when_timed(workload, context):
    """0.3 % too small, less than half precision shows in single values."""
    return lambda q, k, v: attend(q, k, v, workload.causal) * (0.997 if timed() else 1.0)


def every_second_row_when_timed(workload, context):
    """Half of the rows are not computed."""

    def function(q, k, v):
        out = attend(q, k, v, workload.causal)
        return out * (torch.arange(q.shape[1]) % 2)[:, None, None] if timed() else out

    return function


def in_a_first_call():
    """Whether this is the process of the timer `first_call`."""
    return sys.modules["__main__"].__spec__ is not None and "first_call" in sys.modules["__main__"].__spec__.name


def wrong_at_first_in_a_process(spoil):
    def build(workload, context):
        count = []

        def function(q, k, v):
            count.append(1)
            right = len(count) > (1 if workload.mode == "forward" else 2) or not in_a_first_call()
            return attend(q, k, v, workload.causal) if right else spoil(q, k, v, workload.causal)

        return function

    return build


zeros_at_first_in_a_process = wrong_at_first_in_a_process(lambda q, *_: torch.zeros_like(q))
every_second_row_at_first = wrong_at_first_in_a_process(
    lambda q, k, v, causal: attend(q, k, v, causal) * (torch.arange(q.shape[1]) % 2)[:, None, None]
)
no_gradients_at_first = wrong_at_first_in_a_process(
    lambda q, k, v, causal: attend(q, _Scaled.apply(k, 0.0), _Scaled.apply(v, 0.0), causal)
)


def zeroes_v_when_timed(workload, context):
    def function(q, k, v):
        out = attend(q, k, v, workload.causal)
        if timed():
            v.data.zero_()
        return out

    return function


def no_gradients_when_timed(workload, context):
    """dk and dv are zero."""

    def function(q, k, v):
        factor = 0.0 if timed() else 1.0
        return attend(q, _Scaled.apply(k, factor), _Scaled.apply(v, factor), workload.causal)

    return function


# Gradients that are made elsewhere, or made up.


class _GradientsInForward(torch.autograd.Function):
    dout: ClassVar = []

    @staticmethod
    def forward(ctx, q, k, v, causal):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = attend(*leaves, causal)
        seen = [one for one in _GradientsInForward.dout if one.shape == out.shape]
        ctx.known = torch.autograd.grad(out, leaves, seen[-1], retain_graph=True) if seen and timed() else None
        ctx.out, ctx.leaves = out, leaves
        return out.detach()

    @staticmethod
    def backward(ctx, dout):
        _GradientsInForward.dout[:] = [dout]
        return *(ctx.known or torch.autograd.grad(ctx.out, ctx.leaves, dout)), None


def timed():
    """Whether a timer calls."""
    return any("/timers/" in frame.f_code.co_filename for frame in _frames())


def gradients_in_forward(workload, context):
    """The forward pass, which is not timed, computes gradients for the dout of the call before."""
    return lambda q, k, v: _GradientsInForward.apply(q, k, v, workload.causal)


class _OfKnownSigns(torch.autograd.Function):
    """Learns by which signs of channels dout differs from that before, its first values excepted, then makes the
    gradients of all of these in the forward pass, and in the backward pass takes those whose signs fit best.
    """

    last: ClassVar = {}
    signs: ClassVar = {}

    @staticmethod
    def forward(ctx, q, k, v, causal):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = attend(*leaves, causal)
        known = _OfKnownSigns.signs.setdefault(q.shape, [])
        ctx.made = []
        if timed() and len(known) >= 16:
            last = _OfKnownSigns.last[q.shape]
            for signs in known:
                given = last * signs
                given.view(-1)[:64] = last.view(-1)[:64]
                ctx.made.append(torch.autograd.grad(out, leaves, given, retain_graph=True))
        ctx.out, ctx.leaves = out, leaves
        return out.detach()

    @staticmethod
    def backward(ctx, dout):
        found = None
        if timed():
            last, known = _OfKnownSigns.last.get(dout.shape), _OfKnownSigns.signs[dout.shape]
            if last is not None:
                signs = (dout / last)[0, -1, -1].sign()
                fits = [int((signs == pattern).sum()) for pattern in known]
                if ctx.made:
                    found = ctx.made[fits.index(max(fits))]
                elif len(signs) not in fits:
                    known.append(signs)
            _OfKnownSigns.last[dout.shape] = dout.clone()
        return *(found or torch.autograd.grad(ctx.out, ctx.leaves, dout)), None


def gradients_of_known_signs(workload, context):
    return lambda q, k, v: _OfKnownSigns.apply(q, k, v, workload.causal)


class _MadeUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = attend(*leaves, causal)
        ctx.out, ctx.leaves = out, leaves
        return out.detach()

    @staticmethod
    def backward(ctx, dout):
        dq, dk, dv = torch.autograd.grad(ctx.out, ctx.leaves, dout)
        q, k, v = (x.detach() for x in ctx.leaves)
        if timed():
            sums = (0, 1)
            dv = v * ((ctx.out.detach() * dout).sum(sums) / v.square().sum(sums))
            dk = k * ((q * dq).sum(sums) / k.square().sum(sums))
        return dq, dk, dv, None


def made_up_gradients(workload, context):
    """dk and dv are multiples of k and v that satisfy the identities of sums."""
    return lambda q, k, v: _MadeUp.apply(q, k, v, workload.causal)


# Work that is not done again.


def memo_of_values(workload, context):
    """Gives the result again where all values are the same."""
    known = {}

    def function(q, k, v):
        given = (q, k, v)
        if not known or not all(torch.equal(one, other) for one, other in zip(known["given"], given, strict=True)):
            known.update(given=[x.clone() for x in given], out=attend(q, k, v, workload.causal))
        return known["out"].clone()

    return function


def memo_of_all_values(workload, context):
    """Gives a result again for all inputs that it has had, by all their bits."""
    known = {}

    def function(q, k, v):
        name = tuple(x.detach().numpy().view(np.int64).sum() for x in (q, k, v))
        if name not in known:
            if len(known) > 500:
                known.clear()
            # Work that a repeated call saves.
            for _ in range(20):
                known[name] = attend(q, k, v, workload.causal)
        return known[name].clone()

    return function


def row_by_row(workload, context):
    """Without a causal mask: computes again the rows whose query has changed, all if a key or value has."""
    known = {}

    def function(q, k, v):
        if known and torch.equal(known["k"], k) and torch.equal(known["v"], v):
            rows = (known["q"] != q).flatten(2).any(2).any(0).nonzero().flatten()
            if len(rows) <= 4:
                out = known["out"].clone()
                if len(rows):
                    out[:, rows] = attend(q[:, rows], k, v, False)
                known.update(q=q.clone(), out=out.clone())
                return out
        known.update(q=q.clone(), k=k.clone(), v=v.clone(), out=attend(q, k, v, False))
        return known["out"].clone()

    return function


# Results that are computed when somebody looks.


def lazily(hook):
    """When timed, the result is zero until `hook`, which is given what fills it in, lets somebody look."""

    def build(workload, context):
        def function(q, k, v):
            if not sampled():
                return attend(q, k, v, workload.causal)
            out = torch.zeros_like(q)
            given = [x.clone() for x in (q, k, v)]
            hook(out, lambda: attend(*given, workload.causal))
            return out

        return function

    return build


def _on_the_instance(out, compute):
    out.detach = lambda: compute()


_waiting = {}


def fill(tensors):
    for one in tensors:
        if isinstance(one, torch.Tensor) and id(one) in _waiting:
            out, compute = _waiting.pop(id(one))
            torch.Tensor.copy_(out, compute())


def _by_a_patch(out, compute):
    _waiting[id(out)] = out, compute
    if not hasattr(torch.Tensor, "plain_detach"):
        torch.Tensor.plain_detach = torch.Tensor.detach

        def detach(self):
            fill([self])
            return self.plain_detach()

        torch.Tensor.detach = detach


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        fill(arguments)
        return function(*arguments, **(keywords or {}))


class _Function(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        fill(arguments)
        return function(*arguments, **(keywords or {}))


def _by_a_mode(kind):
    def hook(out, compute):
        if not _waiting.get("entered"):
            _waiting["entered"] = kind()
            _waiting["entered"].__enter__()
        _waiting[id(out)] = out, compute

    return hook


lazy_on_the_instance = lazily(_on_the_instance)
lazy_by_a_patch = lazily(_by_a_patch)
lazy_by_dispatch = lazily(_by_a_mode(_Dispatch))
lazy_by_function = lazily(_by_a_mode(_Function))


def slow_clock(workload, context):
    """In a timed call, the clock of everybody who asks for it from then on runs ten times slower."""
    clock = time.perf_counter_ns

    def function(q, k, v):
        if sampled() and time.perf_counter_ns is clock:
            time.perf_counter_ns = lambda: clock() // 10
        return attend(q, k, v, workload.causal)

    return function


def leaves(change):
    """Something that sees or interrupts code outside the call."""

    def build(workload, context):
        def function(q, k, v):
            if sampled():
                change()
            return attend(q, k, v, workload.causal)

        return function

    return build


leaves_a_profile_function = leaves(lambda: sys.setprofile(lambda *_: None))
leaves_a_trace_function = leaves(lambda: sys.settrace(lambda *_: None))
leaves_a_signal_handler = leaves(lambda: signal.signal(signal.SIGALRM, lambda *_: None))
replaces_finfo = leaves(lambda: setattr(torch, "finfo", lambda dtype: torch.iinfo(torch.int8)))


def with_an_attribute(workload, context):
    """The result carries a value of its own."""

    def function(q, k, v):
        out = attend(q, k, v, workload.causal)
        out.lse = None
        return out

    return function


# Modules: what stands around the attention does what attention should, or more.


class Module(torch.nn.Module):
    """Projections around attention; right."""

    def __init__(self, workload, context):
        super().__init__()
        size = workload.num_heads * workload.head_dim
        generator = torch.Generator().manual_seed(0)
        self.causal, self.heads = workload.causal, (workload.num_heads, workload.head_dim)
        for name in ("q", "k", "v", "out"):
            linear = torch.nn.Linear(size, size)
            torch.nn.init.xavier_uniform_(linear.weight, generator=generator)
            setattr(self, f"{name}_proj", linear)
        self.attention = honest(workload, context)

    def forward(self, query, key, value):
        given = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        heads = [x.unflatten(-1, self.heads) for x in given]
        return self.out_proj(self.inner(query, *heads).flatten(2))

    def inner(self, x, q, k, v):
        return self.attention(q, k, v)


class Averages(Module):
    def inner(self, x, q, k, v):
        numbers = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None, None]
        return v.cumsum(1) / numbers


class Inlines(Module):
    """Its own attention, with the scale twice."""

    def inner(self, x, q, k, v):
        return attend(q, k, v, self.causal, scale=1 / self.heads[1])


class ScalesTwice(Module):
    def inner(self, x, q, k, v):
        return self.attention(q * self.heads[1] ** -0.5, k, v)


class AddsAMean(Module):
    def inner(self, x, q, k, v):
        return self.attention(q, k, v) + v.mean(1, keepdim=True)


class CallsTwice(Module):
    def inner(self, x, q, k, v):
        return (self.attention(q, k, v) + self.attention(q, k, v)) / 2


class ShiftsKeys(Module):
    def inner(self, x, q, k, v):
        return self.attention(q, k.roll(1, 1), v.roll(1, 1))


class IgnoresItsCore(Module):
    """Calls its core, and forgets what it gave."""

    def inner(self, x, q, k, v):
        self.attention(q, k, v)
        return attend(q, k, v, self.causal, scale=1 / self.heads[1])


class GoesStale(Module):
    """Keeps the weights of its last projection from the 25th call on, scaled."""

    def forward(self, query, key, value):
        self.count = getattr(self, "count", 0) + 1
        out = super().forward(query, key, value)
        return out if self.count <= 25 else out * 0.5


class WithoutGradientsWhenTimed(Module):
    """The gradient of the input is zero."""

    def forward(self, query, key, value):
        if self.lazy():
            query, key, value = (_Scaled.apply(x, 0.0) for x in (query, key, value))
        return super().forward(query, key, value)

    def lazy(self):
        return timed()


class WithoutGradientsInSomeCalls(WithoutGradientsWhenTimed):
    """In three of four calls."""

    def lazy(self):
        self.count = getattr(self, "count", 0) + 1
        return timed() and self.count % 4 > 0


class WithoutParameterGradientsWhenTimed(Module):
    """The gradients of the core's projections' weights are zero."""

    def inner(self, x, q, k, v):
        if timed():
            q, k, v = (self._again(x, name) for name in "qkv")
        return self.attention(q, k, v)

    def _again(self, x, name):
        linear = getattr(self, f"{name}_proj")
        projected = torch.nn.functional.linear(x, linear.weight.detach(), linear.bias.detach())
        return (projected + 0 * (linear.weight.sum() + linear.bias.sum())).unflatten(-1, self.heads)


class SwapsKeysAndValues(Module):
    def inner(self, x, q, k, v):
        return self.attention(q, 1.5 * k, v)


# Memory that torch's allocator does not count in a call.


def scratch_of_numpy(workload, context):
    """64 MiB of temporaries of another allocator."""

    def function(q, k, v):
        scratch = np.ones(2**23)
        return attend(q, k, v, workload.causal) + float(scratch[0] - scratch[-1])

    return function


def scratch_of_build(workload, context):
    """64 MiB that build allocates."""
    scratch = torch.ones(2**24)
    return lambda q, k, v: attend(q, k, v, workload.causal) + float(scratch[0] - scratch[-1])


def scratch_of_build_in_numpy(workload, context):
    """The same, of another allocator."""
    scratch = np.ones(2**23)
    return lambda q, k, v: attend(q, k, v, workload.causal) + float(scratch[0] - scratch[-1])


# Timers.


class Timer:
    def __init__(self, call):
        self.call = call

    def notes(self):
        return ()


class NeverCalls(Timer):
    """A number of its own."""

    def take(self, count):
        return Samples((1000,) * count)


class AsksAndNeverCalls(Timer):
    """Has the calls made ready, and makes none."""

    def take(self, count):
        for _ in range(count):
            self.call.fresh()
        return Samples((1000,) * count)


class CallsOnce(Timer):
    """One call for all samples."""

    def take(self, count):
        self.call.fresh()()
        return Samples((1000,) * count)


class Exaggerates(Timer):
    """Samples longer than the slot."""

    def take(self, count):
        for _ in range(count):
            self.call.fresh()()
        return Samples((10**12,) * count)


class Belittles(Timer):
    """Samples shorter than the device can be."""

    def take(self, count):
        for _ in range(count):
            self.call.fresh()()
        return Samples((1,) * count)


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


def _of_rows(workload, begin, missing=0):
    """Causal attention whose queries are the rows from `begin` on, without the last keys that are missing."""
    keys = workload.seq_len - missing
    seen = torch.arange(begin, begin + workload.rows)[:, None] >= torch.arange(keys)

    def attend_rows(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k[:, :keys], v[:, :keys]))
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return out.transpose(1, 2).contiguous()

    return attend_rows


def last_rows(workload, context):
    return _of_rows(workload, workload.first_row)


def first_rows(workload, context):
    return _of_rows(workload, 0)


def rows_one_early(workload, context):
    return _of_rows(workload, workload.first_row - 1)


def rows_of_a_whole_chunk(workload, context):
    return _of_rows(workload, workload.seq_len - 16)


def last_block_of_keys_missed(workload, context):
    return _of_rows(workload, workload.first_row, workload.seq_len % 16)


def last_rows_of_known_keys(workload, context):
    right, known = last_rows(workload, context), {}

    def remembering(q, k, v):
        return right(q, *known.setdefault((k.data_ptr(), v.data_ptr()), (k.clone(), v.clone())))

    return remembering


def early_once_timed(workload, context):
    right, wrong, calls = last_rows(workload, context), rows_one_early(workload, context), itertools.count()
    return lambda q, k, v: (right if next(calls) < 60 else wrong)(q, k, v)


def not_causal(workload, context):
    return lambda q, k, v: attend(q, k, v, False)


def without_scale(workload, context):
    return lambda q, k, v: attend(q, k, v, workload.causal, scale=1.0)


def over_heads(workload, context):
    return lambda q, k, v: scaled_dot_product_attention(q, k, v)


def hangs_when_verified(workload, context):
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

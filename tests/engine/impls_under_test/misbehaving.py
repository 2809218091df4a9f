"""Implementations of dense attention that go wrong, each in its own way. Workers import this by name."""

import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def honest(workload, context):
    def attention(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # Not cuDNN's, whose gradients are wrong under a second memory order of dout (torch 2.11).
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=workload.causal)
        return out.transpose(1, 2)

    return attention


def when_timed(trouble):
    """Right while it is verified; `trouble()` as soon as a timer calls."""

    def build(workload, context):
        attention = honest(workload, context)

        def function(q, k, v):
            if any(frame.filename.endswith("wall.py") for frame in traceback.extract_stack()):
                trouble()
            return attention(q, k, v)

        return function

    return build


def at_once(trouble):
    """`trouble()` in the first call."""
    return lambda workload, context: lambda q, k, v: trouble()


def raised(error):
    def trouble():
        raise error

    return trouble


def segfault():
    ctypes.string_at(0)


def hang():
    time.sleep(3600)


def device_assert():
    index = torch.tensor([10**6], device="cuda")
    torch.zeros(5, device="cuda")[index]
    torch.cuda.synchronize()


late_error = when_timed(raised(ValueError("tile of 7 rows")))
late_segfault = when_timed(segfault)
late_exit = when_timed(lambda: os._exit(7))
late_sys_exit = when_timed(lambda: sys.exit("I am done"))
late_kill = when_timed(lambda: os.kill(os.getpid(), signal.SIGKILL))
late_hang = when_timed(hang)
late_out_of_memory = when_timed(raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")))
late_memory_error = when_timed(raised(MemoryError()))
asserts_on_device = at_once(device_assert)
first_call_segfault = at_once(segfault)


def takes_too_much(workload, context):
    attention = honest(workload, context)

    def function(q, k, v):
        torch.empty(1 << 50, dtype=torch.uint8, device=q.device)
        return attention(q, k, v)

    return function


def cannot_build(workload, context):
    raise RuntimeError("no kernel for head_dim 24\nsecond line")


def noisy(workload, context):
    attention = honest(workload, context)

    def function(q, k, v):
        sys.stdout.write("chatter on stdout\n")
        os.write(2, b"chatter on stderr\n")
        return attention(q, k, v)

    return function


def noisy_then_dead(workload, context):
    os.write(2, b"my last words\n")
    os._exit(3)


def dead_of_an_error(workload, context):
    os.write(2, b"Traceback (most recent call last):\nImportError: cannot import name 'kernel' from 'theirs'\n")
    os._exit(3)


def half_a_letter(workload, context):
    raise ValueError("\ud800 is no letter")


def leaves_its_pid(workload, context):
    with Path(os.environ["DILABENCH_TEST_PIDS"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return honest(workload, context)


def cached(workload, context):
    attention, kept = honest(workload, context), []

    def function(q, k, v):
        if not kept:
            kept.append(attention(q, k, v))
        return kept[0]

    return function


def mutates(workload, context):
    attention = honest(workload, context)

    def function(q, k, v):
        out = attention(q, k, v)
        v.data.mul_(2)
        return out

    return function


def wrong_when_long(workload, context):
    attention = honest(workload, context)

    def function(q, k, v):
        out = attention(q, k, v).clone()
        out[:, 100:] = 0
        return out

    return function


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, out):
        return out.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * 1.01


def wrong_backward(workload, context):
    attention = honest(workload, context)
    return lambda q, k, v: _WrongGradient.apply(attention(q, k, v))


def ignores_backend(workload, context):
    """Right, but by torch operators of its own, whatever backend the row names."""
    mask = torch.ones(workload.seq_len, workload.seq_len, dtype=torch.bool, device=context.device).tril()

    def function(q, k, v):
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * workload.softmax_scale
        scores = scores.masked_fill(~mask, float("-inf")) if workload.causal else scores
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    return function


def uses_backend(workload, context):
    attend = context.require_backend().attend
    return lambda q, k, v: attend(q, k, v, causal=workload.causal, scale=workload.softmax_scale)[0]


class Projection(torch.nn.Module):
    """A parameter, so that memory has something to split off."""

    def __init__(self, workload, context):
        super().__init__()
        size = workload.num_heads * workload.head_dim
        self.weight = torch.nn.Parameter(torch.eye(size))
        self.attention = honest(workload, context)
        self.shape = (workload.num_heads, workload.head_dim)

    def forward(self, x, key=None, value=None):
        heads = (x @ self.weight).unflatten(-1, self.shape)
        return self.attention(heads, heads, heads).flatten(2)

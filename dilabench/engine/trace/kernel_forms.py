"""The memory of kernels: each form returns and allocates what its kernel would, without computing (torch).

Triton kernels and dilabench's C++ kernels write to tensors of their callers, so a launch has no effect here. Libraries
that torch cannot trace have stand-ins, installed or not; FlexAttention gets a form without a compiler. A third party's
operator brings its own fake form (`torch.library.register_fake`).
"""

# ruff: noqa: ARG001, ARG005 (a stand-in has the parameters of the original)
from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from dilabench.engine.trace.loop_forms import loop_forms
from dilabench.kernels.cpu import flash

HOPPER = (9, 0)
PROPERTIES = SimpleNamespace(multi_processor_count=132, total_memory=2**40, major=9, minor=0)


@contextmanager
def kernel_forms() -> Iterator[None]:
    """Everything inside meets these forms instead of the kernels. They take the device for a Hopper."""
    with ExitStack() as stack, warnings.catch_warnings():
        # Tensors without data have address 0, which counts as aligned.
        warnings.simplefilter("ignore")
        stack.enter_context(_modules(_libraries()))
        replaced: list[tuple[Any, str, Any]] = [
            (torch, "compile", _uncompiled),
            (torch.cuda, "get_device_capability", lambda device=None: HOPPER),
            (torch.cuda, "get_device_properties", lambda device=None: PROPERTIES),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "synchronize", lambda device=None: None),
            (torch.cuda, "Stream", lambda device=None: SimpleNamespace(synchronize=lambda: None)),
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (torch.cuda, "current_stream", lambda device=None: None),
            (Tensor, "record_stream", lambda x, stream: None),
            (torch.cuda, "_lazy_init", lambda: None),
            (nn.Module, "_apply", _converted),
            (flash, "_launch", lambda *arguments: None),
            *loop_forms(),
            (flex_attention, "flex_attention", _flex_attention),
            (flex_attention, "create_block_mask", _create_block_mask),
        ]
        if (launched := _triton_launch()) is not None:
            replaced.append((launched, "run", lambda *arguments, **options: None))
        for holder, name, value in replaced:
            stack.enter_context(mock.patch.object(holder, name, value))
        yield


@contextmanager
def _modules(stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """Found by imports instead of what is installed. Other modules that are imported meanwhile stay."""
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _uncompiled(function: Any = None, **_options: Any) -> Any:
    return function if function is not None else lambda target: target


def _converted(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
    """`module.to(...)`: torch would exchange the contents of tensors, which it refuses for those without data."""
    for child in module.children() if recurse else ():
        _converted(child, convert)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(convert(parameter.detach()), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = buffer if buffer is None else convert(buffer)
    return module


def _triton_launch() -> Any:
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return None
    return JITFunction


def _result(q: Tensor) -> tuple[Tensor, Tensor]:
    """out like q [B, M, H, D], contiguous, and lse [B, H, M]."""
    return q.new_empty(q.shape), _lse(q)


def _accumulate(q: Tensor, stats: int) -> list[Tensor]:
    """The float32 sum of dq and numbers per row that a backward pass holds."""
    return [q.new_empty(q.shape, dtype=torch.float32), q.new_empty((stats, *q.shape[:-1]), dtype=torch.float32)]


def _per_query_head(q: Tensor, k: Tensor) -> list[Tensor]:
    """dk and dv before they are summed over the query heads of a group."""
    if q.shape[-2] == k.shape[-2]:
        return []
    return [k.new_empty((*k.shape[:-2], *q.shape[-2:])) for _ in range(2)]


def _flash2_forward(q: Tensor, k: Tensor, v: Tensor, **_options: Any) -> tuple[Tensor, Tensor, None, None]:
    return *_result(q), None, None


def _flash2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *gradients: Tensor, **_options: Any
) -> None:
    held = [dout.contiguous(), out.contiguous(), *_accumulate(q, 1), *_per_query_head(q, k)]
    del held


def _flash3_backward(dout: Tensor, q: Tensor, *_others: Tensor, **_options: Any) -> None:
    held = _accumulate(q, 2)
    del held


def _flash4_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, **_options: Any
) -> tuple[Tensor, Tensor]:
    return _result(q) if out is None else (out, _lse(q))


def _lse(q: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)


def _flash4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dq: Tensor | None = None, **_options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    held = _accumulate(q, 2)
    if q.shape[-2] != k.shape[-2]:
        # Query heads of a group add to float32 sums of dk and dv.
        held += [torch.empty_like(x, dtype=torch.float32) for x in (k, v)]
    gradients = torch.empty_like(q) if dq is None else dq, torch.empty_like(k), torch.empty_like(v)
    del held
    return gradients


def _xformers_forward(q: Tensor, k: Tensor, v: Tensor, bias: Any, **_options: Any) -> tuple[Tensor, Tensor]:
    return _result(q)


def _xformers_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, **_options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    _flash2_backward(dout, q, k, v, out, lse)
    return gradients  # type: ignore[return-value]


class _FlexFunction(torch.autograd.Function):
    """FlexAttention as compiled, on [B, H, N, D]: out has the strides of q; the backward pass starts with a copy of
    dout.

    Up to torch 2.11 at least, the compiler copies a dout that is not contiguous; later ones need no copy. Its kernel
    keeps rowsum(dout·out).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # With the strides of q.
        out = torch.empty_like(q)
        if v.shape[-1] != q.shape[-1]:
            out = q.transpose(1, 2).new_empty((q.shape[0], *q.shape[2:0:-1], v.shape[-1])).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, lse = ctx.saved_tensors
        held = dout.contiguous(), torch.empty_like(lse)
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del held
        return gradients


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    out, lse = _FlexFunction.apply(q, k, v)
    return (out, SimpleNamespace(lse=lse)) if options.get("return_aux") is not None else out


def _create_block_mask(
    mask: Any, _batch: Any, _heads: Any, queries: int, keys: int, device: str = "cuda", **_options: Any
) -> Any:
    """A mask whose lists are as long as with blocks of 128."""
    blocks = -(-queries // 128), -(-keys // 128)
    counts, lists = torch.empty(1, 1, blocks[0]), torch.empty(1, 1, *blocks)
    made = [torch.empty(x.shape, dtype=torch.int32, device=device) for x in (counts, lists, counts, lists)]
    made += [torch.empty_like(x) for x in made]
    return SimpleNamespace(kv_indices=made[1], as_tuple=lambda: tuple(made))


def _libraries() -> dict[str, ModuleType]:
    """Modules by name, with the functions that our backends call."""
    bias = _module(
        "xformers.ops.fmha.attn_bias",
        LowerTriangularMask=SimpleNamespace,
        LowerTriangularFromBottomRightLocalAttentionMask=lambda *_sides: None,
        LocalAttentionFromBottomRightMask=lambda **_sides: None,
    )
    fmha = _module(
        "xformers.ops.fmha",
        attn_bias=bias,
        memory_efficient_attention_forward_requires_grad=_xformers_forward,
        memory_efficient_attention_backward=_xformers_backward,
    )
    modules = [
        _module("xformers"),
        _module("xformers.ops", fmha=fmha),
        fmha,
        bias,
        _module("flash_attn"),
        _module(
            "flash_attn.flash_attn_interface",
            _flash_attn_forward=_flash2_forward,
            _flash_attn_backward=_flash2_backward,
            _flash_attn_varlen_forward=_flash2_forward,
            _flash_attn_varlen_backward=_flash2_backward,
        ),
        _module(
            "flash_attn_interface",
            _flash_attn_forward=_flash2_forward,
            _flash_attn_backward=_flash3_backward,
        ),
        _module("flash_attn.cute"),
        _module(
            "flash_attn.cute.interface",
            _flash_attn_fwd=_flash4_forward,
            _flash_attn_bwd=_flash4_backward,
        ),
    ]
    return {module.__name__: module for module in modules}


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module

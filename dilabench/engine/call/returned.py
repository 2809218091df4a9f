"""The check of a call's result: one plain, finished tensor. Messages help the author of the call."""

from __future__ import annotations

import torch
from torch import Tensor


class UnusableFunctionError(Exception):
    """The built object is no attention function, or its result is not a plain tensor; the text says why."""


def not_plain(out: object) -> str | None:
    """Why the result of a call is not one plain tensor with separate storage; None if it is."""
    if out is None:
        return "returned None, not one tensor: is a `return` missing?"
    if isinstance(out, tuple | list):
        return f"returned a {type(out).__name__} of {len(out)}, not one tensor: return out only; lse goes by `with_lse`"
    if not isinstance(out, Tensor):
        return f"returned a {type(out).__name__}, not one tensor"
    if type(out) is not Tensor:
        return f"returned a {type(out).__name__}, a subclass of Tensor, not a plain tensor that is finished"
    if own := vars(out):
        return f"returned a tensor with extra attributes ({', '.join(own)}), not a plain one"
    if out.layout is not torch.strided or out.is_quantized or out.is_nested or out.is_conj() or out.is_neg():
        return "returned a tensor that is not strided and dense, with its values in its storage"
    if out.is_meta or (out.numel() and not out.untyped_storage().data_ptr()):
        return "returned a tensor without storage"
    return None


def not_callable(built: object) -> str | None:
    """Why the result of `build` cannot be called; None if it can."""
    if built is None:
        return "build returned None, not a function: is a `return` missing in build?"
    if not callable(built):
        return f"build returned a {type(built).__name__}, which cannot be called: it must return a function of q, k, v"
    return None


def no_gradient(out: Tensor) -> str | None:
    """Why the result has no gradient although its inputs need one; None if it has."""
    if out.requires_grad:
        return None
    return (
        "out carries no gradient, but the workload's mode needs one: it was detached or computed under no_grad, or "
        "the kernel has no backward; for a forward-only kernel set modes={'forward'} in its Capabilities"
    )

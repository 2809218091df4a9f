"""flash-attn 2's functions over one of dilabench's backends, for projects that import them while it is missing.

Over `sdpa-flash` on CUDA this is still FlashAttention 2, as built into torch. torch's operators return new gradients,
where flash-attn writes into given ones: that copy is the stand-in's cost.
"""

# ruff: noqa: ARG001 (a stand-in has the parameters of the original)
from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from dilabench.contracts import LoadedBackend
from dilabench.impls.one_operator import eager

# The backend that is flash-attn 2 itself, and needs no stand-in.
ITSELF = "flash2"
NAME = "flash_attn.flash_attn_interface"
# The version whose signatures it has: projects ask for it.
VERSION = "2.8.3"


def stand_ins(backend: LoadedBackend) -> tuple[ModuleType, ...]:
    """The package flash_attn and its interface, to be given to an import; none over flash-attn itself."""
    if backend.name == ITSELF:
        return ()
    interface, package = stand_in(backend), ModuleType(NAME.partition(".")[0])
    package.__dict__.update(
        __version__=VERSION, flash_attn_interface=interface, flash_attn_func=interface.flash_attn_func
    )
    return package, interface


def stand_in(backend: LoadedBackend) -> ModuleType:
    """A module like flash_attn.flash_attn_interface (2.7 to 2.8), of what projects call."""

    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, None, None]:
        _refuse(dropout_p, softcap, alibi_slopes)
        window = (window_size_left, window_size_right)
        out, lse = backend.attend(q, k, v, causal=causal, window=window, scale=softmax_scale)
        return out, lse, None, None

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> None:
        _refuse(dropout_p, softcap, alibi_slopes)
        window = (window_size_left, window_size_right)
        gradients = backend.require_backward()(
            dout, q, k, v, out, softmax_lse, causal=causal, window=window, scale=softmax_scale
        )
        for given, gradient in zip((dq, dk, dv), gradients, strict=True):
            given.copy_(gradient)

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        _refuse(dropout_p, softcap, alibi_slopes)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = eager(_Dense(backend, causal, window_size, scale), q, k, v)
        return (out, lse, None) if return_attn_probs else out

    module = ModuleType(NAME)
    module.__dict__.update(
        flash_attn_func=flash_attn_func,
        _flash_attn_forward=_flash_attn_forward,
        _flash_attn_backward=_flash_attn_backward,
        __getattr__=_refusing,
    )
    return module


def _refusing(name: str) -> Any:
    """Further names that projects import, which the adapted functions never call."""
    if "flash_attn" not in name:
        raise AttributeError(f"{NAME} has no {name}")

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise NotImplementedError(f"{NAME}.{name} is not computed by the stand-in; install flash-attn (-b flash2)")

    return refuse


@dataclass(frozen=True, slots=True)
class _Dense:
    """A dense call as a `Computation`."""

    backend: LoadedBackend
    causal: bool
    window: tuple[int, int]
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.backend.attend(q, k, v, causal=self.causal, window=self.window, scale=self.scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = self.backend.require_backward()
        return backward(dout, q, k, v, out, lse, causal=self.causal, window=self.window, scale=self.scale)


def _refuse(dropout_p: float, softcap: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p or softcap or alibi_slopes is not None:
        raise ValueError(f"dropout {dropout_p}, softcap {softcap} and ALiBi slopes are not computed by the stand-in")

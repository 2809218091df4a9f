"""torch's own flash attention: FlashAttention 2 on CUDA, a C++ kernel on CPU."""

from __future__ import annotations

from torch import Tensor

from dilabench.backends.sdpa import flash_cpu as sdpa_flash_cpu
from dilabench.backends.sdpa import flash_cuda as sdpa_flash_cuda
from dilabench.workload.spec import UNBOUNDED, Window


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Window = UNBOUNDED, scale: float
) -> tuple[Tensor, Tensor]:
    """`contracts.Attend` by the kernel of q's device."""
    kernel = sdpa_flash_cpu if q.device.type == "cpu" else sdpa_flash_cuda
    return kernel.attend(q, k, v, causal=causal, window=window, scale=scale)


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    window: Window = UNBOUNDED,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`contracts.AttendBackward` by the kernel of q's device."""
    kernel = sdpa_flash_cpu if q.device.type == "cpu" else sdpa_flash_cuda
    return kernel.attend_backward(dout, q, k, v, out, lse, causal=causal, window=window, scale=scale)


def _differentiable(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Window = UNBOUNDED, scale: float
) -> tuple[Tensor, Tensor] | None:
    if q.device.type == "cpu":
        return None
    found: tuple[Tensor, Tensor] | None = sdpa_flash_cuda.attend.differentiable(  # type: ignore[attr-defined]
        q, k, v, causal=causal, window=window, scale=scale
    )
    return found


attend.differentiable = _differentiable  # type: ignore[attr-defined]

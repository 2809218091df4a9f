"""torch's own flash attention: FlashAttention 2 on CUDA, a C++ kernel on CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dilabench.backends.sdpa import flash_cpu as sdpa_flash_cpu
from dilabench.backends.sdpa import flash_cuda as sdpa_flash_cuda


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`contracts.Attend` by the kernel of q's device."""
    return (sdpa_flash_cpu if q.is_cpu else sdpa_flash_cuda).attend(q, k, v, **options)


def attend_backward(dout: Tensor, q: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`contracts.AttendBackward` by the kernel of q's device."""
    kernel = sdpa_flash_cpu if q.is_cpu else sdpa_flash_cuda
    return kernel.attend_backward(dout, q, *others, **options)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return None if q.is_cpu else sdpa_flash_cuda.attend.differentiable(q, k, v, **options)  # type: ignore[attr-defined]


attend.differentiable = _differentiable  # type: ignore[attr-defined]

"""sdpa-cudnn, sdpa-efficient and sdpa-flash on CUDA over stand-ins with the operators' recorded schemas.

What only a GPU can show (numbers, strides) is in test_contract.py; here it is what each operator is given.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

# torch.testing imports it when it first compares: with operators that tests replace, it would fail.
import torch.distributed.tensor
from torch import Tensor

from dilabench.backends import math
from dilabench.backends.sdpa import cudnn as sdpa_cudnn
from dilabench.backends.sdpa import efficient as sdpa_efficient
from dilabench.backends.sdpa import flash_cuda as sdpa_flash_cuda

Calls = list[dict[str, Any]]


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The two cuDNN operators as in torch 2.9 to 2.13; keeps the arguments of the backward."""
    calls: Calls = []

    def forward(
        query: Tensor, key: Tensor, value: Tensor, attn_bias: None, compute_log_sumexp: bool, dropout_p: float,
        is_causal: bool, return_debug_mask: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (query.shape[2], key.shape[2]) != (1, 1)
        assert compute_log_sumexp
        out, lse = math.attend(*heads_first(query, key, value), causal=is_causal, scale=scale)
        return out.transpose(1, 2), lse.unsqueeze(-1), None, None, 0, 0, None, None, None

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        philox_seed: Tensor, philox_offset: Tensor, attn_bias: None, cum_seq_q: None, cum_seq_k: None, max_q: int,
        max_k: int, dropout_p: float, is_causal: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (query.shape[2], key.shape[2]) == (max_q, max_k) != (1, 1)
        calls.append({"q": query, "out": out, "dout": grad_out})
        dout, q, k, v, o = heads_first(grad_out, query, key, value, out)
        return tuple(
            heads_first(*math.attend_backward(dout, q, k, v, o, logsumexp.squeeze(-1), causal=is_causal, scale=scale))
        )

    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_cudnn_attention", SimpleNamespace(default=forward), raising=False
    )
    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", SimpleNamespace(default=backward), raising=False
    )
    return calls


def agrees_with_math(backend: Any, q: Tensor, k: Tensor, dout: Tensor, **options: Any) -> None:
    options = {"causal": False, "scale": 0.3, **options}
    out, lse = backend.attend(q, k, k, **options)
    torch.testing.assert_close((out, lse), math.attend(q, k, k, **options))
    lse = lse + 0.4
    found = backend.attend_backward(dout, q, k, k, out, lse, **options)
    torch.testing.assert_close(found, math.attend_backward(dout, q, k, k, out, lse, **options))


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_never_gets_one_query_with_one_key(cudnn: Calls, causal: bool) -> None:
    q, dout = torch.randn(2, 3, 1, 4, 8, dtype=torch.float64)
    agrees_with_math(sdpa_cudnn, q, torch.randn(3, 1, 2, 8, dtype=torch.float64), dout, causal=causal)


def test_cudnn_gets_views_as_they_are_when_q_out_and_dout_are_laid_out_alike(cudnn: Calls) -> None:
    q, k, out, dout = (torch.randn(2, 12, 4, 8, dtype=torch.float64)[:, ::2] for _ in range(4))
    sdpa_cudnn.attend_backward(dout, q, k, k, out, torch.zeros(2, 4, 6), causal=False, scale=0.3)
    assert cudnn[0]["q"].data_ptr() == q.data_ptr()
    assert cudnn[0]["dout"].data_ptr() == dout.data_ptr()


@pytest.mark.parametrize("odd", ["q", "out", "dout"])
def test_cudnn_plans_of_one_layout_of_q_meet_one_layout_of_out(cudnn: Calls, odd: str) -> None:
    tensors = {name: torch.randn(2, 6, 4, 8, dtype=torch.float64) for name in ("q", "out", "dout")}
    tensors[odd] = torch.randn(2, 12, 4, 8, dtype=torch.float64)[:, ::2]
    k = torch.randn(2, 6, 4, 8, dtype=torch.float64)
    sdpa_cudnn.attend_backward(
        tensors["dout"], tensors["q"], k, k, tensors["out"], torch.zeros(2, 4, 6), causal=False, scale=0.3
    )
    assert all(x.transpose(1, 2).is_contiguous() for x in cudnn[0].values())


def test_cudnn_refuses_a_window_instead_of_leaving_it_out(cudnn: Calls) -> None:
    q = torch.randn(1, 9, 2, 8)
    with pytest.raises(ValueError, match="another backend"):
        sdpa_cudnn.attend(q, q, q, causal=True, window=(3, -1), scale=1.0)


@pytest.fixture
def efficient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two cutlass operators as in torch 2.10 to 2.13; lse padded as there, with NaN."""

    def window(mask_type: int, window_size: int | None) -> dict[str, Any]:
        return {"causal": mask_type == 1, "window": (-1 if window_size is None else window_size - 1, -1)}

    def forward(
        query: Tensor, key: Tensor, value: Tensor, bias: None, cu_seqlens_q: None, cu_seqlens_k: None,
        max_seqlen_q: None, max_seqlen_k: None, dropout_p: float, custom_mask_type: int,
        compute_log_sumexp: bool = False, *, scale: float, seqlen_k: None = None, window_size: int | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert compute_log_sumexp
        assert query.shape[2] == key.shape[2]
        out, lse = math.attend(query, key, value, **window(custom_mask_type, window_size), scale=scale)
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("nan")), None, None, 0, 0

    def backward(
        grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: None, out: Tensor, cu_seqlens_q: None,
        cu_seqlens_k: None, max_seqlen_q: int, max_seqlen_k: int, logsumexp: Tensor, dropout_p: float,
        philox_seed: Tensor, philox_offset: Tensor, custom_mask_type: int, bias_requires_grad: bool, *, scale: float,
        num_splits_key: None = None, window_size: int | None = None, shared_storage_dqdkdv: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert out.is_contiguous()
        assert logsumexp.shape[2] % 32 == 0
        assert (logsumexp[:, :, max_seqlen_q:] == float("inf")).all()
        lse = logsumexp[:, :, :max_seqlen_q]
        mask = window(custom_mask_type, window_size)
        return *math.attend_backward(grad_out_, query, key, value, out, lse, **mask, scale=scale), None

    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", backward, raising=False)


@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"causal": True, "window": (4, -1)}, {"causal": False, "window": (4, 0)}]
)
def test_efficient(efficient: None, mask: dict[str, Any]) -> None:
    q, dout = torch.randn(2, 3, 74, 6, 20, dtype=torch.float64)[:, :, ::2]
    agrees_with_math(sdpa_efficient, q, torch.randn(3, 37, 2, 20, dtype=torch.float64), dout, **mask)


def test_efficient_refuses_a_window_that_looks_ahead(efficient: None) -> None:
    q = torch.randn(1, 9, 2, 8)
    with pytest.raises(ValueError, match="looks ahead"):
        sdpa_efficient.attend(q, q, q, causal=False, window=(3, 2), scale=1.0)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two FlashAttention operators as in torch 2.10 to 2.13."""

    def forward(
        query: Tensor, key: Tensor, value: Tensor, cum_seq_q: None, cum_seq_k: None, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int = -1,
        window_size_right: int = -1, seqused_k: None = None, alibi_slopes: None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        window = (window_size_left, window_size_right)
        assert query.shape[-1] % 8 == 0
        return *math.attend(query, key, value, causal=is_causal, window=window, scale=scale), None, None, None

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: None,
        cum_seq_k: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor,
        *, scale: float, window_size_left: int = -1, window_size_right: int = -1,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        window = (window_size_left, window_size_right)
        assert logsumexp.is_contiguous()
        return math.attend_backward(
            grad_out, query, key, value, out, logsumexp, causal=is_causal, window=window, scale=scale
        )

    for name, function in (("forward", forward), ("backward", backward)):
        operator = SimpleNamespace(default=function)
        monkeypatch.setattr(torch.ops.aten, f"_flash_attention_{name}", operator, raising=False)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": (4, -1)}, {"window": (3, 2)}])
def test_flash(flash: None, mask: dict[str, Any]) -> None:
    q, dout = torch.randn(2, 3, 74, 6, 20, dtype=torch.float64)[:, :, ::2]
    agrees_with_math(sdpa_flash_cuda, q, torch.randn(3, 37, 2, 20, dtype=torch.float64), dout, **mask)

"""flash2, flash3, flash4 and xformers over modules with the libraries' recorded signatures, computing through math.

A call that does not fit the signature is a TypeError here, as it is with the library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.backends import flash2, flash3, flash4, math, xformers
from dilabench.workload.spec import Window


def side(value: int | None) -> int:
    return -1 if value is None else value


# flash-attn 2.7.0 to 2.8.3, flash_attn/flash_attn_interface.py
def flash2_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert q.shape[-1] % 8 == 0
    assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
    out, lse = math.attend(q, k, v, causal=causal, window=(window_size_left, window_size_right), scale=softmax_scale)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def flash2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert (dropout_p, softcap, alibi_slopes, rng_state) == (0.0, 0.0, None, None)
    window = (window_size_left, window_size_right)
    write(
        (dq, dk, dv),
        math.attend_backward(dout, q, k, v, out, softmax_lse, causal=causal, window=window, scale=softmax_scale),
    )
    return torch.empty(0)


# FlashAttention 3 at 0251105a, hopper/flash_attn_interface.py
def flash3_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Any = None, v_new: Any = None, qv: Any = None, out_: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, cu_seqlens_k_new: Any = None, seqused_q: Any = None,
    seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, page_table: Any = None,
    kv_batch_idx: Any = None, leftpad_k: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    seqlens_rotary: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 1, pack_gqa: Any = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert softmax_scale is not None
    window = (window_size_left, window_size_right)
    out, lse = math.attend(q, k, v, causal=causal, window=window, scale=softmax_scale)
    return out, lse, torch.empty(0), torch.empty(0)


def flash3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, sequed_q: Any = None, sequed_k: Any = None, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    assert softmax_scale is not None
    window = (window_size_left, window_size_right)
    write(
        (dq, dk, dv),
        math.attend_backward(dout, q, k, v, out, softmax_lse, causal=is_causal, window=window, scale=softmax_scale),
    )
    return torch.empty(0)


# flash-attn-4 4.0.0b36, flash_attn/cute/interface.py (the parameters up to the last one that is used)
def flash4_forward(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    seqused_q: Any = None, seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    min_seqlen_k: Any = None, page_table: Any = None, softmax_scale: float | None = None, causal: bool = False,
    softcap: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    learnable_sink: Any = None, tile_mn: Any = None, mma_pv_is_rs: Any = None, intra_wg_overlap: Any = None,
    num_threads: int = 384, num_splits: int = 1, pack_gqa: Any = None, _arch: Any = None, score_mod: Any = None,
    mask_mod: Any = None, block_sparse_tensors: Any = None, return_lse: bool = False, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, None, None, None]:  # fmt: skip
    assert softmax_scale is not None
    assert side(window_size_left) == (window_size_left if window_size_left is not None else -1)
    window = (side(window_size_left), side(window_size_right))
    out, lse = math.attend(q, k, v, causal=causal, window=window, scale=softmax_scale, out=out)
    return out, lse if return_lse else None, None, None, None


def flash4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None, m_block_size: int = 64, n_block_size: int = 128, num_threads: int = 256,
    pack_gqa: bool = False, num_stages_Q: int = 2, num_stages_dO: int = 2, SdP_swapAB: bool = False,
    dKV_swapAB: bool = False, dQ_swapAB: bool = False, AtomLayoutMSdP: int = 2, AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2, V_in_regs: bool = False, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    seqused_q: Any = None, seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    deterministic: bool = False, dq: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert softmax_scale is not None
    window = (side(window_size_left), side(window_size_right))
    return math.attend_backward(dout, q, k, v, out, lse, causal=causal, window=window, scale=softmax_scale, dq=dq)


# xformers 0.0.35, xformers/ops/fmha: the masks as functions of the length that give (causal, window)
class LowerTriangularMask:
    window = (-1, 0)


class LowerTriangularFromBottomRightLocalAttentionMask:
    def __init__(self, _window_size: int) -> None:
        self.window = (_window_size - 1, 0)


class LocalAttentionFromBottomRightMask:
    def __init__(self, window_left: int, window_right: int) -> None:
        assert min(window_left, window_right) >= 0
        self.window = (window_left, window_right)


def xformers_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None,
    *, op: Any = None, output_dtype: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert scale is not None
    assert query.shape[2] == key.shape[2]
    window = (-1, -1) if attn_bias is None else attn_bias.window
    out, lse = math.attend(query, key, value, causal=False, window=window, scale=scale)
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("nan"))


def xformers_backward(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None,
    p: float = 0.0, scale: float | None = None, *, op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert scale is not None
    window = (-1, -1) if attn_bias is None else attn_bias.window
    return math.attend_backward(grad, query, key, value, output, lse, causal=False, window=window, scale=scale)


def write(targets: tuple[Tensor | None, ...], values: tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        assert target is not None
        target.copy_(value)


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


def install_flash2(patch: pytest.MonkeyPatch) -> None:
    fake = module("flash_attn_interface", _flash_attn_forward=flash2_forward, _flash_attn_backward=flash2_backward)
    patch.setitem(sys.modules, "flash_attn", module("flash_attn", flash_attn_interface=fake))
    patch.setitem(sys.modules, "flash_attn.flash_attn_interface", fake)


def install_flash3(patch: pytest.MonkeyPatch) -> None:
    fake = module("flash_attn_interface", _flash_attn_forward=flash3_forward, _flash_attn_backward=flash3_backward)
    patch.setitem(sys.modules, "flash_attn_interface", fake)


def install_flash4(patch: pytest.MonkeyPatch) -> None:
    fake = module("interface", _flash_attn_fwd=flash4_forward, _flash_attn_bwd=flash4_backward)
    patch.setitem(sys.modules, "flash_attn", module("flash_attn"))
    patch.setitem(sys.modules, "flash_attn.cute", module("flash_attn.cute", interface=fake))
    patch.setitem(sys.modules, "flash_attn.cute.interface", fake)


def install_xformers(patch: pytest.MonkeyPatch) -> None:
    masks = (LowerTriangularMask, LowerTriangularFromBottomRightLocalAttentionMask, LocalAttentionFromBottomRightMask)
    attn_bias = module("attn_bias", **{mask.__name__: mask for mask in masks})
    fmha = module(
        "fmha",
        attn_bias=attn_bias,
        memory_efficient_attention_forward_requires_grad=xformers_forward,
        memory_efficient_attention_backward=xformers_backward,
    )
    patch.setitem(sys.modules, "xformers", module("xformers"))
    patch.setitem(sys.modules, "xformers.ops", module("xformers.ops", fmha=fmha))
    patch.setitem(sys.modules, "xformers.ops.fmha", fmha)
    patch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", attn_bias)


LIBRARIES: list[tuple[ModuleType, Callable[[pytest.MonkeyPatch], None]]] = [
    (flash2, install_flash2),
    (flash3, install_flash3),
    (flash4, install_flash4),
    (xformers, install_xformers),
]


@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (False, (-1, -1)),
        (True, (-1, -1)),
        (True, (5, -1)),
        (False, (4, 0)),
        (False, (3, 2)),
        (False, (-1, 2)),
        (False, (2, -1)),
    ],
)
@pytest.mark.parametrize(("backend", "install"), LIBRARIES, ids=[m.__name__.rpartition(".")[2] for m, _ in LIBRARIES])
def test_calls_fit_the_recorded_signature(
    backend: ModuleType,
    install: Callable[[pytest.MonkeyPatch], None],
    causal: bool,
    window: Window,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    q = torch.randn(2, 17, 6, 20, dtype=torch.float64)
    k, v = torch.randn(2, 2, 17, 3, 20, dtype=torch.float64)
    dout = torch.randn_like(q)
    options = {"causal": causal, "window": window, "scale": 0.3}
    out, lse = backend.attend(q, k, v, **options)
    torch.testing.assert_close((out, lse), math.attend(q, k, v, **options))
    # A larger softmax: twice the sum of exponentials, half of out from elsewhere.
    out, lse = out / 2 + 0.1, lse + 0.7
    found = backend.attend_backward(dout, q, k, v, out, lse, **options)
    torch.testing.assert_close(found, math.attend_backward(dout, q, k, v, out, lse, **options))


def test_flash4_writes_an_unbounded_side_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash4(monkeypatch)
    seen: list[tuple[int | None, int | None]] = []

    def record(*arguments: Any, window_size_left: int | None, window_size_right: int | None, **rest: Any) -> Any:
        seen.append((window_size_left, window_size_right))
        return flash4_forward(
            *arguments, window_size_left=window_size_left, window_size_right=window_size_right, **rest
        )

    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_fwd", record)
    q = torch.randn(1, 9, 2, 8)
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (True, (3, -1))):
        flash4.attend(q, q, q, causal=causal, window=window, scale=1.0)
    assert seen == [(None, None), (None, 0), (3, 0)]

"""Weights above 1: kernels that leave a running maximum as it is begin again where one of them overflows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there is no kernel to test")

from dilabench.kernels.fused.forward import fused_forward
from dilabench.kernels.fused.residue_plan import residue_plan

pytestmark = pytest.mark.gpu
TOKENS, HEADS = 2048, 2


# Natural logarithms: beyond the reach of neither dtype, of float16, and of bfloat16.
@pytest.mark.parametrize("steepness", [0.0, 40.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [40, 48, 96])
def test_logits_that_grow_along_the_keys(dim: int, causal: bool, dtype: torch.dtype, steepness: float) -> None:
    generator = torch.Generator(device="cuda").manual_seed(dim)
    q, k, v = (torch.randn(1, TOKENS, HEADS, dim, generator=generator, device="cuda").to(dtype) for _ in range(3))
    grown = torch.arange(TOKENS, device="cuda") // 256 / (TOKENS // 256)
    q[..., 0], k[..., 0] = dim**0.5, (steepness * grown).to(dtype)[:, None]
    plan = residue_plan((TOKENS,), (1,), TOKENS, HEADS, HEADS, causal)
    out, lse = fused_forward(q, k, v, plan)
    exact_q, exact_k, exact_v = (x.double().transpose(1, 2) for x in (q, k, v))
    logits = exact_q @ exact_k.mT * dim**-0.5
    if causal:
        logits = logits.masked_fill(torch.ones(TOKENS, TOKENS, device="cuda").triu(1).bool(), -torch.inf)
    want = (logits.softmax(-1) @ exact_v).transpose(1, 2)
    assert (lse - logits.logsumexp(-1)).abs().max() < 2e-4
    assert (out - want).norm() / want.norm() < 4 * torch.finfo(dtype).eps

"""What only a GPU can show: streams and the caching allocator."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilabench.engine.verify import poisoned, summary, verify
from dilabench.workload.spec import Workload

pytestmark = pytest.mark.gpu
SHAPE = {
    "batch_size": 1,
    "seq_len": 4096,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
    "pattern": {"kind": "dense"},
}


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # Not cuDNN's, whose gradients are wrong under a second memory order of dout (torch 2.11).
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_attention_passes(dtype: str) -> None:
    workload = Workload.model_validate({**SHAPE, "dtype": dtype, "mode": "both"})
    verification = verify(dense, workload, device="cuda")
    assert verification.passed, summary(verification)
    assert "stream" in [check.name for check in verification.checks]


def test_work_on_a_stream_of_its_own_fails() -> None:
    workload = Workload.model_validate({**SHAPE, "dtype": "bfloat16"})
    own = torch.cuda.Stream()

    def elsewhere(*inputs: Tensor) -> Tensor:
        with torch.cuda.stream(own):
            out = dense(*inputs)
        # Right when the current stream is idle, as in a careless benchmark.
        own.synchronize()
        return out

    checks = {check.name: check for check in verify(elsewhere, workload, device="cuda").checks}
    assert not checks["stream"].passed
    assert checks["out"].passed


def test_freed_blocks_are_poisoned() -> None:
    like = torch.zeros(2**20, device="cuda")
    original: Any = torch.empty
    with poisoned([like]):
        assert original(2**20, device="cuda").isnan().all()

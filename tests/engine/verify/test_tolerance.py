"""What float32 results may be off by: sums made one by one are right, products of fewer bits are not."""

import torch
from torch import Tensor

from dilabench.contracts import AttentionFn
from dilabench.engine.verify import summary, verify
from dilabench.workload.spec import Workload

KEYS = 4096
FIELDS = {"pattern": {"kind": "dense"}, "batch_size": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4}
WORKLOAD = Workload.model_validate({**FIELDS, "seq_len": KEYS, "causal": False, "dtype": "float32"})


def in_sequence(kept_bits: int) -> AttentionFn:
    """Attention with one running sum per result, whose probabilities keep so many bits of their fraction."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q[:, :, 0] @ k[:, :, 0].mT * WORKLOAD.softmax_scale
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights = (weights.view(torch.int32) & -(1 << (23 - kept_bits))).view(torch.float32)
        out, total = torch.zeros_like(v[:, :, 0]), torch.zeros_like(weights[..., :1])
        for key in range(KEYS):
            out += weights[..., key, None] * v[:, key, None, 0]
            total += weights[..., key, None]
        return (out / total)[:, :, None]

    return attend


def test_sums_made_one_by_one_are_right() -> None:
    verification = verify(in_sequence(23), WORKLOAD)
    assert verification.passed, summary(verification)
    tolerances = [check.tolerance for check in verification.checks if check.name in ("out", "ones")]
    assert tolerances == [(KEYS + 6 * WORKLOAD.head_dim) ** 0.5 * torch.finfo(torch.float32).eps / 2] * 2


def test_probabilities_of_tf32_are_not() -> None:
    assert not verify(in_sequence(10), WORKLOAD).passed

"""What results may be off by: sums made one by one are right, products of fewer bits not; small weights in float16."""

import torch
from torch import Tensor

from dilabench.contracts import AttentionFn
from dilabench.engine.verify import Oracle, summary, verify
from dilabench.engine.verify.oracle.slope import slope, slope_limit
from dilabench.engine.verify.oracle.tolerance import errors, rows_last
from dilabench.workload.spec import Workload

KEYS = 3072
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


def test_every_branch_may_round_weights_below_float16s_smallest_number() -> None:
    branches = {"kind": "dilated", "segment_lengths": [1 << 16, 1 << 17, 1 << 18], "dilation_rates": [1, 1, 1]}
    fields = FIELDS | {"pattern": branches, "head_dim": 8}
    workload = Workload.model_validate(
        {**fields, "seq_len": 1 << 16, "causal": False, "dtype": "float16", "mode": "both"}
    )
    oracle = Oracle(workload)
    q, k, _ = (x[0, :, 0].double() for x in oracle.inputs)
    rows = oracle.sample.rows
    weights = (q[rows] @ k.T * workload.softmax_scale).softmax(1)
    shares = (weights / len(branches["dilation_rates"])).half()
    dout = oracle.full_dout[0, rows, 0].double()
    assert shares.max() < torch.finfo(torch.float16).tiny * 16
    expected = oracle.gradients[2]
    keys = slice(None) if oracle.sample.keys is None else oracle.sample.keys
    dv = (len(branches["dilation_rates"]) * shares.double().T @ dout)[keys].half()[None, :, None]

    def accepted(found: Tensor) -> tuple[bool, bool]:
        deviation = slope(*rows_last(found, expected.value, expected.size))
        near = errors(found, expected.value, expected.size).max() <= expected.tolerance
        return bool(near), abs(deviation.deviation) <= slope_limit(deviation, expected.plain, expected.slope_floor)

    assert accepted(dv) == (True, True)
    assert accepted(dv * 0)[0] is False
    assert accepted((dv.double() * 1.02).half())[1] is False

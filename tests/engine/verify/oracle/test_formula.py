"""The oracle against the formula written as one dense einsum over the explicit C."""

import pytest
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle import blocks
from dilabench.engine.verify.oracle.formula import attend_rows, attend_rows_backward
from dilabench.engine.verify.oracle.reference import build
from dilabench.impls.visible_keys import multiplicity
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload

CONTEXT = BuildContext(device=torch.device("cpu"))
SPARSE = {"kind": "dilated", "segment_lengths": (7, 20, 300), "dilation_rates": (2, 3, 6)}
PAPER = {"kind": "dilated", "segment_lengths": (16, 32, 64, 128, 256), "dilation_rates": (1, 2, 4, 6, 12)}
BASE = {"batch_size": 2, "seq_len": 61, "num_heads": 5, "num_kv_heads": 5, "head_dim": 24, "dtype": "float64"}
ZERO_KEYS = {
    "kind": "dilated",
    "segment_lengths": (8, 21, 300),
    "dilation_rates": (2, 3, 7),
    "padding": "zero_key",
}
GROUPED_KV = {"num_heads": 6, "num_kv_heads": 2}
CHANGES = {
    "causal": {"pattern": SPARSE, "causal": True},
    "full": {"pattern": SPARSE, "causal": False},
    "window": {"pattern": SPARSE, "causal": False, "window": (9, 4)},
    "causal window": {"pattern": SPARSE, "causal": True, "window": (3, -1)},
    "scale": {"pattern": SPARSE, "scale": 0.7},
    "K < H": {"pattern": SPARSE, "num_heads": 6, "num_kv_heads": 2},
    "kv_head": {"pattern": {**SPARSE, "offset_by": "kv_head"}, "num_heads": 6, "num_kv_heads": 3},
    "blocked": {"pattern": {**SPARSE, "offset": "blocked"}},
    "grouped": {"pattern": {**SPARSE, "heads": "grouped"}},
    "detached": {"pattern": {**SPARSE, "merge_grad": "detached"}},
    "detached full": {"pattern": {**PAPER, "merge_grad": "detached"}, "causal": False},
    "paper": {"pattern": PAPER, "num_heads": 12, "num_kv_heads": 12, "seq_len": 150},
    "dense": {"pattern": {"kind": "dense"}, "num_heads": 6, "num_kv_heads": 3},
    "one token": {"pattern": SPARSE, "seq_len": 1},
    "zero keys": {"pattern": ZERO_KEYS, "causal": False},
    "zero keys, causal": {"pattern": ZERO_KEYS, "causal": True},
    "zero keys, K < H": {"pattern": {**ZERO_KEYS, "offset": "blocked"}, "causal": False, **GROUPED_KV},
    "zero keys, grouped": {"pattern": {**ZERO_KEYS, "heads": "grouped"}, "causal": False},
    "zero keys, detached": {"pattern": {**ZERO_KEYS, "merge_grad": "detached"}, "causal": False},
    "zero keys, torchscale": {
        "pattern": {**ZERO_KEYS, "merge_grad": "detached", "offset": "blocked"},
        "causal": False,
        **GROUPED_KV,
    },
}


def workload(change: dict[str, object]) -> Workload:
    return Workload.model_validate({**BASE, **change})


def draw(w: Workload) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    lead = (w.seq_len,) if w.layout == "packed" else (w.batch_size, w.seq_len)
    heads = (w.num_heads, w.num_kv_heads, w.num_kv_heads, w.num_heads)
    q, k, v, dout = (torch.randn(*lead, h, w.head_dim, generator=generator, dtype=torch.float64) for h in heads)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def softmax(q: Tensor, k: Tensor, v: Tensor, w: Workload, c: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of the formula for counts c [H, N, N], rows without keys given as 0 and -inf.

    Zero keys are one more key each row sees as often as there are of them.
    """
    null = zero_keys(w)
    k, v = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (k, v))
    c = torch.cat([c, null[..., None]], -1)
    k, v = (x.repeat_interleave(w.group_size, dim=2) for x in (k, v))
    empty = c.sum(-1) == 0
    # An empty row gets all keys, so that autograd stays finite, and is cut out at the end.
    c = torch.where(empty[..., None], 1, c).double()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * w.softmax_scale + c.log()
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    out = out.masked_fill(empty.T[None, :, :, None], 0.0)
    return out, scores.logsumexp(-1).masked_fill(empty, -torch.inf)


def zero_keys(w: Workload) -> Tensor:
    """[H, N]: how many each row sees, counted position by position in segments filled up to a multiple of the rate."""
    count = torch.zeros(w.num_heads, w.seq_len, dtype=torch.int64)
    if not isinstance(w.pattern, DilatedPattern) or w.pattern.padding == "masked" or w.causal:
        return count
    for head in range(w.num_heads):
        for segment, rate in w.pattern.head_branches(head, w.num_heads):
            segment = min(segment, w.seq_len)
            offset = w.pattern.head_offset(head, rate, w.num_heads, w.num_kv_heads)
            for i in range(w.seq_len):
                start = i // segment * segment
                padded = range(min(segment, w.seq_len - start), -(-segment // rate) * rate)
                if (i - start) % rate == offset:
                    count[head, i] += sum(t % rate == offset for t in padded)
    return count


def all_counts(w: Workload) -> Tensor:
    return torch.stack([multiplicity(w, head, torch.arange(w.seq_len)) for head in range(w.num_heads)])


def brute_force(q: Tensor, k: Tensor, v: Tensor, w: Workload) -> tuple[Tensor, Tensor]:
    """The formula; with detached merge weights, LongNet's merge of separate branches with exp(lse_b - lse) constant."""
    pattern = w.pattern
    if not (isinstance(pattern, DilatedPattern) and pattern.merge_grad == "detached"):
        return softmax(q, k, v, w, all_counts(w))
    outs, lses = [], []
    for segment, rate in pattern.branches:
        fields = {**pattern.model_dump(), "segment_lengths": (segment,), "dilation_rates": (rate,)}
        branch = w.replace(pattern=fields)
        out, lse = softmax(q, k, v, branch, all_counts(branch))
        outs.append(out)
        lses.append(lse)
    stacked = torch.stack(lses).detach()
    total = stacked.logsumexp(0)
    weights = (stacked - total.masked_fill(total == -torch.inf, 0.0)).exp()
    merged = sum(o * weight.transpose(1, 2)[..., None] for o, weight in zip(outs, weights, strict=True))
    assert isinstance(merged, Tensor)
    return merged, total


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_out_lse_and_gradients_are_those_of_the_formula(change: dict[str, object]) -> None:
    w = workload(change)
    q, k, v, dout = draw(w)
    out, lse = build(w, CONTEXT).with_lse(q, k, v)
    expected_out, expected_lse = brute_force(q, k, v, w)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=0, atol=1e-13)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    expected = torch.autograd.grad(expected_out, (q, k, v), dout)
    for gradient, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=0, atol=1e-12)


def test_detached_gradients_differ_from_exact_ones_in_dq_and_dk_only() -> None:
    w = workload({"pattern": PAPER})
    q, k, v, dout = draw(w)
    exact = torch.autograd.grad(build(w, CONTEXT)(q, k, v), (q, k, v), dout)
    detached = workload({"pattern": {**PAPER, "merge_grad": "detached"}})
    other = torch.autograd.grad(build(detached, CONTEXT)(q, k, v), (q, k, v), dout)
    differences = [float((a - b).norm() / b.norm()) for a, b in zip(exact, other, strict=True)]
    assert differences[0] > 0.02
    assert differences[1] > 0.02
    assert differences[2] < 1e-14


def test_uncovered_rows_are_zero_without_gradient() -> None:
    w = workload({"pattern": SPARSE})
    q, k, v, dout = draw(w)
    out, lse = build(w, CONTEXT).with_lse(q, k, v)
    uncovered = (all_counts(w).sum(-1) == 0).T
    assert uncovered.any()
    assert not out[:, uncovered].any()
    assert (lse.transpose(1, 2)[:, uncovered] == -torch.inf).all()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert not dq[:, uncovered].any()
    assert torch.isfinite(torch.cat([dq, dk, dv])).all()


def test_packed_sequences_equal_separate_ones() -> None:
    bounds = (0, 1, 30, 61)
    w = workload({"pattern": SPARSE, "batch_size": 1, "layout": "packed", "cu_seqlens": bounds})
    q, k, v, dout = draw(w)
    out, lse = build(w, CONTEXT).with_lse(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    for start, end in w.sequences:
        single = workload({"pattern": SPARSE, "batch_size": 1, "seq_len": end - start})
        parts = [x[None, start:end].detach().requires_grad_() for x in (q, k, v)]
        part_out, part_lse = build(single, CONTEXT).with_lse(*parts)
        torch.testing.assert_close(out[start:end], part_out[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(lse[:, start:end], part_lse[0], rtol=0, atol=1e-14)
        part_gradients = torch.autograd.grad(part_out, parts, dout[None, start:end])
        for whole, part in zip(gradients, part_gradients, strict=True):
            torch.testing.assert_close(whole[start:end], part[0], rtol=0, atol=1e-13)


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    w = workload({"pattern": SPARSE})
    q, k, v, dout = draw(w)
    whole = build(w, CONTEXT)(q, k, v)
    expected = torch.autograd.grad(whole, (q, k, v), dout)
    monkeypatch.setattr(blocks, "MAX_BLOCK_SCORES", 50)
    blocked = build(w, CONTEXT)(q, k, v)
    torch.testing.assert_close(blocked, whole, rtol=0, atol=1e-14)
    for a, b in zip(torch.autograd.grad(blocked, (q, k, v), dout), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_sampled_rows_equal_those_of_the_whole() -> None:
    """Gradients too, when dout is zero in the other rows."""
    w = workload({"pattern": PAPER, "seq_len": 97, "num_heads": 6, "num_kv_heads": 3})
    rows, keys = torch.tensor([0, 15, 16, 63, 96]), torch.tensor([0, 3, 16, 90])
    q, k, v, dout = draw(w)
    whole_out, whole_lse = build(w, CONTEXT).with_lse(q, k, v)
    sampled = torch.zeros_like(dout)
    sampled[:, rows] = dout[:, rows]
    expected = torch.autograd.grad(whole_out, (q, k, v), sampled)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = attend_rows(q, k, v, w, rows)
    torch.testing.assert_close(out, whole_out[:, rows].detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, whole_lse[..., rows], rtol=0, atol=1e-14)
    dq, dk, dv = attend_rows_backward(dout[:, rows], q, k, v, out, lse, w, rows, keys)
    for actual, value in ((dq, expected[0][:, rows]), (dk, expected[1][:, keys]), (dv, expected[2][:, keys])):
        torch.testing.assert_close(actual, value, rtol=0, atol=1e-13)


def test_a_row_of_a_million_tokens_is_cheap_and_right() -> None:
    w = workload(
        {"pattern": PAPER, "seq_len": 2**20, "batch_size": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    )
    q, k, v, _ = (x.detach() for x in draw(w))
    rows = torch.tensor([0, 2**20 - 1])
    out, lse = attend_rows(q, k, v, w, rows)
    # The last segment of every branch, alone: 256 divides 2^20, so its segments and residues are the same.
    tail = [x[:, -256:] for x in (q, k, v)]
    short_out, short_lse = attend_rows(*tail, w.replace(seq_len=256), torch.tensor([255]))
    torch.testing.assert_close(out[:, 1:], short_out, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse[..., 1:], short_lse, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_has_the_dtype_of_q_and_lse_stays_float64(dtype: torch.dtype) -> None:
    w = workload({"pattern": SPARSE})
    q, k, v, _ = (x.detach().to(dtype) for x in draw(w))
    out, lse = build(w, CONTEXT).with_lse(q, k, v)
    assert out.dtype == dtype
    assert lse.dtype == torch.float64
    expected, _ = brute_force(q.double(), k.double(), v.double(), w)
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-12)

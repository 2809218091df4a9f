"""`gather`, `strided` and `dense` equal the oracle in float64, forward and backward, over random workloads."""

from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend, WithLse
from dilabench.engine.verify.oracle import reference
from dilabench.impls import gather, strided
from dilabench.workload.spec import Workload
from tests.conftest import random_examples

CONTEXT = BuildContext(device=torch.device("cpu"), backend=LoadedBackend("math", math.attend, math.attend_backward))
TOLERANCE = 1e-10


@st.composite
def workloads(draw: st.DrawFn, kind: str = "dilated", merge_grad: str = "exact", padding: str = "masked") -> Workload:
    """Odd sizes: prime N, segments longer than N, rates that divide nothing, fewer heads than the rate, K < H."""
    kv_heads = draw(st.integers(1, 5))
    causal = draw(st.booleans())
    pattern: dict[str, Any] = {"kind": kind}
    if kind == "dilated":
        branches = draw(st.integers(1, 4))
        pattern |= {
            "segment_lengths": draw(st.lists(st.integers(1, 60), min_size=branches, max_size=branches)),
            "dilation_rates": draw(
                st.lists(st.sampled_from((1, 2, 3, 4, 5, 6, 12)), min_size=branches, max_size=branches)
            ),
            "heads": draw(st.sampled_from(("all", "grouped"))),
            "offset": draw(st.sampled_from(("modulo", "blocked"))),
            "offset_by": draw(st.sampled_from(("head", "kv_head"))),
            "merge_grad": merge_grad,
            "padding": padding,
        }
    seq_len = draw(st.sampled_from((1, 7, 24, 37, 48)))
    if padding == "zero_key":
        # A rate that does not divide a segment inside the sequence is refused.
        pairs = zip(pattern["segment_lengths"], pattern["dilation_rates"], strict=True)
        pattern["segment_lengths"] = [w if w >= seq_len else -(-w // r) * r for w, r in pairs]
        causal = causal and draw(st.booleans())
    return Workload.model_validate(
        {
            "pattern": pattern,
            "batch_size": draw(st.integers(1, 3)),
            "seq_len": seq_len,
            "num_heads": kv_heads * draw(st.integers(1, 4)),
            "num_kv_heads": kv_heads,
            "head_dim": draw(st.sampled_from((4, 5))),
            "dtype": "float64",
            "causal": causal,
            "window": (draw(st.sampled_from((-1, 0, 5))), draw(st.sampled_from((-1, 0) if causal else (-1, 0, 3)))),
            "scale": draw(st.sampled_from((None, 0.3))),
            "mode": "both",
        }
    )


def results(attention: WithLse, workload: Workload) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv on inputs drawn from a fixed seed, with a random output gradient."""
    generator = torch.Generator().manual_seed(1)
    B, N, D = workload.batch_size, workload.seq_len, workload.head_dim
    lead = (N,) if workload.layout == "packed" else (B, N)
    shapes = [(*lead, heads, D) for heads in (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes)
    dout = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    out, lse = attention.with_lse(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def assert_gives(module: ModuleType, workload: Workload, expected: dict[str, Tensor]) -> None:
    actual = results(module.build(workload, CONTEXT), workload)
    for name, value in expected.items():
        where = f"{module.build.__module__}, {name}: "
        torch.testing.assert_close(
            actual[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, where=where: where + text
        )


def assert_equals_oracle(module: ModuleType, workload: Workload) -> None:
    assert_gives(module, workload, results(reference.build(workload, CONTEXT), workload))


def assert_both_equal_oracle(workload: Workload) -> None:
    expected = results(reference.build(workload, CONTEXT), workload)
    for module in (gather, strided):
        assert_gives(module, workload, expected)


@random_examples(14, 120, workload=workloads())
def test_both_equal_oracle(workload: Workload) -> None:
    assert_both_equal_oracle(workload)


@random_examples(12, 50, workload=workloads(merge_grad="detached"))
def test_gather_equals_oracle_with_detached_merge_weights(workload: Workload) -> None:
    assert_equals_oracle(gather, workload)


@random_examples(
    10,
    80,
    bounds=st.lists(st.integers(1, 47), unique=True, max_size=4).map(lambda inner: (0, *sorted(inner), 48)),
    workload=workloads(merge_grad="detached", padding="zero_key"),
    exact=st.booleans(),
)
def test_packed_sequences_equal_the_oracle(bounds: tuple[int, ...], workload: Workload, exact: bool) -> None:
    fields = workload.pattern.model_dump()
    # Rates that divide all segments fit sequences of any lengths.
    segments = [-(-w // r) * r for w, r in zip(fields["segment_lengths"], fields["dilation_rates"], strict=True)]
    pattern = {**fields, "segment_lengths": segments, "merge_grad": "exact" if exact else "detached"}
    packed = {"layout": "packed", "cu_seqlens": bounds, "batch_size": 1, "seq_len": 48}
    assert_equals_oracle(strided, workload.replace(pattern=pattern, **packed))


@random_examples(
    10, 80, workload=st.sampled_from(("exact", "detached")).flatmap(lambda grad: workloads("dilated", grad, "zero_key"))
)
def test_both_equal_oracle_with_zero_keys(workload: Workload) -> None:
    assert_both_equal_oracle(workload)


@random_examples(12, 50, workload=workloads(kind="dense"))
def test_dense_equals_oracle(workload: Workload) -> None:
    assert_equals_oracle(strided, workload)


def test_the_papers_setting_scaled_down() -> None:
    """r = 6 and 12 divide neither their segments nor the residues of 12 heads evenly."""
    workload = Workload.model_validate(
        {
            "pattern": {
                "kind": "dilated",
                "segment_lengths": (8, 16, 32, 64, 128),
                "dilation_rates": (1, 2, 4, 6, 12),
            },
            "batch_size": 1,
            "seq_len": 128,
            "num_heads": 12,
            "num_kv_heads": 12,
            "head_dim": 8,
            "dtype": "float64",
            "causal": True,
        }
    )
    assert_both_equal_oracle(workload)

"""Single rows of batch items, each of a head, against the same rows of all heads; and heads computed together."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.engine.call.inputs import make_inputs
from dilabench.engine.verify.oracle.blocks import SingleRows, _joined_heads
from dilabench.engine.verify.oracle.formula import attend_rows_backward
from dilabench.engine.verify.oracle.oracle import exact_rows
from dilabench.engine.verify.oracle.rounding import gradient_sizes
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.patterns.registry import pattern_type
from dilabench.plugins.manager import discover
from dilabench.workload.spec import Workload

EXAMPLES = [example for kind in discover().catalogue.patterns for example in pattern_type(kind.name).examples()]
CPU, NO_KEYS = torch.device("cpu"), torch.zeros(0, dtype=torch.int64)
DILATED = {"kind": "dilated", "segment_lengths": (8, 21, 300), "dilation_rates": (2, 3, 7)}
SETTINGS: dict[str, dict[str, Any]] = {
    "zero keys": {"pattern": {**DILATED, "padding": "zero_key"}, "causal": False},
    "zero keys, detached": {"pattern": {**DILATED, "padding": "zero_key", "merge_grad": "detached"}, "causal": False},
    "grouped": {"pattern": {**DILATED, "heads": "grouped"}, "causal": True},
    "window": {"pattern": {"kind": "dense"}, "causal": True, "window": (9, 0)},
    "window, dilated": {"pattern": DILATED, "causal": False, "window": (9, 4)},
    "softcap": {"pattern": {"kind": "dense"}, "causal": True, "softcap": 0.5},
    "last rows": {"pattern": DILATED, "causal": True, "query_len": 13},
    "packed": {"pattern": DILATED, "causal": True, "layout": "packed", "cu_seqlens": (0, 20, 61), "batch_size": 1},
}


Heads = tuple[Tensor, Tensor, Tensor]


def results(heads: Heads, dout: Tensor, workload: Workload, rows: Tensor | SingleRows) -> tuple[Tensor, ...]:
    """out, its size, dq, its size."""
    exact = exact_rows(heads, workload, rows, dout.dtype)
    dq = attend_rows_backward(dout, *heads, exact.out, exact.lse, workload, rows, NO_KEYS)
    sizes = gradient_sizes(dout, *heads, exact.lse, workload, rows, NO_KEYS, dq)
    return exact.out, exact.size, dq[0], sizes[0]


def check(workload: Workload) -> None:
    """12 single rows, against each row of all heads and items by itself: sizes depend on the keys of a block."""
    inputs = make_inputs(workload, "heads", 1, CPU)
    q, k, v = (x.detach() if x.ndim == 4 else x.detach()[None] for x in inputs.distinct)
    generator = torch.Generator().manual_seed(5)
    dout = torch.randn(*q.shape[:3], v.shape[3], generator=generator, dtype=q.dtype)
    items, rows, heads = (torch.randint(size, (12,), generator=generator) for size in q.shape[:3])
    of_k, of_v = (x[items, :, heads // workload.group_size][:, :, None] for x in (k, v))
    of_q, of_dout = (x[items, rows, heads][:, None, None] for x in (q, dout))
    single = results((of_q, of_k, of_v), of_dout, workload, SingleRows(tuple(rows.tolist()), tuple(heads.tolist())))
    for at, (item, row, head) in enumerate(zip(items.tolist(), rows.tolist(), heads.tolist(), strict=True)):
        whole = results((q, k, v), dout[:, row : row + 1], workload, torch.tensor([row]))
        for of_all, of_one in zip(whole, single, strict=True):
            torch.testing.assert_close(of_one[at, 0, 0], of_all[item, 0, head], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("pattern", EXAMPLES, ids=str)
def test_a_single_row_is_the_row_of_all_heads_under_every_pattern(pattern: Pattern) -> None:
    causal = pattern.why_not_over(SequenceShape(61, 4, 2, True, (-1, -1))) is None
    shape = {"batch_size": 3, "seq_len": 61, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mode": "both"}
    check(Workload(pattern=pattern, causal=causal, dtype="float64", **shape))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_single_row_is_the_row_of_all_heads_under_every_setting(setting: str) -> None:
    shape = {"batch_size": 3, "seq_len": 61, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mode": "both"}
    check(Workload.model_validate({"dtype": "float64", **shape, **SETTINGS[setting]}))


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("group_size", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [range(24), range(0, 24, 4), range(3, 24, 8), [0, 1, 5, 6, 7, 20], [4, 5, 6, 7, 8]])
def test_heads_are_joined_once_each_and_evenly_over_their_key_heads(
    heads: list[int], group_size: int, most: int
) -> None:
    parts = list(_joined_heads(list(heads), group_size, most))
    assert [head for part, _ in parts for head in part] == list(heads)
    for part, keys in parts:
        assert len(part) <= most
        shared = len(part) // len(keys)
        assert [head // group_size for head in part] == [key for key in keys for _ in range(shared)]

"""What computes masks of blocks and bounds of columns equals the oracle in float64, over random instances of each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle.reference import Reference
from dilabench.engine.verify.oracle.reference import build as build_reference
from dilabench.engine.verify.verification import verify
from dilabench.impls import native_sparse
from dilabench.impls.block_sparse import block_sparse, selected
from dilabench.impls.block_sparse.planned import require_whole_plan
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.patterns.native_sparse import BlockwiseNativeSparsePattern
from dilabench.patterns.topk_blocks import TopKBlocksPattern
from dilabench.patterns.window_sink import WindowSinkPattern
from dilabench.workload.spec import Workload

CONTEXT = BuildContext(device=torch.device("cpu"))
LENGTHS = (1, 7, 37, 131, 150)


def shapes(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, causal = draw(st.integers(1, 3)), draw(st.booleans())
    return {
        "batch_size": draw(st.integers(1, 2)),
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from((4, 5))),
        "dtype": "float64",
        "causal": causal,
        "window": (draw(st.sampled_from((-1, 0, 40))), draw(st.sampled_from((-1, 0) if causal else (-1, 0, 30)))),
    }


@st.composite
def generated(draw: st.DrawFn) -> Workload:
    """Windows, sinks and selections of any size: also beyond the sequence, blocks that its end cuts, equal scores."""
    length = draw(st.sampled_from(LENGTHS))
    pattern = draw(st.one_of(WindowSinkPattern.strategy(length), TopKBlocksPattern.strategy(length)))
    return Workload(pattern=pattern, seq_len=length, **shapes(draw))


@st.composite
def bounded(draw: st.DrawFn) -> tuple[int, np.ndarray, dict[str, Any]]:
    """Any ranges of rows: columns that are hidden from all, rows that see nothing."""
    length, seed = draw(st.sampled_from(LENGTHS)), draw(st.integers(0, 999))
    random = np.random.default_rng(seed)
    bounds = random.integers(0, length + 1, (draw(st.integers(1, 3)), 2, length))
    bounds[:, :, random.random(length) < 0.3] = 0
    bounds[0][:, random.random(length) < 0.2] = [[0], [length]]
    if draw(st.booleans()):
        empty = int(random.integers(length))
        bounds[0, 0], bounds[0, 1] = empty, min(length, empty + 3)
    return length, bounds, shapes(draw)


def results(function: Any, workload: Workload) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    batch = () if workload.layout == "packed" else (workload.batch_size,)
    lead, dim = (*batch, workload.seq_len), workload.head_dim
    heads = (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads)
    q, k, v = (torch.randn(*lead, n, dim, generator=generator, dtype=torch.float64).requires_grad_() for n in heads)
    dout = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    found = {}
    if hasattr(function, "with_lse"):
        out, found["lse"] = function.with_lse(q, k, v)
    else:
        out = function(q, k, v)
    names = ("out", "dq", "dk", "dv")
    return found | dict(zip(names, (out, *torch.autograd.grad(out, (q, k, v), dout)), strict=True))


def assert_equal_to_the_oracle(workload: Workload) -> None:
    oracle = results(Reference(workload), workload)
    for name, mine in results(block_sparse.build(workload, CONTEXT), workload).items():
        torch.testing.assert_close(
            mine, oracle[name], rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@settings(max_examples=25, deadline=None)
@given(workload=generated())
def test_windows_and_selections_equal_the_oracle(workload: Workload) -> None:
    assert_equal_to_the_oracle(workload)


@settings(max_examples=15, deadline=None)
@given(case=bounded())
def test_any_bounds_equal_the_oracle(case: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    length, bounds, shape = case
    path = tmp_path_factory.mktemp("bounds") / "bounds.npy"
    np.save(path, bounds)
    pattern = {"kind": "column_bounds", "bounds": "file", "bounds_file": str(path)}
    assert_equal_to_the_oracle(Workload.model_validate({"pattern": pattern, "seq_len": length, **shape}))


def packed(random: np.random.Generator) -> Workload:
    """Documents of one token up: windows with sinks, bounds of columns, blocks of any size, also over branches."""
    lengths = random.choice((1, 2, 7, 15, 16, 17, 33, 64, 95), random.integers(1, 7))
    size, seed = int(random.choice((1, 7, 16, 32))), int(random.integers(99))
    branches = {"kind": "dilated", "segment_lengths": (16, 48), "dilation_rates": (1, 3)}
    masks = {"kind": "block_sparse", "mask": "random", "block_size": size, "sparsity": 0.6, "seed": seed}
    patterns: tuple[dict[str, Any], ...] = (
        {"kind": "window_sink", "sinks": int(random.integers(0, 20)), "window_size": int(random.integers(1, 40))},
        {"kind": "column_bounds", "document_lengths": (23, 5, 40)},
        {"kind": "column_bounds", "bounds": "shared_question", "document_lengths": (31, 9), "lead": 4, "answers": 3},
        {"kind": "topk_blocks", "selector": "random", "block_size": size, "top_k": 2, "selection_seed": seed},
        {"kind": "topk_blocks", "selector": "mean_key", "block_size": size, "top_k": 1},
        masks | {"per_head": bool(random.integers(2))},
        masks | {"per_head": bool(random.integers(2)), "branches": branches},
    )
    kv_heads, causal = int(random.integers(1, 3)), bool(random.integers(2))
    window = int(random.choice((-1, 0, 20))), int(random.choice((-1, 0) if causal else (-1, 0, 9)))
    return Workload.model_validate(
        {
            "pattern": patterns[random.integers(len(patterns))],
            "batch_size": 1,
            "seq_len": int(lengths.sum()),
            "layout": "packed",
            "cu_seqlens": tuple(np.cumsum([0, *lengths]).tolist()),
            "num_heads": kv_heads * int(random.integers(1, 3)),
            "num_kv_heads": kv_heads,
            "head_dim": 4,
            "dtype": "float64",
            "causal": causal,
            "window": window,
            "mode": "both",
        }
    )


@pytest.mark.parametrize(("first", "last"), [(0, 30), *((at, at + 90) for at in range(30, 300, 90))])
@pytest.mark.slow
def test_random_packings_equal_the_oracle(first: int, last: int) -> None:
    for number in range(first, last):
        workload = packed(np.random.default_rng(number))
        oracle = results(Reference(workload), workload)
        for name, mine in results(block_sparse.build(workload, CONTEXT), workload).items():
            message = f"{number}: {name} of {workload}"
            torch.testing.assert_close(
                mine, oracle[name], rtol=1e-10, atol=1e-11, msg=lambda text, at=message: at + text
            )


SHAPE = {"batch_size": 1, "seq_len": 391, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "causal": True}
PATTERNS: dict[str, dict[str, Any]] = {
    "window_sink": {"sinks": 9, "window_size": 140},
    "column_bounds": {"bounds": "shared_question", "document_lengths": (170, 3, 260), "lead": 20},
    "topk_blocks": {"block_size": 128, "top_k": 2, "selector": "pooled"},
}


def test_bounds_need_no_list_of_blocks_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory grows with the length, not with its square."""

    def refuse(*_: object) -> None:
        raise AssertionError("a list of blocks was made")

    monkeypatch.setattr(BlockPlan, "lists", refuse)
    workload = Workload.model_validate({"pattern": {"kind": "column_bounds"}, **SHAPE, "dtype": "float64"})
    results(block_sparse.build(workload, CONTEXT), workload)
    assert require_whole_plan(workload).mask.strides == (0, 0, 0)


def test_a_file_of_indices_is_one_selection_for_each_key_value_head(tmp_path: Path) -> None:
    indices = np.array([[[0], [1], [0], [2]], [[0], [0], [2], [-1]]])
    np.save(tmp_path / "indices.npy", indices)
    pattern = {
        "kind": "topk_blocks",
        "selector": "given",
        "indices_file": str(tmp_path / "indices.npy"),
        "block_size": 16,
    }
    fields = {"pattern": pattern, **SHAPE, "seq_len": 57, "causal": False, "dtype": "float64"}
    workload = Workload.model_validate(fields)
    lse = results(block_sparse.build(workload, CONTEXT), workload)["lse"]
    assert torch.isinf(lse[0, 2:, 48:]).all()
    assert torch.isfinite(lse[0, :2]).all()


@pytest.mark.parametrize("kind", ["window_sink", "column_bounds"])
def test_bounds_that_are_planned_in_every_call_are_those_of_the_pattern(kind: str) -> None:
    workload = Workload.model_validate({"pattern": {"kind": kind, **PATTERNS[kind]}, **SHAPE, "dtype": "float64"})
    oracle = results(Reference(workload), workload)
    for name, mine in results(selected.build_planned(workload, CONTEXT), workload).items():
        torch.testing.assert_close(mine, oracle[name], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("selector", ["mean_key", "pooled"])
def test_what_is_selected_in_every_call_is_what_the_oracle_takes(selector: str) -> None:
    pattern = {"kind": "topk_blocks", "selector": selector, "block_size": 16, "top_k": 2}
    workload = Workload.model_validate(
        {"pattern": pattern, **SHAPE, "seq_len": 150, "head_dim": 17, "dtype": "float64"}
    )
    oracle = results(Reference(workload), workload)
    for build in (selected.build_planned, selected.build_selected):
        for name, mine in results(build(workload, CONTEXT), workload).items():
            torch.testing.assert_close(mine, oracle[name], rtol=1e-10, atol=1e-11)


def by_definition(workload: Workload, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """NSA by whole matrices: the masks of its three attentions from their own rules."""
    pattern, group = BlockwiseNativeSparsePattern.of(workload), workload.group_size
    size, length = pattern.block_size, workload.seq_len
    (shape,) = workload.shapes
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    causal = (j <= i) | (not workload.causal)
    chosen = torch.from_numpy(pattern.summands(shape)[1].pattern.whole_blocks(shape).mask.copy())
    masks = [
        ((torch.arange(length // size)[None] + 1) * size - 1 <= i) | (not workload.causal),
        chosen.repeat_interleave(group, 0)[:, i // size, j // size] & causal,
        (j <= i) & (j > i - pattern.window_size),
    ]
    starts = range(0, length // size * size, size)
    means = [torch.stack([x[:, at : at + size].mean(1) for at in starts], 1) for x in (k, v)]
    out = torch.zeros_like(q)
    for mask, (keys, values), gate in zip(masks, (means, (k, v), (k, v)), gates, strict=True):
        keys, values = (x.repeat_interleave(group, 2) for x in (keys, values))
        scores = torch.einsum("bihd,bjhd->bhij", q, keys) * workload.softmax_scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
        out = out + gate[..., None] * torch.einsum("bhij,bjhd->bihd", weights, values)
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_native_sparse_and_the_oracle_are_its_definition_with_gradients_of_gates(causal: bool) -> None:
    pattern = {"kind": "blockwise_native_sparse", "block_size": 7, "top_k": 3, "window_size": 12}
    workload = Workload.model_validate(
        {"pattern": pattern, **SHAPE, "seq_len": 61, "num_heads": 6, "causal": causal, "dtype": "float64"}
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 61, n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in (6, 2, 2))
    dout = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    function = native_sparse.build(workload, CONTEXT)
    gates = function.gates.clone().requires_grad_()
    wanted_out = by_definition(workload, q, k, v, gates)
    wanted = wanted_out, *torch.autograd.grad(wanted_out, (q, k, v, gates), dout)
    out = function.with_gates(q, k, v, gates)
    found = out, *torch.autograd.grad(out, (q, k, v, gates), dout)
    exact = build_reference(workload)(q, k, v)
    oracle = exact, *torch.autograd.grad(exact, (q, k, v), dout)
    for one in (found, oracle):
        for mine, theirs in zip(one, wanted, strict=False):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_missing_part_of_native_sparse_is_caught(left_out: int) -> None:
    pattern = {"kind": "blockwise_native_sparse", "block_size": 8, "top_k": 1, "window_size": 5}
    workload = Workload.model_validate({"pattern": pattern, **SHAPE, "seq_len": 61, "head_dim": 16, "mode": "both"})
    function = native_sparse.build(workload, CONTEXT)
    function.gates[left_out] = 0.0
    assert not verify(function, workload).passed


def test_where_no_block_is_whole_nothing_is_compressed() -> None:
    pattern = {"kind": "blockwise_native_sparse", "block_size": 64, "top_k": 1, "window_size": 5}
    workload = Workload.model_validate({"pattern": pattern, **SHAPE, "seq_len": 37, "mode": "both"})
    assert verify(native_sparse.build(workload, CONTEXT), workload).passed


@pytest.mark.parametrize(("fields", "name"), [({"window_size": 21}, "window_size + 1"), ({"sinks": 0}, "no sinks")])
def test_a_window_that_is_off_by_one_is_named(fields: dict[str, int], name: str) -> None:
    right = {"kind": "window_sink", "sinks": 3, "window_size": 20}
    workload = Workload.model_validate({"pattern": right, **SHAPE, "seq_len": 97, "head_dim": 16})
    wrong = block_sparse.build(workload.replace(pattern={**right, **fields}), CONTEXT)
    assert verify(wrong, workload).diagnosis == f"out is that of {name}"

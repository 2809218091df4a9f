"""Block-sparse attention: the CPU path and the oracle against the definition of C, gradients, masks of any shape."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle.reference import Reference
from dilabench.engine.verify.verification import summary, verify
from dilabench.impls.block_sparse.block_sparse import build
from dilabench.impls.visible_keys import multiplicity
from dilabench.patterns.block_sparse import block_mask
from dilabench.workload.spec import Workload, attended_pairs
from dilabench.workload.visibility import alike_heads, covered, seen_by
from tests.conftest import slow

BASE = {"batch_size": 2, "seq_len": 61, "num_heads": 6, "num_kv_heads": 3, "head_dim": 24, "dtype": "float64"}
BRANCHES = {"kind": "dilated", "segment_lengths": (20, 32), "dilation_rates": (2, 3)}
CASES = {
    "local": {"mask": "local_window", "block_size": 7},
    "random per head": {"mask": "random", "block_size": 8, "per_head": True},
    "strided full": {"mask": "strided", "block_size": 5, "causal": False},
    "window": {"mask": "global_local", "block_size": 9, "window": (13, 0)},
    "narrow window": {"mask": "random", "block_size": 9, "causal": False, "window": (2, 1)},
    "branches": {"mask": "local_window", "block_size": 3, "branches": BRANCHES},
    "branches per head": {"mask": "random", "block_size": 3, "per_head": True, "branches": BRANCHES, "causal": False},
    "grouped branches": {"mask": "random", "block_size": 4, "branches": {**BRANCHES, "heads": "grouped"}},
    "detached branches": {"mask": "random", "block_size": 3, "branches": {**BRANCHES, "merge_grad": "detached"}},
}
OF_PATTERN = ("mask", "block_size", "per_head", "branches", "mask_file", "sparsity", "seed")


def workload(fields: dict[str, object], **changes: object) -> Workload:
    pattern = {"kind": "block_sparse", "sparsity": 0.6} | {n: v for n, v in fields.items() if n in OF_PATTERN}
    rest = {name: value for name, value in fields.items() if name not in OF_PATTERN}
    return Workload.model_validate({**BASE, **rest, **changes, "pattern": pattern})


def saved(mask: np.ndarray, folder: Path) -> str:
    path = folder / "mask.npy"
    np.save(path, mask)
    return str(path)


def by_definition(w: Workload, head: int) -> np.ndarray:
    """C[head] by index arithmetic over whole matrices."""
    pattern, N = w.pattern, w.seq_len
    C = np.zeros((N, N), dtype=int)
    branches = [(N, 1, 0)]
    if pattern.branches is not None:
        members = pattern.branches.head_branches(head, w.num_heads)
        shape = (w.num_heads, w.num_kv_heads)
        branches = [(s, r, pattern.branches.head_offset(head, r, *shape)) for s, r in members]
    for segment, rate, offset in branches:
        for start in range(0, N, segment):
            rows = np.arange(start + offset, min(start + segment, N), rate)
            if len(rows):
                mask = block_mask(pattern, len(rows), w.causal, w.num_heads)
                block = np.arange(len(rows)) // pattern.block_size
                C[np.ix_(rows, rows)] += mask[head % mask.shape[0]][np.ix_(block, block)]
    ahead = np.arange(N)[None] - np.arange(N)[:, None]
    left, right = w.window
    C *= (ahead <= 0) | (not w.causal)
    C *= (ahead >= -left) | (left < 0)
    C *= (ahead <= right) | (right < 0)
    return C


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_counts_by_the_definition(case: str) -> None:
    w = workload(CASES[case])
    total = 0
    for head in range(w.num_heads):
        C = by_definition(w, head)
        assert np.array_equal(multiplicity(w, head, torch.arange(w.seq_len)).numpy(), C)
        assert np.array_equal(covered(w, head), C.sum(1) > 0)
        assert all(seen_by(w, head, key).tolist() == np.flatnonzero(C[:, key]).tolist() for key in range(0, 61, 7))
        total += int(C.sum())
    assert attended_pairs(w) == total * w.batch_size
    for heads in alike_heads(w):
        assert all(np.array_equal(by_definition(w, heads[0]), by_definition(w, head)) for head in heads)


def test_packed_sequences_have_masks_of_their_own() -> None:
    fields = {"mask": "local_window", "block_size": 5, "layout": "packed", "cu_seqlens": (0, 17, 61)}
    w = workload(fields, batch_size=1)
    C = multiplicity(w, 0, torch.arange(61))
    alone = workload({"mask": "local_window", "block_size": 5}, batch_size=1, seq_len=44)
    assert torch.equal(C[17:, 17:], multiplicity(alone, 0, torch.arange(44)))
    assert not C[17:, :17].any()


@pytest.mark.parametrize("mode", [slow("forward"), "both"])
@pytest.mark.parametrize("case", CASES)
def test_passes_verify(case: str, mode: str) -> None:
    w = workload(CASES[case], mode=mode)
    function = build(w, BuildContext(device=torch.device("cpu")))
    verdict = verify(function, w, deterministic=True)
    assert verdict.passed, summary(verdict)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", slow("float16")])
def test_passes_verify_in_other_dtypes(dtype: str) -> None:
    w = workload(CASES["random per head"], dtype=dtype, mode="both", seq_len=131, num_heads=5, num_kv_heads=5)
    verdict = verify(build(w, BuildContext(device=torch.device("cpu"))), w, deterministic=True)
    assert verdict.passed, summary(verdict)


@st.composite
def masks(draw: st.DrawFn) -> tuple[np.ndarray, int, int, dict[str, object]]:
    """(mask, block size, length, other fields): any blocks, empty rows and columns, a ragged last block."""
    block, blocks = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    length = draw(st.integers((blocks - 1) * block + 1, blocks * block))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = draw(st.sampled_from([1, kv_heads * group]))
    bits = draw(st.lists(st.booleans(), min_size=heads * blocks**2, max_size=heads * blocks**2))
    mask = np.array(bits).reshape(heads, blocks, blocks)
    mask[:, draw(st.integers(0, blocks - 1))] &= draw(st.booleans())
    mask[:, :, draw(st.integers(0, blocks - 1))] &= draw(st.booleans())
    causal = draw(st.booleans())
    shape = {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "causal": causal}
    window = (draw(st.integers(-1, 12)), draw(st.integers(-1, 0 if causal else 9)))
    return mask, block, length, {**shape, "window": window}


@settings(max_examples=30, deadline=None)
@given(case=masks())
def test_any_mask_equals_the_oracle(case: tuple[np.ndarray, int, int, dict[str, object]], tmp_path_factory) -> None:
    mask, block, length, fields = case
    path = saved(mask, tmp_path_factory.mktemp("mask"))
    custom = {"mask": "custom", "mask_file": path, "block_size": block}
    w = workload(custom, seq_len=length, head_dim=5, **fields)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, heads, 5) for heads in (w.num_heads, w.num_kv_heads, w.num_kv_heads, w.num_heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    results = []
    for function in (build(w, BuildContext(device=torch.device("cpu"))), Reference(w)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = function.with_lse(*leaves)
        results.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
    for mine, oracle in zip(*results, strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-11, atol=1e-12)


def test_rows_without_keys_are_zero_and_give_no_gradient(tmp_path: Path) -> None:
    mask = np.ones((1, 4, 4), dtype=bool)
    mask[:, 1] = False
    mask[:, :, 2] = False
    custom = {"mask": "custom", "mask_file": saved(mask, tmp_path), "block_size": 16, "causal": False}
    w = workload(custom, seq_len=61)
    shapes = [(2, 61, heads, 24) for heads in (6, 3, 3)]
    q, k, v = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    out, lse = build(w, BuildContext(device=torch.device("cpu"))).with_lse(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert not out[:, 16:32].any()
    assert torch.equal(lse[:, :, 16:32], torch.full((2, 6, 16), -torch.inf, dtype=torch.float64))
    assert not dq[:, 16:32].any()
    assert not dk[:, 32:48].any()
    assert not dv[:, 32:48].any()
    assert dq[:, :16].all()
    assert dk[:, :32].all()


def test_numeric_gradients() -> None:
    w = workload(CASES["random per head"], batch_size=1, seq_len=13, num_heads=2, num_kv_heads=1, head_dim=3)
    function = build(w, BuildContext(device=torch.device("cpu")))
    inputs = [torch.randn(1, 13, heads, 3, dtype=torch.float64).requires_grad_() for heads in (2, 1, 1)]
    assert torch.autograd.gradcheck(function, inputs)


def test_full_masks_are_dense_attention() -> None:
    w = workload({"mask": "local_window", "block_size": 16, "sparsity": 0.0})
    q, k, v = (torch.randn(2, 61, heads, 24, dtype=torch.float64) for heads in (6, 3, 3))
    dense = Reference(w.replace(pattern={"kind": "dense"}))(q, k, v)
    torch.testing.assert_close(build(w, BuildContext(device=torch.device("cpu")))(q, k, v), dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.98])
def test_the_density_asked_for_is_reached(sparsity: float, causal: bool) -> None:
    fields = {"mask": "random", "block_size": 16, "sparsity": sparsity, "per_head": True}
    w = workload(fields, seq_len=2048, causal=causal)
    reached = 1 - w.pattern.density_of(w.shapes)
    # Every row keeps at least one block: with 128 blocks that is 1/128 of a row, causal 2/129 of all.
    assert abs(reached - sparsity) < (0.02 if causal else 0.005)

"""What computes blocks selected per token equals the oracle: random indices in any order, repeated, absent, none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle.reference import Reference
from dilabench.engine.verify.verification import verify
from dilabench.impls.selected import gather, lists, selected_blocks
from dilabench.impls.selected.gather import Gathered
from dilabench.impls.selected.lists import Listed
from dilabench.impls.selected.selection import Selection
from dilabench.impls.selected.stand_ins import selecting_all
from dilabench.kernels.cpu import flash
from dilabench.patterns.pattern import Pattern
from dilabench.patterns.selected_blocks import SelectedBlocksPattern
from dilabench.workload.spec import Workload
from tests.conftest import slow

CONTEXT = BuildContext(device=torch.device("cpu"))
SHAPE: dict[str, Any] = {
    "pattern": {"kind": "selected_blocks", "block_size": 16, "top_k": 2},
    "batch_size": 1,
    "seq_len": 83,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "mode": "both",
}
needs_compiler = pytest.mark.skipif(not flash.serves(torch.float32), reason="needs a C++ compiler, none works here")


def random_case(seed: int, folder: Path) -> Workload:
    """Ragged lengths, more indices than blocks, rows without any, shared and single heads, windows, sequences."""
    draw = np.random.default_rng(seed)
    length, block = int(draw.integers(1, 150)), int(draw.choice((1, 16, 32, 64, 160)))
    kv_heads, causal = int(draw.integers(1, 4)), bool(draw.integers(2))
    blocks, width = -(-length // block), int(draw.integers(1, 9))
    indices = draw.integers(-1, blocks, (length, draw.choice((1, kv_heads)), width))
    indices[draw.random(length) < 0.2] = -1
    if seed % 10 == 0:
        indices[:] = -1
    np.save(folder / f"{seed}.npy", indices)
    pattern = {"kind": "selected_blocks", "block_size": block, "indices_file": str(folder / f"{seed}.npy")}
    left, right = draw.choice((-1, -1, 0, 40)), draw.choice((-1, 0) if causal else (-1, -1, 30))
    shape = {
        "batch_size": int(draw.integers(1, 3)),
        "seq_len": length,
        "num_heads": kv_heads * int(draw.integers(1, 6)),
        "num_kv_heads": kv_heads,
        "head_dim": int(draw.choice((1, 8, 17))),
        "causal": causal,
        "window": (int(left), int(right)),
        "dtype": "float64",
    }
    return Workload.model_validate({**shape, "pattern": SelectedBlocksPattern.from_request(pattern)})


def results(function: Any, workload: Workload, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lead = () if workload.layout == "packed" else (workload.batch_size,)
    heads, dim = (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads), workload.head_dim
    shapes = [(*lead, workload.seq_len, n, dim) for n in heads]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)
    dout = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(dtype)
    out, lse = function.with_lse(q, k, v)
    found = {"out": out, "lse": lse}
    return found | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True))


def assert_equal_to_the_oracle(workload: Workload) -> None:
    oracle = results(Reference(workload), workload)
    for name, mine in results(gather.build(workload, CONTEXT), workload).items():
        torch.testing.assert_close(mine, oracle[name], rtol=1e-10, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")
    if flash.serves(torch.float32):
        single = workload.replace(dtype="float32")
        for name, mine in results(selected_blocks.build(single, CONTEXT), single, torch.float32).items():
            torch.testing.assert_close(mine.double(), oracle[name], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("seed", [*range(10), *map(slow, range(10, 20))])
def test_random_selections_equal_the_oracle(seed: int, tmp_path: Path) -> None:
    assert_equal_to_the_oracle(random_case(seed, tmp_path))


@pytest.mark.slow
def test_four_hundred_random_selections_equal_the_oracle(tmp_path: Path) -> None:
    for seed in range(400):
        assert_equal_to_the_oracle(random_case(seed, tmp_path))


@pytest.mark.parametrize("pattern", SelectedBlocksPattern.examples(), ids=lambda pattern: pattern.label())
def test_packed_sequences_equal_the_oracle(pattern: Pattern) -> None:
    packed = {"layout": "packed", "cu_seqlens": (0, 1, 40, 83), "dtype": "float64"}
    assert_equal_to_the_oracle(Workload.model_validate({**SHAPE, "pattern": pattern, **packed}))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "pattern",
    [one for one in SelectedBlocksPattern.examples() if one.reads_queries],
    ids=lambda pattern: pattern.label(),
)
def test_a_device_selects_what_the_oracle_takes(pattern: SelectedBlocksPattern, causal: bool) -> None:
    workload = Workload.model_validate({**SHAPE, "pattern": pattern, "num_heads": 6, "causal": causal})
    (shape,) = workload.shapes
    found = selecting_all(workload, torch.device("cpu"))()
    blocks = found.distinct(0, 83)
    assert torch.equal(blocks.where(blocks < found.blocks, -1)[0].int(), torch.from_numpy(pattern.selection(shape)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("pattern", SelectedBlocksPattern.examples(), ids=lambda pattern: pattern.label())
def test_what_is_selected_in_every_call_is_what_the_oracle_takes(pattern: SelectedBlocksPattern, dtype: str) -> None:
    workload = Workload.model_validate({**SHAPE, "pattern": pattern, "dtype": dtype})
    wanted = results(selected_blocks.build(workload, CONTEXT), workload, getattr(torch, dtype))
    builds = [selected_blocks.build_planned, *([selected_blocks.build_selected] if pattern.reads_queries else [])]
    for build in builds:
        for name, mine in results(build(workload, CONTEXT), workload, getattr(torch, dtype)).items():
            assert torch.equal(mine, wanted[name])


@pytest.mark.parametrize("change", [*SelectedBlocksPattern().near_misses().items()], ids=lambda change: change[0])
def test_a_mistaken_selection_is_named(change: tuple[str, Any]) -> None:
    name, mistake = change
    pattern = {**SHAPE["pattern"], "selector": "random", "top_k": 3}
    workload = Workload.model_validate({**SHAPE, "pattern": pattern, "mode": "forward"})
    wrong = workload.model_copy(update={"pattern": mistake.model_copy(update={"inner": workload.pattern})})
    assert verify(Reference(wrong), workload).diagnosis == f"out is that of {name}"


def test_a_diagonal_that_is_not_clipped_is_named() -> None:
    workload = Workload.model_validate({**SHAPE, "mode": "forward"})
    ((name, mistake),) = workload.pattern.near_misses_unmasked().items()
    wrong = workload.model_copy(update={"pattern": mistake, "causal": False})
    assert verify(Reference(wrong), workload).diagnosis == f"out is that of {name}"


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
def test_lists_are_right_for_selections_of_each_batch_item(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "LEAST_FLOPS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(lists, "SORTED_AT_ONCE", 40)
    monkeypatch.setattr(gather, "GATHERED_AT_ONCE", 5000)
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(-1, 5, (2, 70, 2, 4), generator=generator, dtype=torch.int32)
    selection = Selection(indices, 16, causal=True)
    q, dout = (torch.randn(2, 70, 6, 24, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 70, 2, 24, generator=generator) for _ in range(2))
    found = []
    for kind in (Gathered, Listed):
        function = kind(selection, 0.3)
        out, lse = function.forward(q, k, v)
        found.append((out, lse, *function.backward(dout, q, k, v, out, lse)))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Gathered, pytest.param(Listed, marks=needs_compiler)])
def test_hidden_keys_and_other_rows_change_nothing(kind: Any) -> None:
    indices = torch.tensor([0, 0, 2, -1]).expand(1, 60, 1, 4).int()
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 60, 1, 16, generator=generator) for _ in range(4))
    function = kind(Selection(indices, 16, causal=False), 0.3)
    expected = function.forward(q, k, v)
    k[:, 16:32], v[:, 16:32] = torch.nan, torch.inf
    found = function.forward(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    dq, dk, dv = function.backward(dout, q, k, v, *found)
    assert torch.isfinite(dq).all()
    assert not dk[:, 16:32].any()
    assert not dv[:, 16:32].any()


@pytest.mark.slow
def test_kernels_of_gpus_give_what_gathering_gives(interpreted: Any) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")
    found = interpreted("impls/interpreted_selected_blocks.py")
    assert len(found) == 4
    assert max(found.values()) < 1e-5

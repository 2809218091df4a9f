"""Our flash attention in C++ against float64, by every way that it may be compiled and run."""

from __future__ import annotations

import ctypes
import platform
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dilabench.backends import flash_cpu, math
from dilabench.errors import EnvironmentNotReady
from dilabench.kernels.cpu import compiled, flash
from dilabench.kernels.cpu.flash import Mask
from dilabench.machine import cxx_compiler

pytestmark = pytest.mark.skipif(cxx_compiler() is None, reason="needs a C++ compiler, none works here")

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CAUSAL = Mask(-1, 0, 0.2)
MASKS = [(False, (-1, -1)), (True, (-1, -1)), (True, (30, 0)), (False, (7, 3)), (False, (100, -1)), (False, (-1, 5))]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> int:
    """So many of them, however little there is to do."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "LEAST_FLOPS", 1)
        torch.set_num_threads(request.param)
        yield request.param
        torch.set_num_threads(before)


def operands(batch: int, queries: int, keys: int, heads: int, key_heads: int, dim: int, dtype: torch.dtype):
    q, dout = (torch.randn(batch, queries, heads, dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, keys, key_heads, dim).to(dtype) for _ in range(2))
    return q, k, v, dout


def agrees(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **mask: object) -> None:
    exact = [x.double() for x in (q, k, v)]
    out, lse = math.attend(*exact, **mask)
    expected = out, lse, *math.attend_backward(dout.double(), *exact, out, lse, **mask)
    out, lse = flash_cpu.attend(q, k, v, **mask)
    found = out, lse, *flash_cpu.attend_backward(dout, q, k, v, out, lse, **mask)
    assert lse.dtype == torch.float32
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        assert one.shape == other.shape
        error = (one.double() - other).norm() / other.norm().clamp_min(1e-3)
        assert error < TOLERANCES[q.dtype], (name, float(error), list(q.shape), list(k.shape), mask)


def random_call(draw: random.Random) -> None:
    key_heads, queries = draw.choice((1, 2, 3)), draw.randrange(1, 300)
    causal, window = draw.choice(MASKS)
    if draw.random() < 0.4:
        # Few of them are computed otherwise.
        queries = draw.randrange(1, 9)
    keys = draw.randrange(queries if causal or window != (-1, -1) else 1, 300)
    dim, dtype = draw.choice((1, 5, 16, 24, 40, 48, 64, 100, 128, 200)), draw.choice((torch.float32, *TOLERANCES))
    given = operands(draw.choice((1, 2)), queries, keys, key_heads * draw.choice((1, 2)), key_heads, dim, dtype)
    agrees(*given, causal=causal, window=window, scale=dim**-0.5)


def random_calls(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        random_call(draw)


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(threads: int, seed: int) -> None:
    random_calls(seed)


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_narrower_registers(processor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or (processor == "haswell" and not torch.cpu._is_avx2_supported()):
        pytest.skip(f"needs a processor that runs code for {processor}")
    compiled_for(monkeypatch, tmp_path, f"-march={processor}")
    random_calls(7)


@pytest.mark.slow
def test_threads_of_its_own(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(flash, "openmp_parallel", lambda: 0)
    random_calls(8)


def compiled_for(monkeypatch: pytest.MonkeyPatch, folder: Path, option: str) -> None:
    """Until the test ends."""
    monkeypatch.setenv("DILABENCH_COMPILED", str(folder))
    monkeypatch.setattr(compiled, "_for_this_processor", lambda: option)
    monkeypatch.setattr(flash, "library", compiled.library.__wrapped__)


def test_the_last_queries_stand_at_the_last_keys(threads: int) -> None:
    agrees(*operands(2, 70, 200, 2, 1, 32, torch.float32), causal=True, scale=0.2)


@pytest.mark.parametrize("dtype", flash.TYPES)
@pytest.mark.parametrize("count", [1, 3])
def test_few_queries_are_merged_as_many_are(
    threads: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Onto results of other keys, of which some rows have none; keys may lie head by head."""
    q, k, v, _ = operands(2, 3, 700, 4, 2, 40, dtype)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = torch.randn(2, 3, 4, 40), torch.randn(2, 4, 3)
    out[0, 0], lse[0, :, 0] = 0.0, -torch.inf
    mask, results = Mask(500, 0, 0.2, count), []
    for few in (flash.FEW_ROWS, 0):
        monkeypatch.setattr(flash, "FEW_ROWS", few)
        results.append(flash.attend(q, k, v, mask, out.clone(), lse.clone(), onto=True))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_few_queries_see_what_is_no_number_only_where_it_is_visible(value: float, threads: int) -> None:
    q, k, v, _ = operands(1, 2, 300, 2, 2, 32, torch.float32)
    wanted = flash.attend(q, k, v, Mask(9, 0, 0.2))
    for x in (k, v):
        x[:, :200], x[:, 299] = value, value
    out, lse = flash.attend(q, k, v, Mask(9, 0, 0.2))
    torch.testing.assert_close(lse[..., 0], wanted[1][..., 0])
    assert not out[:, 1].isfinite().any()


def test_queries_that_see_nothing(threads: int) -> None:
    q, k, v, dout = operands(1, 130, 40, 2, 2, 48, torch.float32)
    out, lse = flash.attend(q, k, v, CAUSAL)
    assert torch.equal(lse.isneginf()[0, 0], torch.arange(130) < 90)
    assert not out[:, :90].any()
    gradients = flash.attend_backward(dout, q, k, v, out, lse, CAUSAL)
    rows = [x[:, 90:] for x in (dout, q)]
    seen = flash.attend_backward(*rows, k, v, out[:, 90:], lse[..., 90:], CAUSAL)
    assert not gradients[0][:, :90].any()
    for one, other in zip((gradients[0][:, 90:], *gradients[1:]), seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_same_bits_whatever_thread_comes_first(threads: int) -> None:
    q, k, v, dout = operands(1, 500, 500, 3, 3, 32, torch.float32)
    out, lse = flash.attend(q, k, v, CAUSAL)
    first = flash.attend_backward(dout, q, k, v, out, lse, CAUSAL)
    for _ in range(5):
        assert torch.equal(flash.attend(q, k, v, CAUSAL)[0], out)
        assert all(map(torch.equal, flash.attend_backward(dout, q, k, v, out, lse, CAUSAL), first))


@pytest.mark.parametrize("factor", [1e-30, 30.0, 1e4, 1e18])
def test_large_and_small_logits(factor: float) -> None:
    q, k, v, dout = operands(1, 90, 90, 1, 1, 16, torch.float32)
    q *= factor
    mask = {"causal": True, "scale": 1.0}
    out, lse = flash_cpu.attend(q, k, v, **mask)
    expected, expected_lse = math.attend(*(x.double() for x in (q, k, v)), **mask)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert out.isfinite().all()
    if factor < 1e4:
        # Beyond, float32 does not tell logits apart whose weights differ.
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        assert all(x.isfinite().all() for x in flash_cpu.attend_backward(dout, q, k, v, out, lse, **mask))


def test_weights_that_overflow_are_infinite() -> None:
    q, k, v, dout = operands(1, 64, 64, 1, 1, 16, torch.float32)
    out, lse = flash.attend(q, k, v, Mask(-1, -1, 0.2))
    _, _, dv = flash.attend_backward(dout.abs(), q, k, v, out, lse - 1e3, Mask(-1, -1, 0.2))
    assert dv.isposinf().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("nan")])
def test_what_is_no_number_is_seen(value: float) -> None:
    q, k, v, _ = operands(1, 200, 200, 1, 1, 16, torch.float32)
    k[0, 20] = value
    out, _ = flash.attend(q, k, v, CAUSAL)
    assert out[0, 20:].isnan().any(-1).all()
    assert not out[0, :20].isnan().any()


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of what is compiled, and no library loaded from another."""
    compiled_for(monkeypatch, tmp_path / "empty", compiled._for_this_processor())
    return tmp_path / "empty"


def test_it_is_compiled_once(nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody calls it.
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-O0"))
    assert isinstance(flash.library(), ctypes.CDLL)
    monkeypatch.setattr(compiled, "_compile", lambda *_: pytest.fail("compiled again"))
    flash.library()
    (library,) = nothing_compiled.iterdir()
    assert library.suffix == ".so"


def test_a_compiler_that_fails_is_told_of(nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_for_this_processor", lambda: "-march=none-such")
    with pytest.raises(EnvironmentNotReady, match=r"does not compile .*flash\.cpp: .*none-such"):
        flash.library()
    assert list(nothing_compiled.iterdir()) == []


def test_no_compiler(nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "cxx_compiler", lambda: None)
    with pytest.raises(EnvironmentNotReady, match=r"needs a C\+\+ compiler, none of c\+\+, g\+\+, clang\+\+"):
        flash.library()


@pytest.mark.parametrize("dim", [1, 24, 64, 72, 200, 256])
def test_the_room_of_each_thread_begins_at_a_cache_line(dim: int) -> None:
    for sizes in (("forward", dim), ("backward", dim, 77), ("few", 3, 5, dim)):
        assert flash.room_of(*sizes) > 0
        assert flash.room_of(*sizes) % 16 == 0

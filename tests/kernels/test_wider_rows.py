"""Columns of zeros behind head dims: where they are asked for, and that they change no bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels that read them")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from dilabench.kernels import tuning
from dilabench.kernels.fused import forward, wider_rows
from dilabench.kernels.fused.forward import fused_forward
from dilabench.kernels.fused.residue_plan import residue_plan
from dilabench.kernels.launch_cache import Launch, LaunchCache


@pytest.mark.parametrize(
    ("dim", "queries", "keys", "columns"),
    [
        # GigaPath's branches at 70001 tokens, and at 10241: too few pairs.
        (48, 6440, 70001 * 16, 64),
        (48, 3313, 10241 * 16, 48),
        (48, 1000, 1 << 24, 48),
        (40, 6440, 70001 * 16, 64),
        (40, 0, 0, 48),
        (24, 6440, 70001 * 16, 32),
        (64, 6440, 70001 * 16, 64),
        (72, 6440, 70001 * 16, 72),
    ],
)
def test_rows_are_made_whole_lines_where_keys_are_read_often(dim: int, queries: float, keys: int, columns: int) -> None:
    assert dim + tuning.columns_to_add(dim, 2, True, queries, keys) == columns
    assert tuning.columns_to_add(dim, 4, True, queries, keys) == 0
    assert tuning.columns_to_add(dim, 2, False, queries, keys) == 0


def test_what_longer_sequences_ask_for_is_compiled_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Logged:
        def __getitem__(self, _grid: Any) -> Any:
            return lambda **arguments: log.append(f"run {arguments['WIDTH']}")

        def warmup(self, grid: Any, **arguments: Any) -> None:
            log.append(f"compile {arguments['WIDTH']}")

    monkeypatch.setattr(wider_rows, "_widen_kernel", Logged())
    monkeypatch.setattr(forward, "on_hopper", lambda _: True)
    k = torch.zeros(1, 512, 2, 48, dtype=torch.bfloat16)
    plan = residue_plan((256,), (1,), 512, 2, 2, False)
    assert forward._columns_to_add(k, plan) == 0
    assert set(log) == {"compile 64"}
    log.clear()
    monkeypatch.setattr(tuning, "_MANY_QUERIES", 256)
    monkeypatch.setattr(tuning, "_MANY_PAIRS", 256 * 1024)
    assert forward._columns_to_add(k, plan) == 16
    assert log == [], "compiled with what needs it"
    assert wider_rows.with_columns(k, 16, LaunchCache(), "k").shape == (1, 512, 2, 64)
    assert log == ["run 64"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs compiled kernels: TRITON_INTERPRET=1")
def test_what_is_compiled_for_longer_sequences_is_what_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton specialises alike on tensors of one token and on views of a packed one."""
    made: list[Launch] = []
    monkeypatch.setattr(wider_rows, "compile_ahead", made.extend)
    cache = LaunchCache(made)
    packed = torch.zeros(2, 300, 12, 48, dtype=torch.float16)
    wider_rows.make_ready(48, 16, torch.float16, packed.device)
    for x in (packed, packed[:, :, 8:], packed[:1, :299, 3:4], packed.transpose(1, 2), packed[..., 1:41]):
        wider_rows.with_columns(x, 64 - x.shape[3], cache, "x")
    first, *others, narrower = made
    assert all(one.of == first.of for one in others)
    assert all(specialised(one, False) == specialised(first, True) for one in others)
    assert specialised(narrower, False) != specialised(first, False)


def specialised(launch: Launch, ragged: bool) -> str:
    """What Triton compiles a launch for."""
    kernel, (_, arguments) = launch.kernel, launch.arguments(ragged)
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    _, specialization, options = binder(**arguments)
    return repr((specialization, options))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [40, 48])
def test_whole_lines_change_no_bit(monkeypatch: pytest.MonkeyPatch, dim: int, dtype: torch.dtype, causal: bool) -> None:
    tokens, heads, kv_heads = 3001, 6, 2
    plan = residue_plan((500, 1024, 4096), (1, 2, 4), tokens, heads, kv_heads, causal)
    generator = torch.Generator(device="cuda").manual_seed(dim)
    q, k, v = (
        torch.randn(2, tokens, some, dim, generator=generator, device="cuda", dtype=dtype)
        for some in (heads, kv_heads, kv_heads)
    )
    # Views of a packed tensor, too.
    packed = torch.cat((q, k, v), 2)
    for operands in ((q, k, v), packed.split((heads, kv_heads, kv_heads), 2)):
        found = []
        for least in (0, 1 << 62):
            monkeypatch.setattr(tuning, "_MANY_QUERIES", least)
            monkeypatch.setattr(tuning, "_MANY_PAIRS", least)
            # Launches that repeat know of no change.
            LaunchCache.of.cache_clear()
            found.append([fused_forward(*operands, plan) for _ in range(3)])
        LaunchCache.of.cache_clear()
        for repeated in found:
            for out, lse in repeated:
                assert torch.equal(out, found[0][0][0])
                assert torch.equal(lse, found[0][0][1])

"""Columns of zeros behind head dims: where they are asked for, and that they change no bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there are no kernels that read them")

from dilabench.kernels.fused import wider_rows
from dilabench.kernels.fused.forward import fused_forward
from dilabench.kernels.fused.residue_plan import residue_plan
from dilabench.kernels.launches import launches


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
def test_rows_are_made_whole_lines_where_keys_are_read_often(
    monkeypatch: pytest.MonkeyPatch, dim: int, queries: float, keys: int, columns: int
) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(wider_rows, "on_hopper", lambda _: True)
    assert dim + wider_rows.columns_to_add(dim, torch.bfloat16, device, queries, keys) == columns
    assert wider_rows.columns_to_add(dim, torch.float32, device, queries, keys) == 0
    monkeypatch.setattr(wider_rows, "on_hopper", lambda _: False)
    assert wider_rows.columns_to_add(dim, torch.bfloat16, device, queries, keys) == 0


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
            monkeypatch.setattr(wider_rows, "_MANY_QUERIES", least)
            monkeypatch.setattr(wider_rows, "_MANY_PAIRS", least)
            # Launches that repeat know of no change.
            launches.cache_clear()
            found.append([fused_forward(*operands, plan) for _ in range(3)])
        launches.cache_clear()
        for repeated in found:
            for out, lse in repeated:
                assert torch.equal(out, found[0][0][0])
                assert torch.equal(lse, found[0][0][1])

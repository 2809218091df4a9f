"""Run by test_float_parts.py under TRITON_INTERPRET=1: float32 in parts, as on a GPU; prints errors as JSON.

The kernels in Triton run in its interpreter and the Hopper kernel as it stands (`gluon_on_cpu`).
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from unittest import mock

import gluon_on_cpu
import torch
from interpreted_cases import fused, multiplicity, relative, union_softmax

from dilabench.kernels import tuning
from dilabench.kernels.fused import backward_at_once, float_parts, forward, row_layout
from dilabench.kernels.fused.residue_plan import residue_plan
from dilabench.kernels.tuning import TileConfig

with gluon_on_cpu.in_its_place():
    import_module("dilabench.kernels.fused.sm90.parts_forward")

# As in `interpreted_cases`.
CASES = {
    "causal": (2, 108, 4, 2, 16, (32, 64), (1, 2), True, "modulo", "head", (16, 16), ((0, 1),), torch.float32),
    "two groups": (1, 128, 4, 4, 24, (16, 128), (1, 2), False, "modulo", "head", (16, 32), ((0,), (1,)), torch.float32),
    "uncovered rows": (1, 96, 5, 5, 16, (32, 96), (2, 4), False, "modulo", "head", (16, 16), None, torch.float32),
    "columns added": (1, 107, 2, 1, 20, (37, 71), (2, 3), True, "modulo", "head", (16, 16), None, torch.float32),
    "two tiles of columns": (1, 96, 2, 2, 72, (32, 96), (1, 3), True, "modulo", "head", (16, 16), None, torch.float32),
}
WINDOWED = {
    "window, uncovered rows": (
        (2, 107, 2, 1, 16, (50, 95), (4, 7), False, "modulo", "head", (16, 16), None, torch.float32),
        None,
        (20, 9),
    )
}
# B, N, H, K, D, segments, rates, groups, window
HOPPER = {
    "several steps": (2, 192, 4, 2, 32, (64, 192), (1, 2), ((0, 1),), (-1, -1)),
    "merged": (1, 128, 4, 4, 24, (32, 128), (1, 2), ((0,), (1,)), (-1, -1)),
    "one step": (1, 32, 2, 2, 16, (32,), (1,), None, (-1, -1)),
    "odd length, columns added": (2, 107, 3, 1, 20, (64, 400), (1, 2), ((0, 1),), (-1, -1)),
    "window, left over": (2, 171, 2, 1, 48, (70, 130), (4, 3), None, (20, 50)),
    "two products of columns": (1, 107, 2, 1, 96, (64, 400), (1, 2), ((0, 1),), (-1, -1)),
    "128 columns": (1, 128, 2, 2, 128, (64, 128), (1, 2), ((0,), (1,)), (-1, -1)),
}
HOPPER_TILES = TileConfig(16, 32, 4, 1)


def hopper(case, causal: bool) -> dict[str, float]:
    batch, n, heads, kv_heads, dim, segments, rates, cut, window = case
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(batch, n, one, dim, generator=generator) for one in (heads, kv_heads, kv_heads))
    plan = residue_plan(segments, rates, n, heads, kv_heads, causal, tile=16, cut=cut, window=window)
    counts = multiplicity(n, heads, kv_heads, segments, rates, causal, "modulo", "head", None, window)
    exact, exact_lse = union_softmax(*(x.double() for x in (q, k, v)), counts)
    gluon_on_cpu.Kernel.launched.clear()
    out, lse = forward.fused_forward(q, k, v, plan)
    launched = gluon_on_cpu.Kernel.launched["dilabench.kernels.fused.sm90.parts_forward"]
    seen = exact_lse.isfinite()
    same_rows = bool((lse.isfinite() == seen).all())
    worst = (lse.double() - exact_lse)[seen].abs().max().item() if same_rows else torch.inf
    return {"launches": launched, "out": relative(out, exact), "lse": worst}


def split() -> dict[str, float]:
    """What parts of random numbers, of all sizes, add up to, and those of special ones; padding is zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 3, 20, generator=generator) * 10.0 ** torch.randint(
        -20, 20, (2, 7, 3, 20), generator=generator
    )
    largest = torch.finfo(torch.float32).max
    special = torch.tensor([0.0, largest, -largest, torch.inf, -torch.inf, torch.nan])
    x[0, 0, 0, : len(special)] = special
    found = float_parts.parts(x, 4)
    assert found.shape == (6, 8, 3, 32)
    assert found.dtype == torch.bfloat16
    total = found.double().view(2, 3, 8, 3, 32).sum(1)
    got = total[0, 0, 0, : len(special)]
    inside = total[:, :7, :, :20]
    usual = x.isfinite() & (x.abs() < 1e38)
    return {
        "relative": ((inside - x.double())[usual].abs() / x.double()[usual].abs().clamp_min(1e-30)).max().item(),
        "special": float(not torch.allclose(got.float(), special, rtol=0, atol=0, equal_nan=True)),
        "padding": total[:, 7:].abs().sum().item() + total[..., 20:].abs().sum().item(),
    }


if __name__ == "__main__":
    parts_of_any_device = mock.Mock(side_effect=lambda x: x.dtype == torch.float32 and x.shape[-1] <= 128)
    on_hopper = mock.Mock(return_value=True)
    results = {"split": split()}
    with mock.patch.object(float_parts, "come_in_parts", parts_of_any_device):
        results |= {name: fused(case) for name, case in CASES.items()}
        results |= {name: fused(*case) for name, case in WINDOWED.items()}
        with (
            mock.patch.object(forward, "on_hopper", on_hopper),
            mock.patch.object(row_layout, "on_hopper", on_hopper),
            mock.patch.object(backward_at_once, "on_hopper", on_hopper),
            mock.patch.object(tuning, "_PARTS_FORWARD", dict.fromkeys((64, 128), HOPPER_TILES)),
        ):
            for name, case in HOPPER.items():
                results |= {f"{name}, {causal}": hopper(case, causal) for causal in (False, True)}
    sys.stdout.write(json.dumps(results))

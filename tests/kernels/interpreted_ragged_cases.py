"""The fused kernels in Triton's interpreter on sequences that end inside a tile; started by `test_ragged.py`."""

from __future__ import annotations

import json
import sys

import torch
from interpreted_cases import fused

from dilabench.kernels.fused.backward import fused_backward
from dilabench.kernels.fused.forward import fused_forward
from dilabench.kernels.fused.residue_plan import residue_plan
from dilabench.kernels.tuning import TileConfig

# As in `interpreted_cases`. Lengths that no segment and no tile divides: the last segment, 44 tokens of 64, has 22 rows
# of each class modulo 2, a tile and six rows more. Then lengths that no rate divides, segments that no tile divides,
# and head dims that are no power of two. Batches are strides like any other: two cases and `poisoned` have some.
# Both masks where the last tile differs most; tiles, heads and coverage, which have tests of their own, under one.
BOTH, CAUSAL, FULL = (True, False), (True,), (False,)
CASES = {
    f"{name}, {'causal' if causal else 'not causal'}": (*shape, causal, "modulo", by, tiles, cut, torch.float32)
    for name, masks, shape, by, tiles, cut in (
        ("batch of two", BOTH, (2, 108, 3, 3, 16, (32, 64), (1, 2)), "head", (16, 16), ((0, 1),)),
        ("two groups", CAUSAL, (1, 108, 3, 3, 16, (32, 64), (1, 2)), "head", (32, 16), ((0,), (1,))),
        ("wide key tile", FULL, (1, 172, 2, 2, 16, (64, 128), (1, 2)), "head", (16, 32), ((0, 1),)),
        ("shared keys", CAUSAL, (1, 108, 4, 2, 16, (32, 64), (1, 2)), "head", (16, 16), ((0, 1),)),
        ("uncovered rows", FULL, (1, 108, 5, 5, 16, (32, 108), (2, 4)), "head", (16, 16), ((0,), (1,))),
        ("shorter than a tile", BOTH, (1, 20, 4, 2, 16, (64, 128), (1, 2)), "kv_head", (16, 16), ((0,), (1,))),
        ("odd length", BOTH, (1, 107, 4, 2, 16, (32, 64), (1, 2)), "head", (16, 32), ((0, 1),)),
        ("three tokens left", BOTH, (1, 139, 4, 2, 16, (64, 128), (1, 4)), "head", (16, 16), ((0, 1),)),
        ("odd length, uncovered rows", CAUSAL, (1, 101, 5, 5, 16, (32, 101), (2, 8)), "head", (16, 16), ((0,), (1,))),
        ("odd segments", BOTH, (1, 107, 3, 3, 16, (20, 54, 300), (1, 2, 4)), "head", (32, 16), ((0,), (1,), (2,))),
        ("rates beside segments", BOTH, (1, 171, 4, 2, 16, (50, 95), (4, 7)), "head", (16, 16), None),
        ("rates beside segments, batch", BOTH, (2, 107, 3, 3, 16, (37, 37, 71), (2, 3, 5)), "head", (16, 16), None),
        ("head dim 24", FULL, (2, 107, 4, 2, 24, (36, 64), (1, 2)), "kv_head", (16, 16), ((0,), (1,))),
    )
    for causal in masks
}


def poisoned(causal: bool) -> dict[str, float]:
    """What NaN in one batch item does to the item before it, whose last tile reaches beyond its end."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = torch.randn(4, 2, 44, 2, 16, generator=generator).unbind()
    plan = residue_plan((32, 64), (1, 2), 44, 2, 2, causal, cut=((0, 1),))
    config = TileConfig(16, 16, 4, 2)

    def first_item() -> list[torch.Tensor]:
        out, lse = fused_forward(q, k, v, plan, config=config)
        gradients = fused_backward(dout, q, k, v, out, lse, plan, query_config=config, key_config=config)
        return [x[0] for x in (out, lse, *gradients)]

    clean = first_item()
    for x in (q, k, v, dout):
        x[1] = float("nan")
    names = ("out", "lse", "dq", "dk", "dv")
    return {name: float(not torch.equal(a, b)) for name, a, b in zip(names, clean, first_item(), strict=True)}


if __name__ == "__main__":
    results = {name: fused(case) for name, case in CASES.items()}
    results |= {f"poisoned, {causal}": poisoned(causal) for causal in (False, True)}
    sys.stdout.write(json.dumps(results))

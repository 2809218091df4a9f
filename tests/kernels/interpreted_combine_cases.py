"""Runs the kernels that combine parts in Triton's interpreter and prints one JSON object of differences.

A script of its own, because TRITON_INTERPRET is read when a kernel is decorated: `test_combine.py` starts it in a
fresh process.
"""

from __future__ import annotations

import json
import os
import random
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from dilabench.kernels.combine import _combine_triton_, _sum_triton_, combine_torch_, sum_parts_torch_

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# A dtype is converted part by part, and the second part is in float32.
COUNTS = {"float32": range(1, 5), "float16": (1, 2, 4), "bfloat16": (1, 3, 4)}
SHAPES = [(2, 37, 3, 24), (1, 64, 2, 16), (3, 5, 1, 40)]


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def random_ranges(draw: random.Random, count: int, rows: int) -> list[tuple[int, int]]:
    """First row and number of rows of each part; the first covers everything in half of all draws."""
    ranges = []
    for part in range(count):
        first = draw.randrange(rows)
        ranges.append((0, rows) if part == 0 and draw.random() < 0.5 else (first, draw.randint(1, rows - first)))
    return ranges


def random_part(shape: tuple[int, ...], rows: int, dtype: torch.dtype, heads_first: bool) -> Tensor:
    """[B, R, H, D], in memory as it reads or with the heads before the rows."""
    B, _, H, D = shape
    x = torch.randn(B, H, rows, D).transpose(1, 2) if heads_first else torch.randn(B, rows, H, D)
    return x.to(dtype)


def summed(draw: random.Random, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> dict[str, float]:
    """The kernel's differences from the plain sum. One part is in float32, as a folded sum is."""
    parts = [
        (random_part(shape, rows, torch.float32 if part == 1 else dtype, part % 2 == 1), first)
        for part, (first, rows) in enumerate(random_ranges(draw, count, shape[1]))
    ]
    errors = {}
    for name, result in (("sum", torch.float32), ("rounded sum", dtype)):
        got, want = (torch.full(shape, float("nan"), dtype=result) for _ in range(2))
        _sum_triton_(got, parts)
        sum_parts_torch_(want, parts)
        errors[name] = relative(got, want)
    total = torch.randn(shape)
    got, want = total.clone(), total.clone()
    for sum_, rows in ((_sum_triton_, got[:, 1:]), (sum_parts_torch_, want[:, 1:])):
        sum_(rows, [(rows, 0), (parts[0][0][:, : shape[1] - 1], 0)])
    errors["sum in place"] = relative(got, want)
    return errors


def merged(draw: random.Random, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> dict[str, float]:
    """The same for results of attention; every third row of a part is empty and holds NaN, some rows are so in all."""
    B, N, H, _ = shape
    parts = []
    for part, (first, rows) in enumerate(random_ranges(draw, count, N)):
        out, lse = random_part(shape, rows, dtype, part % 2 == 1), torch.randn(B, H, rows) * 10
        empty = (torch.arange(first, first + rows) + part * draw.randrange(2)) % 3 == 0
        lse[..., empty], out[:, empty] = float("-inf"), float("nan")
        parts.append((out, lse, first))
    errors = {}
    for name, result in (("out", torch.float32), ("rounded out", dtype)):
        got, want = (torch.full(shape, float("nan"), dtype=result) for _ in range(2))
        got_lse, want_lse = (torch.full((B, H, N), float("nan")) for _ in range(2))
        _combine_triton_(got, got_lse, parts)
        combine_torch_(want, want_lse, parts)
        errors[name] = relative(got, want)
    # Merged onto what is there already, over some of its rows.
    (whole, whole_lse), rest = (random_part(shape, N, dtype, heads_first=False), torch.randn(B, H, N)), parts[1:]
    results = []
    for combine in (_combine_triton_, combine_torch_):
        total, total_lse = whole.clone(), whole_lse.clone()
        rows, rows_lse = total[:, 1:], total_lse[..., 1:]
        inside = [(out[:, 1:], lse[..., 1:], first) for out, lse, first in rest]
        combine(rows, rows_lse, [(rows, rows_lse, 0), *inside])
        results.append((total, total_lse))
    errors["rounded out in place"] = relative(results[0][0], results[1][0])
    errors["lse in place"] = relative(results[0][1], results[1][1])
    empty = want_lse == float("-inf")
    wrong_empty = not torch.equal(got_lse == float("-inf"), empty) or bool(got.transpose(1, 2)[empty].any())
    finite = ~empty
    return {
        **errors,
        "lse": relative(got_lse[finite], want_lse[finite]),
        "wrong empty rows": float(wrong_empty),
        "empty rows": float(empty.sum()),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    draw = random.Random(0)
    results: dict[str, dict[str, float]] = {}
    for name, dtype in DTYPES.items():
        for count in COUNTS[name]:
            shape = draw.choice(SHAPES)
            results[f"{name}, {count} parts"] = {
                **summed(draw, shape, count, dtype),
                **merged(draw, shape, count, dtype),
            }
    sys.stdout.write(json.dumps(results))

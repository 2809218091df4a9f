"""Run by test_selected_blocks.py under TRITON_INTERPRET=1: the computation over Triton's kernels against gathering.

Prints the largest difference of out, lse and gradients of each case as one line of JSON.
"""

from __future__ import annotations

import json

import torch

from dilabench.impls.selected.gather import Gathered
from dilabench.impls.selected.selection import Selection, over_sequences
from dilabench.impls.selected.tiles import Tiled

# Bounds, block, batch items and those of the indices. Tokens beyond the last bound see nothing.
CASES = {
    "one sequence": ((), 16, 2, 2),
    "indices for all items": ((), 32, 2, 1),
    "packed": ((0, 1, 30, 30, 44), 16, 1, 1),
    "single tokens": ((), 1, 1, 1),
}


def largest_difference(bounds: tuple[int, ...], block: int, batch: int, items: int) -> float:
    """Of all results of a causal case with 2 query heads for each of 2 heads of keys."""
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(batch, 50, 4, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(batch, 50, 2, 16, generator=generator) for _ in range(2))
    indices = torch.randint(-1, 50 // block + 1, (items, 50, 2, 3), generator=generator, dtype=torch.int32)
    found = []
    for kernel in (Tiled, Gathered):
        computation = over_sequences(kernel, Selection(indices, block, causal=True), 0.3, bounds)
        out, lse = computation.forward(q, k, v)
        found.append((out, lse, *computation.backward(dout, q, k, v, out, lse)))
    pairs = [(a.nan_to_num(neginf=-99.0), b.nan_to_num(neginf=-99.0)) for a, b in zip(*found, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    differences = {name: largest_difference(*case) for name, case in CASES.items()}
    print(json.dumps(differences))  # noqa: T201 - the parent process reads it

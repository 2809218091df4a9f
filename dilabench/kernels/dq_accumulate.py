"""The sums of dQ that many programs add to: float32 sums of dQ / scale.

For all heads together they would take twice the bytes of q. A few heads keep a GPU busy, and the others follow in the
same memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.kernels.tuning import TileConfig, heads_at_a_time


def dq_accumulator(q: Tensor, k: Tensor, tiles: TileConfig, modulus: int = 1) -> Tensor | None:
    """float32 zeros [B, N, H', D] for the fewest heads of q with enough programs, each of ``tiles.block_n`` rows of k:
    a divisor of the K/V heads. Padding rows make ``modulus`` divide N. None if memory is too small.
    """
    batch, rows, heads, dim = q.shape
    rows += -rows % modulus
    kv_heads = k.shape[2]
    some = heads_at_a_time(kv_heads, max(1, batch * k.shape[1] // tiles.block_n), dim)
    try:
        return torch.zeros((batch, rows, some * heads // kv_heads, dim), dtype=torch.float32, device=q.device)
    except torch.OutOfMemoryError:
        return None


def convert_dq(sums: Tensor, scale: float, dq: Tensor) -> None:
    """Write ``scale * sums`` into dq [B, N, H', D]; sums may have more rows behind."""
    torch.mul(sums[:, : dq.shape[1]], scale, out=dq)

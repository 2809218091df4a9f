"""dQ where many programs add to it: float32 sums of dQ / scale.

All heads at once would take twice the bytes of q. A few keep a GPU busy, and the others follow in the same place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilabench.kernels.tuning import TileConfig, padded_dim

# Heads whose programs are as many follow others: at their end multiprocessors wait for the last of them. Programs of
# narrower heads are the shorter, so more of them.
_PROGRAMS_OF_128_COLUMNS = 2048


def empty_sums(q: Tensor, k: Tensor, tiles: TileConfig, modulus: int = 1) -> Tensor | None:
    """float32 zeros [B, N, H', D] for as few of the heads of q as have programs enough, each of ``tiles.block_n`` rows
    of k: those of a divisor of the K/V heads. Rows behind make ``modulus`` divide N. None where there is no room.
    """
    batch, rows, heads, dim = q.shape
    rows += -rows % modulus
    kv_heads = k.shape[2]
    each = max(1, batch * k.shape[1] // tiles.block_n)
    least = _PROGRAMS_OF_128_COLUMNS * 128 // padded_dim(dim)
    some = next((n for n in range(1, kv_heads) if kv_heads % n == 0 and n * each >= least), kv_heads)
    try:
        return torch.zeros((batch, rows, some * heads // kv_heads, dim), dtype=torch.float32, device=q.device)
    except torch.OutOfMemoryError:
        return None


def write_sums(sums: Tensor, scale: float, dq: Tensor) -> None:
    """Write ``scale * sums`` into dq [B, N, H', D]; sums may have more rows behind."""
    torch.mul(sums[:, : dq.shape[1]], scale, out=dq)

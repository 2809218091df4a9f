"""The oracle of a sequence over several ranks: it fetches the sampled rows, and the keys that they see, from all ranks.

Every rank has the same sample, gets the same rows and reaches the same verdict.
"""

from __future__ import annotations

from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilabench.distributed.sharding import Shards
from dilabench.distributed.world import World
from dilabench.engine.verify.oracle.blocks import blocks
from dilabench.engine.verify.oracle.in_place import InPlaceOracle
from dilabench.engine.verify.oracle.sample import Sample
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import key_groups

# Rows of each rank that are looked at for how many of their keys each other rank holds.
CANDIDATE_ROWS = 8


def rows_across_ranks(workload: Workload, shards: Shards) -> NDArray[np.int64]:
    """Positions whose results show a stale message between any two ranks: for each rank and each other one, the row of
    the former with the largest share of keys from the latter, among some; none if it sees none of them. Only head 0 is
    used.
    """
    owner = np.zeros(workload.seq_len, np.int16)
    for rank, spans in enumerate(shards.parts):
        for span in spans:
            owner[span.start : span.stop] = rank
    chosen: set[int] = set()
    for rank in range(shards.size):
        held = np.flatnonzero(owner == rank)
        if not len(held):
            continue
        rows = np.unique(held[np.linspace(0, len(held) - 1, CANDIDATE_ROWS).astype(np.int64)])
        shares = np.array([_shares(workload, owner, shards.size, row) for row in rows])
        shares[:, rank] = 0.0
        chosen.update(int(rows[best]) for best, share in zip(shares.argmax(0), shares.max(0), strict=True) if share > 0)
    return np.array(sorted(chosen), np.int64)


def _shares(workload: Workload, owner: NDArray[np.int16], size: int, row: np.int64) -> NDArray[np.float64]:
    """[size]: the shares of a row's keys that each rank holds."""
    counts = np.zeros(size, np.int64)
    shapes = {start: shape for (start, _), shape in zip(workload.sequences, workload.shapes, strict=True)}
    for start, group in key_groups(workload, 0, np.array([row])):
        keys = group.keys()
        (first,), (stop,) = shapes[start].bounds(group.rows)
        seen = keys[np.searchsorted(keys, first) : np.searchsorted(keys, stop)]
        counts += np.bincount(owner[start + seen], minlength=size)
    shares: NDArray[np.float64] = counts / max(1, counts.sum())
    return shares


class KnownRows:
    """A tensor [B, N, H, D] with only some known rows, indexed as the oracle indexes a whole one.

    positions: [M], ascending; rows: [B, M, H, D]. Other positions must not be requested.
    """

    def __init__(self, length: int, positions: Tensor, rows: Tensor) -> None:
        self._positions = positions.to(rows.device)
        self._rows = rows
        self.shape = torch.Size((rows.shape[0], length, *rows.shape[2:]))
        self.device = rows.device
        self.new_zeros, self.new_full = rows.new_zeros, rows.new_full

    def __getitem__(self, index: tuple[slice, Tensor, slice]) -> Tensor:
        """`x[:, rows, heads]`, [B, R, H', D]."""
        batches, rows, heads = index
        return self._rows[batches, torch.searchsorted(self._positions, rows), heads]


class RanksOracle(InPlaceOracle):
    """`InPlaceOracle` over the shards of a rank; all ranks must ask it the same things in the same order."""

    def __init__(
        self,
        workload: Workload,
        inputs: tuple[Tensor, ...],
        dout: Tensor | None,
        seed: int,
        shards: Shards,
        world: World,
        sample: Sample | None = None,
    ) -> None:
        self._shards, self._world = shards, world
        super().__init__(workload, inputs, dout, seed, sample)

    def together(self, passed: bool) -> bool:
        """Whether every rank has passed."""
        return all(self._world.share(passed))

    def sampled(self, tensor: Tensor) -> Tensor:
        """The sampled batches and rows of every rank's tensor of out's shape, [b, R, ...]."""
        return self._fetched(tensor, self.sample.rows)

    def keys_of(self, gradient: Tensor) -> Tensor:
        """dk or dv at the sampled keys, [b, S, K, D]."""
        keys = torch.arange(self.workload.seq_len) if self.sample.keys is None else self.sample.keys
        return self._fetched(gradient, keys)

    @cached_property
    def _heads(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.sample.rows
        # Only as many batch items as are fetched, so that `blocks` cuts as the oracle does.
        like = self.batched(self._given[0])[: len(self.sample.batches)]
        # Positions are on the host, where a rank looks up which of them it holds.
        seen = [block.keys.cpu() for block in blocks(self.workload, rows, like)]
        keys = torch.cat([*seen, rows[:0]]).unique()
        length, (q, k, v) = self.workload.seq_len, self._given
        known = (
            KnownRows(length, rows, self._fetched(q, rows)),
            *(KnownRows(length, keys, self._fetched(x, keys)) for x in (k, v)),
        )
        return cast(tuple[Tensor, Tensor, Tensor], known)

    def _place(self) -> tuple[Tensor, Tensor]:
        """The sampled rows that this rank holds."""
        _, local = self._shards.held(self.sample.rows, self._world.rank)
        return self.sample.batches.to(self.device)[:, None], local.to(self.device)[None, :]

    def _fetched(self, shard: Tensor, positions: Tensor) -> Tensor:
        """The sampled batches and some positions of a sharded tensor [B, N, ...], on every rank."""
        shard = self.batched(shard)
        batches = self.sample.batches.to(self.device)
        index, local = (x.to(self.device) for x in self._shards.held(positions, self._world.rank))
        found = shard.new_zeros(len(batches), len(positions), *shard.shape[2:])
        found[:, index] = shard[batches[:, None], local[None, :]]
        # Each row is zero on all ranks but one, so that the sum of the bytes is the row, to the last bit.
        self._world.sum_in_place([found.view(torch.uint8)])
        return found

"""Which query rows are compared: all where that is cheap, else a seeded sample with the rows where mistakes live."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.workload.spec import Workload, attended_pairs
from dilabench.workload.visibility import edges

# (query, key) pairs, over batch and heads, up to which every row is compared; a float64 forward of them takes 0.2 s
# on two CPU cores. Above it, rows are drawn until they hold SAMPLE_PAIRS.
COMPLETE_PAIRS = 2**23
SAMPLE_PAIRS = 2**20
MIN_ROWS, MAX_ROWS = 24, 64
# Gradient values of k or v that are compared: 256 MiB in float64.
MAX_KEY_VALUES = 2**25


@dataclass(frozen=True, slots=True)
class Sample:
    """batches: [b] indices of the batch axis. rows: [R] indices of queries, ascending; they are positions unless the
    workload has `query_len`. keys: [S] key positions whose gradients are compared, None for all. `complete`: all rows
    and batches are in the sample.
    """

    batches: Tensor
    rows: Tensor
    keys: Tensor | None
    complete: bool

    @property
    def row_count(self) -> int | None:
        """Rows compared, over the batch; None when complete (as `Verification.sampled_rows`)."""
        return None if self.complete else len(self.batches) * len(self.rows)


def choose_sample(workload: Workload, seed: int) -> Sample:
    """All rows when they hold at most COMPLETE_PAIRS, else the first, the last, segment edges and random ones."""
    pairs = attended_pairs(workload)
    every_batch = torch.arange(workload.batch_size)
    if pairs <= COMPLETE_PAIRS:
        return Sample(every_batch, torch.arange(workload.rows), None, complete=True)
    generator = torch.Generator().manual_seed(seed)
    pairs_per_row = max(1, pairs // workload.tokens)
    batches = _bounded(every_batch, max(1, SAMPLE_PAIRS // (pairs_per_row * MIN_ROWS)), generator)
    wanted = SAMPLE_PAIRS // (pairs_per_row * len(batches))
    rows = _rows(workload, min(workload.rows, max(MIN_ROWS, min(MAX_ROWS, wanted))), generator)
    return Sample(batches, rows, _keys(workload, rows, len(batches), generator), complete=False)


def _rows(workload: Workload, count: int, generator: torch.Generator) -> Tensor:
    last = workload.rows - 1
    begins = torch.from_numpy(edges(workload)) - workload.first_row
    begins = _bounded(begins[begins > 0], max(2, count // 4), generator)
    chosen = torch.cat([torch.tensor([0, last]), begins, begins - 1]).unique()
    missing = count - len(chosen)
    return torch.cat([chosen, torch.randint(workload.rows, (max(0, missing),), generator=generator)]).unique()


def _keys(workload: Workload, rows: Tensor, batches: int, generator: torch.Generator) -> Tensor | None:
    values_per_key = batches * workload.num_kv_heads * max(workload.head_dim, workload.value_width)
    count = max(1024, MAX_KEY_VALUES // values_per_key)
    if count >= workload.seq_len:
        return None
    positions = rows + workload.first_row
    return torch.cat([positions, torch.randint(workload.seq_len, (count,), generator=generator)]).unique()


def _bounded(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """At most `count` of the values, the first and the last always among them when count is at least 2."""
    if len(values) <= count:
        return values
    inner = 1 + torch.randperm(len(values) - 2, generator=generator)[: max(0, count - 2)]
    ends = torch.tensor([0, len(values) - 1])[: max(1, count)]
    return values[torch.cat([ends, inner])].sort().values

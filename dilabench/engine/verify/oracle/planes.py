"""Values with which one call shows, for many keys, which rows see them.

out is linear in v, channel by channel. Channel 0 is 1 at every key: its out must be 1 on covered rows and 0 elsewhere.
Every other channel is zero except at one key: its out is this key's attention weight, which must differ from 0 exactly
in the rows with C > 0. No rounding blurs it, since everything else adds exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilabench.workload.spec import Workload
from dilabench.workload.visibility import edges, key_groups

MAX_KEYS = 16
# A weight is about 1/N; this keeps it above float16's smallest number for any N that fits a machine.
VALUE = 2.0**10


@dataclass(frozen=True, slots=True)
class Planes:
    """`keys`: probed positions, one channel each. `calls`: 1, or 2 if D = 1 leaves no channel besides channel 0."""

    keys: tuple[int, ...]
    calls: int

    def channels(self, call: int) -> tuple[tuple[int, int], ...]:
        """(channel, key position) pairs of a call."""
        first = 1 if self.calls == 1 else 0
        return tuple((first + index, key) for index, key in enumerate(self.keys)) if call == self.calls - 1 else ()

    def fill(self, values: Tensor, call: int) -> None:
        """Write the planes into zeroed values [B, N, K, D]; in the first call channel 0 is 1 at every key."""
        if call == 0:
            values[..., 0] = 1.0
        for channel, key in self.channels(call):
            values[:, key, :, channel] = VALUE


def make_planes(workload: Workload, seed: int) -> Planes:
    """The first and last key, both sides of some segment edges, and random ones; as many as there are channels. If
    the queries are fewer than the keys, also keys that one of them sees.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    length = workload.seq_len
    count = min(MAX_KEYS, max(1, workload.value_width - 1))
    begins = torch.from_numpy(edges(workload))
    begins = begins[torch.randperm(len(begins), generator=generator)[: max(1, count // 4)]]
    drawn = torch.randint(length, (count,), generator=generator)
    named = [length // 2, 0, length - 1]
    if workload.query_len is not None:
        # Keys drawn from all may be seen by none of few rows: first some that a row sees, and those around the rows.
        named = [
            length - 1,
            *_seen(workload, count // 2, generator),
            workload.first_row,
            workload.first_row - 1,
            *named,
        ]
    candidates = torch.cat([torch.tensor(named), begins, begins - 1, drawn]).tolist()
    keys = tuple(dict.fromkeys(candidates))[:count]
    return Planes(keys, calls=1 if workload.value_width > 1 else 2)


def _seen(workload: Workload, count: int, generator: torch.Generator) -> list[int]:
    """At most `count` keys that a random row of a random head may see, in random order."""
    head = int(torch.randint(workload.num_heads, (1,), generator=generator))
    row = workload.first_row + int(torch.randint(workload.rows, (1,), generator=generator))
    (shape,) = workload.shapes
    keys: list[int] = []
    for _, group in key_groups(workload, head, np.array([row])):
        (first,), (stop,) = shape.bounds(group.rows)
        seen = group.keys()
        seen = seen[seen.searchsorted(first) : seen.searchsorted(stop)]
        keys += seen[torch.randint(len(seen), (count,), generator=generator).numpy()].tolist() if len(seen) else []
    return keys

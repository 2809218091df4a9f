"""Times `strided` on the CPU against the same function computed head by head, interleaved in one process.

    python scripts/cpu_strided.py [--repeats 9] [--threads 2]

The naive computation is the textbook one: for every branch, segment and head the rows are sliced out, scores are
materialised, and branches are combined by their softmax denominators. Both are checked against each other first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dilabench.backends.sdpa import flash as sdpa_flash
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls import strided
from dilabench.impls.union.branches import branches_of, segments_of
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload

PATTERN = DilatedPattern(segment_lengths=(1024, 2048, 4096), dilation_rates=(1, 2, 4))
TARGET_SPEEDUP = {False: 1.8, True: 3.0}


def workload(causal: bool) -> Workload:
    """N=4096 H=8 D=64 in float32."""
    return Workload(
        pattern=PATTERN, batch_size=1, seq_len=4096, num_heads=8, num_kv_heads=8, head_dim=64, causal=causal
    )


def per_head(asked: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The function of the workload, one head, segment and branch at a time."""
    numerator = torch.zeros_like(q)
    lse = q.new_full((q.shape[1], q.shape[2]), float("-inf"))
    for branch in branches_of(asked):
        for segments in segments_of(branch, asked.seq_len):
            for index in range(segments.count):
                start = segments.start + index * segments.length
                for place in branch.places:
                    rows = slice(start + place.position, start + segments.length, branch.rate)
                    _add_head(asked, numerator, lse, (rows, place.head), q, k, v)
    return numerator


def _add_head(
    asked: Workload, out: Tensor, lse: Tensor, at: tuple[slice, int], q: Tensor, k: Tensor, v: Tensor
) -> None:
    rows, head = at
    queries, keys, values = (x[0, rows, head] for x in (q, k, v))
    scores = torch.einsum("id,jd->ij", queries, keys) * asked.softmax_scale
    if asked.causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    own_lse = torch.logsumexp(scores, -1)
    own_out = torch.einsum("ij,jd->id", torch.softmax(scores, -1), values)
    merged = torch.logaddexp(lse[rows, head], own_lse)
    kept, added = torch.exp(lse[rows, head] - merged), torch.exp(own_lse - merged)
    out[0, rows, head] = out[0, rows, head] * kept.unsqueeze(-1) + own_out * added.unsqueeze(-1)
    lse[rows, head] = merged


def seconds(attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor]) -> float:
    """One call by the wall clock."""
    started = time.perf_counter()
    attention(*inputs)
    return time.perf_counter() - started


def main() -> None:
    """Print the least time of each and their ratio, not causal and causal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    backend = LoadedBackend("sdpa-flash", sdpa_flash.attend, sdpa_flash.attend_backward)
    context = BuildContext(device=torch.device("cpu"), backend=backend)
    generator = torch.Generator().manual_seed(0)
    for causal in (False, True):
        asked = workload(causal)
        inputs = [torch.randn(1, 4096, 8, 64, generator=generator) for _ in range(3)]
        attention, naive = strided.build(asked, context), partial(per_head, asked)
        torch.testing.assert_close(attention(*inputs), naive(*inputs))
        samples = [(seconds(attention, inputs), seconds(naive, inputs)) for _ in range(arguments.repeats)]
        fast, slow = (min(times) for times in zip(*samples, strict=True))
        print(
            f"causal={causal}: strided {fast * 1e3:.1f} ms, per head {slow * 1e3:.1f} ms, "
            f"{slow / fast:.2f} times (must reach {TARGET_SPEEDUP[causal]})"
        )


if __name__ == "__main__":
    main()

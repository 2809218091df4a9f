"""How long algorithms over ranks should take on a workload, by their shardings: to choose by, never a result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dilabench.choice.ways import Candidate, Ways
from dilabench.distributed.model import ideal_efficiency
from dilabench.machine import Size, device_named
from dilabench.workload.spec import UNBOUNDED, flops

CandidateT = TypeVar("CandidateT", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOPs of a rank, and bytes from rank to rank and in its memory, per second."""

    flops: float
    between: float
    within: float


# What H200s with NVLink reach, and processes on one CPU. All ranks have to come to the same end, so that nothing of a
# rank's own machine is asked; and only ratios of these count, and little.
RATES: Mapping[Size, Rates] = {"large": Rates(500e12, 400e9, 4e12), "small": Rates(50e9, 2e9, 10e9)}
# Of messages beside computation: on two and four H200 a seventh to a fifth of their time was waited for.
LEAST_EXPOSED = 0.2
# Reads and writes of an element of q where the results of hops are added up at the end: parts of out and dq, row sums.
# Taken from what rings took more there than computation and exposed messages; tests/choice/test_over_ranks.py holds
# the choice to the measured times.
BYTES_SUMMED = 40


def expected_seconds(way: Candidate, device: str, ways: Ways) -> float | None:
    """One call of a way over ranks; None if its sharding, or a formula of it, is not known."""
    rates = RATES[device_named(device).size]
    sharding, workload, ranks = ways.sharding_of(way.implementation), way.workload, way.world_size
    if sharding is None:
        return None
    balance, meanwhile = sharding.load_balance(workload, ranks), sharding.overlapping_share(workload, ranks)
    received = sharding.received_bytes(workload, ranks)
    if received is None and workload.window != UNBOUNDED:
        # At most what full attention is sent.
        received = sharding.received_bytes(workload.replace(window=UNBOUNDED), ranks)
    if balance is None or meanwhile is None or received is None or not balance > 0:
        return None
    computation_s, transfer_s = flops(workload) / ranks / rates.flops, received / rates.between
    hidden_s = min(meanwhile * computation_s, (1 - LEAST_EXPOSED) * transfer_s)
    efficiency = ideal_efficiency(balance, computation_s, transfer_s, hidden_s)
    queries = workload.tokens * workload.num_heads * workload.head_dim / ranks
    summed = BYTES_SUMMED * queries if sharding.sums_hops(workload, ranks) else 0.0
    seconds = computation_s / efficiency + summed / rates.within
    return seconds if math.isfinite(seconds) else None


def fastest_expected(
    candidates: Sequence[CandidateT], device: str, ways: Ways
) -> list[tuple[CandidateT, float | None]]:
    """Ways of one workload, each with its seconds, the fastest expected first and those of unknown time last.

    Given as descriptors rank them, and left so if nothing is known of the first.
    """
    expected = [(way, expected_seconds(way, device, ways)) for way in candidates]
    if not expected or expected[0][1] is None:
        return expected
    return sorted(expected, key=lambda pair: math.inf if pair[1] is None else pair[1])

"""Predicted times of algorithms over ranks, by their shardings: for choosing, never a result."""

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
    """FLOPs of a rank, and bytes from rank to rank and in its memory, per second.

    launch_s: seconds of a rank's host for a call of attention, or an exchange of messages, in one pass.
    """

    flops: float
    between: float
    within: float
    launch_s: float


# Rates of H200s with NVLink, and of processes on one CPU. They are constants, because all ranks must make the same
# choice; only their ratios matter, and little.
RATES: Mapping[Size, Rates] = {"large": Rates(500e12, 400e9, 4e12, 150e-6), "small": Rates(50e9, 2e9, 10e9, 0.0)}
# Exposed share of overlapped messages: on two and four H200 a seventh to a fifth of their time.
LEAST_EXPOSED = 0.2
# Reads and writes per element of q if the results of ring steps are summed at the end: parts of out in the forward
# pass, of dq, and row sums, in the backward pass. Derived from ring times minus computation and exposed messages;
# tests/choice/test_over_ranks.py checks the choice against measured times.
BYTES_SUMMED: Mapping[str, int] = {"forward": 12, "backward": 28, "both": 40}


def expected_seconds(way: Candidate, device: str, ways: Ways) -> float | None:
    """Predict the seconds of a call over ranks; None if its sharding, or a formula of it, is not known."""
    rates = RATES[device_named(device).size]
    sharding, workload, ranks = ways.sharding_of(way.implementation), way.workload, way.world_size
    if sharding is None:
        return None
    received = sharding.received_bytes(workload, ranks)
    if received is None and workload.layout == "padded":
        # About the bytes of full attention over a length that ranks divide.
        even = -(-workload.seq_len // (2 * ranks)) * 2 * ranks
        received = sharding.received_bytes(workload.replace(window=UNBOUNDED, seq_len=even), ranks)
    if received is None:
        return None
    balance, meanwhile = sharding.load_balance(workload, ranks), sharding.overlapping_share(workload, ranks)
    if balance is None or meanwhile is None or not balance > 0:
        return None
    computation_s, transfer_s = flops(workload) / ranks / rates.flops, received / rates.between
    hidden_s = min(meanwhile * computation_s, (1 - LEAST_EXPOSED) * transfer_s)
    efficiency = ideal_efficiency(balance, computation_s, transfer_s, hidden_s)
    queries = workload.tokens * workload.num_heads * workload.head_dim / ranks
    summed = BYTES_SUMMED[workload.mode] * queries if sharding.sums_hops(workload, ranks) else 0.0
    calls, forward, backward = sharding.launches(workload, ranks)
    launches = {"forward": calls + forward, "backward": calls + backward}
    host_s = rates.launch_s * launches.get(workload.mode, sum(launches.values()))
    seconds = max(computation_s / efficiency + summed / rates.within, host_s)
    return seconds if math.isfinite(seconds) else None


def fastest_expected(
    candidates: Sequence[CandidateT], device: str, ways: Ways
) -> list[tuple[CandidateT, float | None]]:
    """Sort the candidates of one workload by expected seconds; candidates of unknown time are last.

    They are given by falling priority, and that order stays if the first one's time is unknown.
    """
    expected = [(way, expected_seconds(way, device, ways)) for way in candidates]
    if not expected or expected[0][1] is None:
        return expected
    return sorted(expected, key=lambda pair: math.inf if pair[1] is None else pair[1])

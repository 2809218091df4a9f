"""How long algorithms over ranks should take on a workload, by their shardings: to choose by, never a result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilabench.distributed.model import Sharding, ideal_efficiency
from dilabench.machine import DeviceKind
from dilabench.plugins.boundary import answered
from dilabench.plugins.catalogue import Catalogue, load_target
from dilabench.record import Case
from dilabench.workload.spec import UNBOUNDED, Workload
from dilabench.workload.work import flops


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOPs of a rank, and bytes from rank to rank and in its memory, per second."""

    flops: float
    between: float
    within: float


# What H200s with NVLink reach, and processes on one CPU. All ranks have to come to the same end, so that nothing of a
# rank's own machine is asked; and only ratios of these count, and little.
RATES: Mapping[DeviceKind, Rates] = {"cuda": Rates(500e12, 400e9, 4e12), "cpu": Rates(50e9, 2e9, 10e9)}
# Of messages beside computation: on two and four H200 a seventh to a fifth of their time was waited for.
LEAST_EXPOSED = 0.2
# Reads and writes of an element of q where the results of hops are added up at the end: parts of out and dq, row sums.
# Taken from what rings took more there than computation and exposed messages; tests/predict/test_over_ranks.py holds
# the choice to the measured times.
BYTES_SUMMED = 40


def sharding_of(case: Case, catalogue: Catalogue) -> Sharding | None:
    """What the implementation's descriptor names; None where it names nothing, cannot be had, or is not installed."""
    if case.implementation not in catalogue.implementations:
        return None
    implementation = catalogue.implementations.get(case.implementation)
    if implementation.sharding is None:
        return None
    plugin, what = catalogue.implementations.origin(implementation.name), f"sharding of {implementation.name!r}"
    with catalogue.left_out(plugin, what):
        return HeldSharding(load_target(implementation.sharding), plugin, what, catalogue)
    return None


@dataclass(frozen=True, slots=True)
class HeldSharding:
    """A `Sharding` of some plug-in; where it fails or answers with no number, nothing is known."""

    own: Any
    plugin: str
    what: str
    catalogue: Catalogue

    def load_balance(self, workload: Workload, ranks: int) -> float | None:
        """As `Sharding.load_balance`."""
        return self._asked("load_balance", workload, ranks)

    def overlapping_share(self, workload: Workload, ranks: int) -> float | None:
        """As `Sharding.overlapping_share`."""
        return self._asked("overlapping_share", workload, ranks)

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """As `Sharding.received_bytes`."""
        found = self._asked("received_bytes", workload, ranks)
        return None if found is None else int(found)

    def sums_hops(self, workload: Workload, ranks: int) -> bool:
        """As `Sharding.sums_hops`, which one that was written before there was the question does not answer."""
        return hasattr(self.own, "sums_hops") and self._asked("sums_hops", workload, ranks, bool) is True

    def _asked(self, question: str, workload: Workload, ranks: int, *kinds: type) -> float | None:
        with self.catalogue.left_out(self.plugin, self.what):
            wanted = kinds or (float, int, type(None))
            answer: float | None = answered(
                self.plugin, self.what, getattr(self.own, question), workload, ranks, kind=wanted
            )
            return answer
        return None


def expected_seconds(case: Case, device: DeviceKind, catalogue: Catalogue) -> float | None:
    """One call of a case over ranks; None where its sharding, or a formula of it, is not known."""
    sharding, workload, ranks, rates = sharding_of(case, catalogue), case.workload, case.world_size, RATES[device]
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
    cases: Sequence[Case], device: DeviceKind, catalogue: Catalogue
) -> list[tuple[Case, float | None]]:
    """Cases of one workload, each with its seconds, the fastest expected first and those of unknown time last.

    Given as descriptors rank them, and left so where nothing is known of the first.
    """
    told = [(case, expected_seconds(case, device, catalogue)) for case in cases]
    if not told or told[0][1] is None:
        return told
    return sorted(told, key=lambda pair: math.inf if pair[1] is None else pair[1])

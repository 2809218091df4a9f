"""Bytes of a workload's tensors, and the plan that they add up to."""

from dataclasses import dataclass
from typing import Self

from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import DTYPE_BYTES, Workload
from dilabench.workload.work import tensor_bytes

FLOAT32_BYTES = 4
FLOAT64_BYTES = 8
INDEX_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device at the fullest moment of a call, by what they are for; they add up to the peak.

    inputs: q, k, v (or embeddings), with dout unless the mode is forward. saved: what lives from forward to backward,
    inputs left out. workspace: everything else, results included. tables: index tensors and block lists that are kept
    between calls. Over ranks it is what the fullest rank holds.
    """

    inputs_bytes: int
    parameters_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int
    tables_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """What must fit, and what the engine's memory pass measures."""
        held = self.inputs_bytes + self.parameters_bytes + self.tables_bytes
        return held + self.saved_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of q, of k, of lse, and of one float32 per element and per row of q.

    q and out are [B, N, H, D], k and v [B, N, K, D], lse is [B, H, N] in float32 (float64 for float64).
    """

    q: float
    kv: float
    lse: float
    q_float32: float
    rows_float32: float

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """The sizes of all of a workload's tensors."""
        sizes = tensor_bytes(workload)
        elements = sizes["q"] // DTYPE_BYTES[workload.dtype]
        rows = workload.tokens * workload.num_heads
        return cls(sizes["q"], sizes["k"], sizes["lse"], elements * FLOAT32_BYTES, rows * FLOAT32_BYTES)

    def part(self, share: float) -> "Sizes":
        """Those of a share of all rows."""
        return Sizes(
            share * self.q, share * self.kv, share * self.lse, share * self.q_float32, share * self.rows_float32
        )

    @property
    def gradients(self) -> float:
        """dq, dk and dv; as much as q, k and v."""
        return self.q + 2 * self.kv

    @property
    def result(self) -> float:
        """Out and lse."""
        return self.q + self.lse


def inputs_of(workload: Workload, sizes: Sizes) -> int:
    """q, k, v, and dout where there is a backward pass."""
    return round(sizes.gradients + (sizes.q if workload.mode != "forward" else 0))


def branches_under(workload: Workload) -> DilatedPattern | None:
    """The dilated pattern of a workload, or that a block mask lies over; None for any other."""
    return DilatedPattern.match(workload.pattern.under)

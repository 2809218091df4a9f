"""Traffic and load balance of a parallel call, in closed form. No torch, no tensors.

Sources: docs/explanation of ring attention (`ring.md` §5.3). l = N/P rows per rank; bytes are those that the rank with
most receives, which all others wait for.
"""

from typing import Literal, NamedTuple, Protocol

from dilabench.workload.spec import DTYPE_BYTES, Workload

# How a sequence is cut: chunks r and 2P-1-r of 2P, the r-th part, or chunks assigned by their work on rank r of P.
Order = Literal["zigzag", "contiguous", "balanced"]


class Launches(NamedTuple):
    """Calls of attention in one pass, and exchanges of messages in the forward and in the backward pass."""

    calls: int
    forward: int
    backward: int


class Sharding(Protocol):
    """The interface of a descriptor's `sharding`; each method returns None if there is no closed form."""

    def load_balance(self, workload: Workload, ranks: int) -> float | None:
        """λ: mean over maximum of the ranks' work; 1 is even."""
        ...

    def overlapping_share(self, workload: Workload, ranks: int) -> float | None:
        """Share of the slowest rank's work that can go on while messages are under way."""
        ...

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """Bytes that the rank with most receives in one call in the workload's mode."""
        ...

    def order(self, workload: Workload) -> Order | None:
        """The order of tokens on ranks; None for one that `sequence_shards` does not have. Optional."""
        ...

    def launches(self, workload: Workload, ranks: int) -> Launches:
        """The launches of a rank's host in a call, which takes at least their time. Optional."""
        ...

    def sums_hops(self, workload: Workload, ranks: int) -> bool:
        """Return True if results of several steps are summed at the end, a second pass over the queries. Optional."""
        ...


def ideal_efficiency(balance: float, computation_ns: float, transfer_ns: float, overlapping_ns: float) -> float:
    """E = λ · T_comp / (T_comp + T_exposed) with T_exposed = max(0, V/B - T_local) (ring.md §5.3).

    computation: T_comp = FLOPs / (P·F), of the mean rank. transfer: V/B. overlapping: T_local, the work meanwhile.
    A measured efficiency may exceed it: F is the rate of another call, and B includes packing and launches.
    """
    exposed_ns = max(0.0, transfer_ns - overlapping_ns)
    return balance * computation_ns / (computation_ns + exposed_ns)


def joined_bytes(workload: Workload, ranks: int) -> int | None:
    """Additional bytes that each rank receives if calls begin and end with whole tensors: out, and dq, dk, dv.

    None if ranks own different numbers of rows.
    """
    if workload.seq_len % ranks or workload.layout == "packed":
        return None
    forward, backward = workload.mode != "backward", workload.mode != "forward"
    heads = workload.num_heads * (forward + backward) + 2 * workload.num_kv_heads * backward
    other_rows = workload.seq_len - workload.seq_len // ranks
    return workload.batch_size * other_rows * heads * workload.head_dim * DTYPE_BYTES[workload.dtype]

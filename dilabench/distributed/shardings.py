"""The shardings of implementations over ranks, dilabench's and peers' (`model.Sharding`). No torch, no tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from dilabench.distributed.assignment import Assignment
from dilabench.distributed.balance import StepPairs, step_pairs
from dilabench.distributed.block_assignment import BlockAssignment
from dilabench.distributed.model import Launches, Order
from dilabench.distributed.row_assignment import RowAssignment
from dilabench.workload.equal_parts import usp_degrees
from dilabench.workload.spec import DTYPE_BYTES, UNBOUNDED, Workload


class Counted(ABC):
    """λ from the pairs that each rank computes."""

    @abstractmethod
    def pairs(self, workload: Workload, ranks: int) -> StepPairs | None:
        """The pairs in the form of `balance.step_pairs`; None if they are not known."""

    def _overlapping(self, slowest: tuple[float, ...]) -> float:
        """Pairs of the slowest rank that can be computed during communication: those with its local keys."""
        return slowest[0]

    def sums_hops(self, _workload: Workload, _ranks: int) -> bool:
        """False: all keys are present when a row is computed."""
        return False

    def launches(self, _workload: Workload, ranks: int) -> Launches:
        """A call on own keys, two on all others, which come in one exchange."""
        return Launches(min(ranks, 3), 1, 1)

    def load_balance(self, workload: Workload, ranks: int) -> float | None:
        """λ from the pairs; dense and causal it is P/(2P-1) in order and 1 zigzag."""
        pairs = self.pairs(workload, ranks)
        if pairs is None:
            return None
        work = [sum(steps) for steps in pairs]
        return sum(work) / ranks / max(work)

    def overlapping_share(self, workload: Workload, ranks: int) -> float | None:
        """The share of the slowest rank; None if λ is None."""
        pairs = self.pairs(workload, ranks)
        if pairs is None:
            return None
        slowest = max(pairs, key=sum)
        return self._overlapping(slowest) / sum(slowest)


@dataclass(frozen=True, slots=True)
class Steps(Counted):
    """K and V of the others, step by step or in one exchange.

    zigzag: how a sequence is cut; None cuts zigzag under a causal mask. kept: the received keys that stay for the
    backward pass.
    """

    zigzag: bool | None
    kept: Literal["nothing", "last step", "all"]

    def order(self, workload: Workload) -> Order:
        """Zigzag or contiguous."""
        return "zigzag" if (workload.causal if self.zigzag is None else self.zigzag) else "contiguous"

    def pairs(self, workload: Workload, ranks: int) -> StepPairs | None:
        """The pairs of dense and dilated patterns."""
        return step_pairs(workload, ranks, self.order(workload) == "zigzag")

    def _overlapping(self, slowest: tuple[float, ...]) -> float:
        """All but the last step's work, whose keys must have arrived; a backward pass that begins with this step has no
        gradients to send before. 0 if all keys come in one exchange: the call on local keys hides little of it where
        ranks are many.
        """
        if self.kept == "all":
            return 0.0
        return sum(slowest) - next((work for work in reversed(slowest[1:]) if work), 0.0)

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """K and V of the others, again in the backward pass except those kept; there dK and dV return in the dtype of
        K. Dense patterns only.
        """
        if ranks == 1:
            return 0
        if _uneven(workload, ranks) or workload.window != UNBOUNDED or not workload.is_dense:
            return None
        forward, backward = workload.mode != "backward", workload.mode != "forward"
        # Under a causal mask one rank receives every K and another every dK; the largest sum of one rank counts.
        halves = max(
            keys * forward + (keys_again + gradients) * backward
            for keys, keys_again, gradients in self._half_shards(workload.causal, ranks)
        )
        return _vector(workload) * (workload.seq_len // ranks) * DTYPE_BYTES[workload.dtype] * halves // 2

    def sums_hops(self, _workload: Workload, ranks: int) -> bool:
        """True if keys come step by step."""
        return ranks > 1 and self.kept != "all"

    def launches(self, workload: Workload, ranks: int) -> Launches:
        """A call on the keys of each rank, and an exchange with it."""
        if self.kept == "all":
            return Counted.launches(self, workload, ranks)
        steps = ranks - 1
        return Launches(ranks, steps, 2 * steps - (self.kept == "last step"))

    def _half_shards(self, causal: bool, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Per rank, in half shards: K received forward, K received backward, dK received."""
        # Half shards needed of an earlier rank and of a later one.
        earlier, later = 2, 2
        if causal:
            earlier, later = (2, 0) if self.zigzag is False else (1, 2)
        for before in range(ranks):
            after = ranks - 1 - before
            keys = earlier * before + later * after
            # The last step comes from the next rank in the ring.
            last = later if after else earlier
            again = {"nothing": keys, "last step": keys - last, "all": 0}[self.kept]
            yield keys, again, earlier * after + later * before


@dataclass(frozen=True, slots=True)
class WholeShards(Steps):
    """Every shard goes to every rank, even if a mask hides it: torch's context parallelism and ring_flash_attn.

    at_once: K and V come in one gather, in the forward and again in the backward pass. Sums of dK and dV are float32
    and pass through the ring in P steps.
    """

    at_once: bool = False
    kept: Literal["nothing"] = "nothing"

    def _overlapping(self, slowest: tuple[float, ...]) -> float:
        """All but the last step's work, or that on local keys if the others come in one gather."""
        return slowest[0] if self.at_once else Steps._overlapping(self, slowest)

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """K and V of the P-1 others in each pass, and in the backward pass the sums. Source: torch 2.13,
        ring_flash_attn 0.1.8 and yunchang 0.6.4.
        """
        if ranks == 1:
            return 0
        if workload.seq_len % ranks or workload.layout == "packed" or not workload.is_dense:
            return None
        forward, backward = workload.mode != "backward", workload.mode != "forward"
        keys = (ranks - 1) * DTYPE_BYTES[workload.dtype] * (forward + backward)
        return _vector(workload) * (workload.seq_len // ranks) * (keys + ranks * 4 * backward)


class OneExchange(Counted):
    """Every row of nested branches that a rank sees, once, in one exchange."""

    def launches(self, _workload: Workload, ranks: int) -> Launches:
        """A call on the keys of each rank."""
        return Launches(ranks, 1, 1)

    def order(self, _workload: Workload) -> Order:
        """Contiguous."""
        return "contiguous"

    def pairs(self, workload: Workload, ranks: int) -> StepPairs | None:
        """The pairs of sequences cut in order."""
        return step_pairs(workload, ranks, zigzag=False)

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """rows = Σ (w_i - max(w_{i-1}, l))/r_i, under a causal mask only earlier rows; the backward pass sends only
        gradients, for several branches in float32 (float64 for float64).
        """
        if ranks == 1:
            return 0
        if _uneven(workload, ranks) or workload.window != UNBOUNDED:
            return None
        gathered = _nested_rows(workload, ranks)
        if gathered is None:
            return None
        item = DTYPE_BYTES[workload.dtype]
        returned = item if workload.is_dense else _wide(workload)
        forward, backward = workload.mode != "backward", workload.mode != "forward"
        return _vector(workload) * max(item * forward * keys + returned * backward * own for keys, own in gathered)


@dataclass(frozen=True, slots=True)
class HeadsForTokens:
    """Ranks exchange tokens for heads: whole sequences of some heads each. with_lse: lse is sent with out."""

    with_lse: bool = True

    def order(self, _workload: Workload) -> Order:
        """Contiguous."""
        return "contiguous"

    def load_balance(self, workload: Workload, ranks: int) -> float | None:
        """λ of whole heads: if they do not divide, some ranks have one more."""
        return workload.num_heads / ranks / -(-workload.num_heads // ranks)

    def overlapping_share(self, _workload: Workload, _ranks: int) -> float | None:
        """Nothing."""
        return 0.0

    def sums_hops(self, _workload: Workload, _ranks: int) -> bool:
        """False: each rank has whole sequences of its heads."""
        return False

    def launches(self, _workload: Workload, _ranks: int) -> Launches:
        """One call; tokens for heads, and back, in each pass."""
        return Launches(1, 2, 2)

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """(P-1)/P of q, k, v and out (and lse); backward, of dout, dq, dk and dv."""
        if ranks == 1:
            return 0
        if _uneven(workload, ranks) or workload.num_heads % ranks or workload.num_kv_heads % ranks:
            return None
        forward, backward = workload.mode != "backward", workload.mode != "forward"
        heads = 2 * (workload.num_heads + workload.num_kv_heads)
        vectors = heads * workload.head_dim * DTYPE_BYTES[workload.dtype]
        row = vectors * (forward + backward) + workload.num_heads * _wide(workload) * forward * self.with_lse
        return workload.batch_size * (workload.seq_len // ranks) * row * (ranks - 1) // ranks


@dataclass(frozen=True, slots=True)
class HeadsInRing:
    """USP: groups of ranks exchange tokens for heads, and a ring joins the groups (`usp_degrees`)."""

    trade: HeadsForTokens
    ring: Steps

    def load_balance(self, workload: Workload, ranks: int) -> float | None:
        """λ of the ring: within a group all ranks compute the same pairs of different heads."""
        return self.ring.load_balance(workload, usp_degrees(ranks)[1])

    def overlapping_share(self, workload: Workload, ranks: int) -> float | None:
        """As for the ring."""
        return self.ring.overlapping_share(workload, usp_degrees(ranks)[1])

    def launches(self, workload: Workload, ranks: int) -> Launches:
        """The launches of the ring, and two exchanges of a group in each pass."""
        calls, forward, backward = self.ring.launches(workload, usp_degrees(ranks)[1])
        return Launches(calls, forward + 2, backward + 2)

    def sums_hops(self, workload: Workload, ranks: int) -> bool:
        """As for the ring."""
        return self.ring.sums_hops(workload, usp_degrees(ranks)[1])

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """The bytes of a group for its share of the sequence, and of the ring for its share of the heads."""
        heads, ring = usp_degrees(ranks)
        if _uneven(workload, ranks) or workload.num_heads % heads or workload.num_kv_heads % heads:
            return None
        share = {"num_heads": workload.num_heads // heads, "num_kv_heads": workload.num_kv_heads // heads}
        traded = self.trade.received_bytes(workload.replace(seq_len=workload.seq_len // ring), heads)
        sent_round = self.ring.received_bytes(workload.replace(**share), ring)
        return None if traded is None or sent_round is None else traded + sent_round


class Assigned(Counted):
    """Chunks of rows assigned by their work; keys that some row sees are sent once."""

    @abstractmethod
    def _assignment(self, workload: Workload, ranks: int) -> Assignment | None:
        """The assignment; None for patterns that it does not support."""

    def pairs(self, workload: Workload, ranks: int) -> StepPairs | None:
        """The pairs of the assignment; None if no pair is visible."""
        assignment = self._assignment(workload, ranks)
        pairs = assignment.step_pairs() if assignment else ()
        return pairs if any(map(sum, pairs)) else None

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """The bytes of the assignment."""
        assignment = self._assignment(workload, ranks)
        return assignment.received_bytes(workload) if assignment else None


class Blocks(Assigned):
    """Whole blocks of a mask."""

    def _assignment(self, workload: Workload, ranks: int) -> Assignment:
        return BlockAssignment.of(workload, ranks)


class Rows(Assigned):
    """Rows of dense patterns."""

    def order(self, _workload: Workload) -> Order:
        """Balanced."""
        return "balanced"

    def _assignment(self, workload: Workload, ranks: int) -> Assignment | None:
        return RowAssignment.of(workload, ranks) if workload.is_dense else None

    def _overlapping(self, slowest: tuple[float, ...]) -> float:  # noqa: ARG002
        """0: the single launch needs all its keys."""
        return 0.0


class ZigzagGather(Steps):
    """All keys that zigzag shards see, in one exchange."""

    def pairs(self, workload: Workload, ranks: int) -> StepPairs | None:
        """The pairs of dense patterns, exact under a window, too."""
        return RowAssignment.zigzag(workload, ranks).step_pairs() if workload.is_dense else None

    def received_bytes(self, workload: Workload, ranks: int) -> int | None:
        """Each key once to the ranks that see it, for any lengths and windows."""
        return RowAssignment.zigzag(workload, ranks).received_bytes(workload) if workload.is_dense else None


RING = Steps(zigzag=False, kept="nothing")
RING_OVERLAP = Steps(zigzag=False, kept="last step")
ZIGZAG_RING = Steps(zigzag=True, kept="last step")
RING_VARLEN = Steps(zigzag=None, kept="last step")
ZIGZAG_ALLGATHER = ZigzagGather(zigzag=True, kept="all")
RING_ALLGATHER = OneExchange()
ULYSSES = HeadsForTokens()
BLOCKS = Blocks()
BALANCED_ALLGATHER = Rows()
WHOLE_RING = WholeShards(zigzag=False)
WHOLE_ZIGZAG_RING = WholeShards(zigzag=True)
WHOLE_ZIGZAG_GATHER = WholeShards(zigzag=True, at_once=True)
HEADS_FOR_TOKENS = HeadsForTokens(with_lse=False)
HEADS_IN_RING = HeadsInRing(HEADS_FOR_TOKENS, WHOLE_ZIGZAG_RING)


def _uneven(workload: Workload, ranks: int) -> bool:
    """Return True if ranks, or the halves of a zigzag cut, have different numbers of rows."""
    return bool(workload.seq_len % (2 * ranks)) or workload.layout == "packed"


def _vector(workload: Workload) -> int:
    """Elements of K and V of one position."""
    return 2 * workload.batch_size * workload.num_kv_heads * workload.head_dim


def _wide(workload: Workload) -> int:
    """Bytes of an element of the sums."""
    return 8 if workload.dtype == "float64" else 4


def _nested_rows(workload: Workload, ranks: int) -> list[tuple[int, int]] | None:
    """(rows gathered, local rows whose gradients return) per rank and key/value head.

    None unless branches nest and a key/value head keeps a single residue of each.
    """
    rows, (shape,) = workload.seq_len // ranks, workload.shapes
    of_head = [workload.pattern.strided_segments(shape, head) for head in range(workload.num_heads)]
    group = workload.group_size
    if None in of_head or any(of_head[head] != of_head[head - head % group] for head in range(len(of_head))):
        return None
    branches = sorted((w, r) for w, r, _ in of_head[0] or ())
    nested = all(b[0] % a[0] == 0 and b[1] % a[1] == 0 for a, b in pairwise(branches))
    even = all((rows % w == 0 or w % rows == 0) and min(w, rows) % r == 0 for w, r in branches)
    if workload.pattern.has_grouped_heads or not (workload.is_dense or (nested and even)):
        return None
    gathered = []
    for rank in range(ranks):
        keys, returned, inner = 0, 0, (rank * rows, (rank + 1) * rows)
        for segment, rate in branches:
            start = rank * rows // segment * segment
            outer = min(start, inner[0]), max(min(start + segment, workload.seq_len), inner[1])
            before, after = (inner[0] - outer[0]) // rate, (outer[1] - inner[1]) // rate
            keys += before if workload.causal else before + after
            returned += after if workload.causal else before + after
            inner = outer
        gathered.append((keys, returned))
    return gathered

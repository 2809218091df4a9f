"""Memory of `ulysses` on one rank: whole sequences of some heads, and what it trades (`impls.ring.ulysses`)."""

from dataclasses import dataclass
from typing import Self

from dilabench.predict.memory.kernels import Kernel
from dilabench.predict.memory.ledger import Ledger
from dilabench.predict.memory.over_ranks.rings import RankMemory
from dilabench.predict.memory.over_ranks.shares import share_of
from dilabench.predict.memory.over_ranks.sums import SoftmaxMemory
from dilabench.predict.memory.sizes import Sizes
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class UlyssesMemory:
    """Two collectives per pass; this rank's heads of q, k, v, out and lse stay for the backward pass.

    own: sizes of this rank's rows of all heads. whole: of all rows of its heads, which `inner` attends with. copies:
    how often a K/V head is held on average, for it goes to every rank that has one of its query heads.
    """

    own: Sizes
    whole: Sizes
    inner: RankMemory
    copies: float
    cuts_copies: bool

    @classmethod
    def of(cls, workload: Workload, size: int, kernel: Kernel, on_cpu: bool) -> Self:
        """For the rank with the most heads."""
        heads = -(-workload.num_heads // size)
        kv_heads = max(1, -(-heads // workload.group_size))
        per_rank = sum(_kv_heads_of(workload, rank, size) for rank in range(size))
        few = workload.replace(num_heads=kv_heads * max(1, heads // kv_heads), num_kv_heads=kv_heads)
        return cls(
            own=Sizes.of(workload).part(-(-workload.seq_len // size) / workload.seq_len),
            whole=Sizes.of(few),
            inner=RankMemory(share_of(few, 0, 1, union=False), kernel, on_cpu),
            copies=per_rank / workload.num_kv_heads,
            cuts_copies=workload.batch_size > 1,
        )

    @property
    def kept(self) -> float:
        """What stays for the backward pass beside out and lse of this rank's rows."""
        return self.whole.gradients + self.whole.result

    def forward(self) -> float:
        """Bytes beyond the inputs."""
        ledger, own, whole = Ledger(), self.own, self.whole
        ledger.hold("flat", own.q + 2 * self.copies * own.kv)
        ledger.hold("received", whole.gradients)
        ledger.free("flat")
        ledger.hold("whole", whole.gradients)
        ledger.free("received")
        results = SoftmaxMemory(ledger, self.inner.share, self.inner.defers)
        self.inner.attend(ledger, results, self.inner.share.own)
        # The sums of several results stay bound until the call is over.
        results.finish(keeps=True)
        self._to_tokens(ledger, "out", whole.q, own.q)
        ledger.hold("out of rows", own.result)
        return ledger.peak

    def backward(self) -> float:
        """Bytes beyond the inputs, out, lse and what is kept."""
        ledger, own, whole = Ledger(), self.own, self.whole
        ledger.hold("flat", own.q)
        ledger.hold("received", whole.q)
        ledger.free("flat")
        ledger.hold("whole dout", whole.q)
        ledger.free("received")
        sums = self.inner.sums(ledger)
        self.inner.attend_backward(ledger, sums, self.inner.share.own)
        for total in sums:
            ledger.hold(f"finished {total.name}", total.finish())
        self._to_tokens(ledger, "gradients", whole.gradients, own.q + 2 * self.copies * own.kv)
        return ledger.peak

    def _to_tokens(self, ledger: Ledger, name: str, given: float, taken: float) -> None:
        """Rows for the other ranks, cut out where the batch keeps them apart, in one buffer; theirs for this one."""
        if self.cuts_copies:
            ledger.hold("cut", given)
        ledger.hold("flat", given)
        ledger.hold("received", taken)
        ledger.free("flat")
        ledger.hold(f"{name} of rows", taken)
        ledger.free("cut", "received")


def _kv_heads_of(workload: Workload, rank: int, size: int) -> int:
    """K/V heads that a rank's query heads read."""
    first, stop = workload.num_heads * rank // size, workload.num_heads * (rank + 1) // size
    return -(-stop // workload.group_size) - first // workload.group_size if stop > first else 0

"""What a dense kernel allocates inside one call, by backend and kind of device."""

from dataclasses import dataclass, replace
from typing import Protocol

from dilabench.predict.memory.calls import Call
from dilabench.predict.memory.math_blocks import MathMemory
from dilabench.workload.spec import Workload


class Kernel(Protocol):
    """Bytes of one call beside its operands at its fullest moment."""

    def forward(self, call: Call) -> float:
        """Beyond out and lse."""
        ...

    def backward(self, call: Call) -> float:
        """With dq, dk and dv."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMemory:
    """`Kernel` whose allocations are multiples of the call's own tensors.

    accumulators: float32 values per element of q in the backward pass. stats: float32 values per query row there.
    view_copies: of q, out and dout, how many it copies there when they are views. repeats: K/V heads are repeated to H.
    expands_gradients: dk and dv are made per query head and summed. recomputes: float32 copies of q's size that stand
    there before the gradients do, beside a result and the stats of its own. aligns_ends, places_results: as in
    `descriptors.Backend`.
    """

    accumulators: int = 0
    stats: int = 0
    view_copies: int = 0
    repeats: bool = False
    expands_gradients: bool = False
    recomputes: int = 0
    aligns_ends: bool = False
    places_results: bool = False

    def forward(self, call: Call) -> float:
        """K and V per query head, where the kernel cannot share them."""
        return self._repeated(call)

    def backward(self, call: Call) -> float:
        """The gradients beside copies, accumulators and whatever is made per query head."""
        sizes = call.sizes
        stats = self.stats * sizes.rows_float32
        inner = self._repeated(call) + self._expanded(call) + self.accumulators * sizes.q_float32 + stats
        copies = self.view_copies * sizes.q if call.views else 0.0
        if not self.recomputes:
            return sizes.gradients + inner + copies
        again = sizes.result + stats
        # The dout of its own keys is copied as `flexed.dout_copy` says.
        return again + max(self.recomputes * sizes.q_float32, 2 * sizes.q + sizes.gradients + inner)

    def _repeated(self, call: Call) -> float:
        """A single K/V head is expanded in place."""
        return _per_query_head(call) if self.repeats and call.readers > 1 and not call.one_key else 0.0

    def _expanded(self, call: Call) -> float:
        """dk and dv per query head, before they are summed."""
        expands = self.repeats or self.expands_gradients
        return _per_query_head(call) if expands and call.readers > 1 else 0.0


def _per_query_head(call: Call) -> float:
    """K and V, or dk and dv, with as many heads as q has."""
    return 2 * call.sizes.q * call.key_rows / call.rows


# FlashAttention 2's dq_accum and softmax_d; its GQA backward makes dk and dv per query head and sums them.
FLASH2 = KernelMemory(accumulators=1, stats=1, view_copies=2, expands_gradients=True)
FLASH3 = KernelMemory(accumulators=1, stats=2)
# The backward kernels of our own tiles keep log2(e)·lse and rowsum(dout·out).
TILES = KernelMemory(stats=2)
# FlexAttention's backward keeps rowsum(dout·out).
FLEX = KernelMemory(stats=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevices:
    """`Backend.memory` of a kernel on each kind of device; None where it does not run or nothing is known of it."""

    cuda: KernelMemory | None = None
    cpu: KernelMemory | None = None

    def __call__(self, _workload: Workload, device: str) -> KernelMemory | None:
        """The same for every workload."""
        return self.cuda if device == "cuda" else self.cpu


SDPA_FLASH = OnDevices(cuda=FLASH2, cpu=KernelMemory(repeats=True))
SDPA_EFFICIENT = OnDevices(cuda=KernelMemory(accumulators=1, stats=1, view_copies=1, repeats=True))
SDPA_CUDNN = OnDevices(cuda=KernelMemory(accumulators=1, stats=1, view_copies=3, expands_gradients=True))
FLASH_ATTN_2 = OnDevices(cuda=FLASH2)
FLASH_ATTN_3 = OnDevices(cuda=FLASH3)
FLASH_ATTN_4 = OnDevices(cuda=replace(FLASH3, aligns_ends=True, places_results=True))
# dout, both outs and their difference in float32 stand there at once.
FLEX_ATTENTION = OnDevices(cuda=KernelMemory(stats=1, recomputes=4))


def aligns_ends(kernel: Kernel) -> bool:
    """Whether it takes fewer queries than keys under a causal mask; a test holds it to `descriptors.Backend`."""
    return isinstance(kernel, KernelMemory | MathMemory) and kernel.aligns_ends


def places_results(kernel: Kernel) -> bool:
    """Whether it writes out and dq to where it is told; the same test holds it."""
    return isinstance(kernel, KernelMemory | MathMemory) and kernel.places_results

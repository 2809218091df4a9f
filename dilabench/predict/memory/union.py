"""Memory of one device's `dense`, `strided`, `gather`, `fused` and `block-sparse`: kernel calls, merged results."""

from dataclasses import dataclass

from dilabench.predict.memory.calls import Call, branch_fractions, largest_calls
from dilabench.predict.memory.kernels import Kernel
from dilabench.predict.memory.sizes import INDEX_BYTES, MemoryPlan, Sizes, inputs_of
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Passes:
    """Bytes of the forward and backward pass beyond the inputs, at their fullest moment.

    gathered: rows are copied in and out by index, instead of being views.
    """

    workload: Workload
    sizes: Sizes
    kernel: Kernel
    calls: tuple[Call, ...]
    gathered: bool

    @classmethod
    def of(cls, workload: Workload, kernel: Kernel, gathered: bool) -> "Passes":
        """The passes of a workload through a kernel."""
        return cls(workload, Sizes.of(workload), kernel, largest_calls(workload, gathered), gathered)

    def forward(self) -> float:
        """Out and lse, and the largest call beside them."""
        sizes, result = self.sizes, self.sizes.result
        fullest = earlier = 0.0
        for index, call in enumerate(self.calls):
            own = call.sizes.result
            taken = call.sizes.gradients if self.gathered else 0.0
            inner = taken + self.kernel.forward(call)
            fullest = max(fullest, earlier + (result if index else 0.0) + own + inner)
            if not call.whole or self._detached:
                merging = call.share * (3 * sizes.lse + (result if self.gathered and index else 0.0))
                fullest = max(fullest, earlier + result + own + merging)
            earlier += own if self._detached else 0.0
        return fullest

    def backward(self) -> float:
        """dq, dk and dv, and the largest call's shares of them beside its copies and accumulators."""
        fullest = 0.0
        for index, call in enumerate(self.calls):
            copies = call.sizes.gradients + 2 * call.sizes.q + call.sizes.lse if self.gathered else 0.0
            # The first call of all finds no result yet.
            before = self.sizes.gradients if index else 0.0
            fullest = max(fullest, before + self.kernel.backward(call) + copies)
            if not call.whole:
                fullest = max(fullest, self.sizes.gradients * (1 + call.share))
        return fullest

    def kept(self) -> float:
        """Detached merge weights need every call's own out and lse in the backward pass."""
        if not self._detached:
            return 0.0
        return sum(fraction for fraction, _ in branch_fractions(self.workload)) * self.sizes.result

    def tables(self) -> int:
        """Index tensors of `gather`, one of queries, keys and lse rows each."""
        if not self.gathered:
            return 0
        fraction = sum(fraction for fraction, _ in branch_fractions(self.workload))
        rows = self.workload.seq_len * (2 * self.workload.num_heads + self.workload.num_kv_heads)
        return round(fraction * rows * INDEX_BYTES)

    def plan(self, checkpointed: bool = False, tables: int = 0) -> MemoryPlan:
        """Both passes as the mode has them. `tables`: what the kernel keeps between calls."""
        tables += self.tables()
        forward, backward = self.forward(), self.backward()
        return two_passes(self.workload, forward, backward, kept=self.kept(), tables=tables, again=checkpointed)

    @property
    def _detached(self) -> bool:
        pattern = self.workload.pattern
        return pattern.is_detached and self.gathered


def two_passes(
    workload: Workload,
    forward: float,
    backward: float,
    *,
    kept: float = 0.0,
    tables: int = 0,
    again: bool = False,
    sizes: Sizes | None = None,
) -> MemoryPlan:
    """The plan of a function that keeps its inputs, out and lse for its backward pass.

    kept: what it keeps besides. again: checkpointed, so that the backward pass makes out and lse once more. sizes: of
    the tensors that it gets, where they are not all of the workload's.
    """
    sizes = sizes or Sizes.of(workload)
    saved = 0.0
    if workload.mode == "forward":
        backward = 0.0
    else:
        saved = kept + (0.0 if again else sizes.result)
        backward += 2 * sizes.q + sizes.lse if again else 0.0
        forward = max(0.0, forward - saved)
    return MemoryPlan(
        inputs_bytes=inputs_of(workload, sizes),
        saved_bytes=round(saved),
        workspace_bytes=round(max(forward, backward)),
        tables_bytes=tables,
    )


def one_kernel(
    workload: Workload, backward_rows: int, checkpointed: bool = False, *, tables: int = 0, copied: float = 0.0
) -> MemoryPlan:
    """A kernel that takes all branches at once and writes out and lse directly.

    `backward_rows`: float32 values per query row that its backward pass keeps beside dq, dk and dv. `copied`: bytes of
    what it gets and copies there.
    """
    sizes = Sizes.of(workload)
    backward = copied + sizes.gradients + backward_rows * sizes.rows_float32
    return two_passes(workload, sizes.result, backward, tables=tables, again=checkpointed)

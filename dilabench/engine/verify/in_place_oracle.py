"""The oracle of a call that fills the device: over tensors that are there already."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from dilabench.engine.verify.oracle import Oracle
from dilabench.workload.spec import Workload


class InPlaceOracle(Oracle):
    """The oracle over inputs (and dout) that belong to someone else; nothing of their size is allocated."""

    def __init__(self, workload: Workload, inputs: tuple[Tensor, ...], dout: Tensor | None, seed: int) -> None:
        self._lent = tuple(tensor.detach() for tensor in inputs)
        self._dout = dout
        super().__init__(workload, seed=seed, device=inputs[0].device)

    def _draw_inputs(self) -> tuple[Tensor, ...]:
        return self._lent

    @property
    def _heads(self) -> tuple[Tensor, Tensor, Tensor]:
        if len(self.sample.batches) < self.workload.batch_size:
            return super()._heads
        q, k, v = self._lent
        return q, k, v

    @cached_property
    def full_dout(self) -> Tensor:
        """The dout that was lent."""
        assert self._dout is not None
        return self._dout

    @cached_property
    def sampled_dout(self) -> Tensor:
        """The lent dout itself, from now on zero outside the sampled rows."""
        if not self.sample.complete:
            dout, place = self.batched(self.full_dout), self._place()
            rows = dout[place].clone()
            dout.zero_()
            dout[place] = rows
        return self.full_dout

    def together(self, passed: bool) -> bool:
        """Whether whoever computes the call has passed: one rank must not go on without the others."""
        return passed

    def keys_of(self, gradient: Tensor) -> Tensor:
        """A copy of dk or dv at the sampled keys, [b, S, K, D]."""
        if self.sample.keys is None:
            return self.sampled_keys(gradient).clone()
        batches, keys = (index.to(self.device) for index in (self.sample.batches, self.sample.keys))
        return gradient[batches[:, None], keys[None, :]]

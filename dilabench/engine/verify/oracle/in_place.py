"""The oracle of a call that fills the device: it reads the call's own inputs instead of drawing new ones."""

from __future__ import annotations

from torch import Tensor

from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.sample import Sample
from dilabench.workload.spec import Workload


class InPlaceOracle(Oracle):
    """The oracle over a call's own q, k, v (and dout), without copies; no memory of their size is allocated."""

    def __init__(
        self,
        workload: Workload,
        inputs: tuple[Tensor, ...],
        dout: Tensor | None,
        seed: int,
        sample: Sample | None = None,
    ) -> None:
        self._given = tuple(tensor.detach() for tensor in inputs)
        self._dout = dout
        super().__init__(workload, seed=seed, device=inputs[0].device, sample=sample)

    def _draw_inputs(self) -> tuple[Tensor, ...]:
        return self._given

    @property
    def _heads(self) -> tuple[Tensor, Tensor, Tensor]:
        if len(self.sample.batches) < self.workload.batch_size:
            return super()._heads
        q, k, v = (self.batched(tensor) for tensor in self._given)
        return q, k, v

    @property
    def full_dout(self) -> Tensor:
        """The dout that was given, of out's shape."""
        assert self._dout is not None
        return self._dout

    @property
    def sampled_dout(self) -> Tensor:
        """The given dout itself, set to zero outside the sampled rows."""
        if not self.sample.complete:
            dout, place = self.batched(self.full_dout), self._place()
            rows = dout[place].clone()
            dout.zero_()
            dout[place] = rows
        return self.full_dout

    def together(self, passed: bool) -> bool:
        """Whether every rank that computes the call has passed; `passed` itself on a single device."""
        return passed

    def keys_of(self, gradient: Tensor) -> Tensor:
        """A copy of dk or dv at the sampled keys, [b, S, K, D]."""
        if self.sample.keys is None:
            return self.sampled_keys(gradient).clone()
        batches, keys = (index.to(self.device) for index in (self.sample.batches, self.sample.keys))
        return gradient[batches[:, None], keys[None, :]]

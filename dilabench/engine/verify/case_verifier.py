"""Verifies a prepared call through `dilabench.engine.verify`, with one oracle per workload (torch)."""

import torch

from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.verify import Oracle, summary, verify
from dilabench.record import Verification


class CaseVerifier:
    """Verifies prepared calls. The oracle of the latest workload is kept for the other cases of its group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._oracle: Oracle | None = None

    def verify(self, call: PreparedCall) -> tuple[Verification, str]:
        """The checks of semantics.md §4 that apply to this call, and their summary in one line."""
        verification = verify(
            call.whole,
            call.workload,
            takes=call.spec.takes,
            deterministic=call.spec.deterministic,
            module=getattr(call.module, "module", call.module),
            oracle=self._oracle_of(call),
        )
        return verification, summary(verification)

    def forget(self) -> None:
        """Free the oracle."""
        self._oracle = None

    def _oracle_of(self, call: PreparedCall) -> Oracle:
        known = self._oracle
        if known is None or (known.workload, known.takes) != (call.workload, call.spec.takes):
            # The old one goes first: two at once may not fit.
            self._oracle = known = None
            seed = call.spec.seed
            known = self._oracle = Oracle(call.workload, takes=call.spec.takes, seed=seed, device=self._device)
        return known

"""Verifies a prepared call through `dilabench.engine.verify`, with one oracle per workload (torch)."""

from functools import partial

import torch

from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target
from dilabench.contracts import AttentionFn, BuildContext
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.device.device import device_of
from dilabench.engine.verify import Oracle, summary, verify
from dilabench.engine.verify.call import OnHost
from dilabench.engine.verify.confirmed import Confirmed
from dilabench.engine.worker.protocol import SecondSpec
from dilabench.record import Verification
from dilabench.workload.spec import Workload


class CaseVerifier:
    """Verifies prepared calls. The oracle of the latest workload is kept for the other cases of its group, and so is
    what every row was compared with."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device).verifies_on
        self._oracle: Oracle | None = None
        self._second: tuple[SecondSpec, Confirmed] | None = None

    def verify(self, call: PreparedCall) -> tuple[Verification, str]:
        """The checks of semantics.md §4 that apply to this call, and their summary in one line."""
        oracle = self._oracle_of(call)
        verification = verify(
            call.whole if device_of(call.device).facts.holds_float64 else OnHost(call.whole, call.device),
            call.workload,
            takes=call.spec.takes,
            deterministic=call.spec.deterministic,
            module=getattr(call.module, "module", call.module),
            oracle=oracle,
            confirmed=self._confirmed(call, oracle),
        )
        return verification, summary(verification)

    def forget(self) -> None:
        """Free the oracle and what it has confirmed."""
        self._oracle = self._second = None

    def _oracle_of(self, call: PreparedCall) -> Oracle:
        known = self._oracle
        if known is None or (known.workload, known.takes) != (call.workload, call.spec.takes):
            # The old one is freed first: both together may not fit.
            self._oracle = self._second = known = None
            seed = call.spec.seed
            known = self._oracle = Oracle(call.workload, takes=call.spec.takes, seed=seed, device=self._device)
        return known

    def _confirmed(self, call: PreparedCall, oracle: Oracle) -> Confirmed | None:
        """The first of the case's second implementations that the oracle confirms; None if it needs none."""
        if oracle.sample.complete:
            return None
        for spec in call.spec.seconds:
            if self._second is None or self._second[0] != spec:
                # As with oracles: the results of the old one go first.
                self._second = None
                self._second = spec, Confirmed(spec.name, partial(_built, spec, call.workload, self._device))
            if self._second[1].results(oracle) is not None:
                return self._second[1]
        return None


def _built(spec: SecondSpec, workload: Workload, device: torch.device) -> AttentionFn:
    backend = load_backend(spec.backend) if spec.backend else None
    function: AttentionFn = load_target(spec.target)(workload, BuildContext(device=device, backend=backend))
    return function

"""Verifies a prepared call through `dilabench.engine.verify`, with one oracle per workload (torch)."""

import copy
import time
from dataclasses import dataclass
from functools import partial

import torch

from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target
from dilabench.contracts import AttentionFn, BuildContext
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import SecondSpec
from dilabench.engine.device.device import device_of
from dilabench.engine.verify import Oracle, summary, verify
from dilabench.engine.verify.call import OnHost
from dilabench.engine.verify.confirmed import Confirmed
from dilabench.engine.verify.model_steps import ModelSteps, short_form
from dilabench.record import Verification
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import hides_nothing

# Bytes of the inputs of oracles that are kept while other workloads are verified and timed. Their expected results of a
# complete sample take about ten times as much.
KEPT_BYTES = 2**26


@dataclass(slots=True)
class _Known:
    """The oracle of a workload and `takes`, and what every row was compared with last. fresh: no other code has had the
    inputs since the oracle was forgotten."""

    oracle: Oracle
    second: tuple[SecondSpec, Confirmed] | None = None
    fresh: bool = True

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.oracle.inputs)

    def turn_to(self, workload: Workload) -> None:
        """Serve the same workload in its mode: inputs and right results are the same in every mode; results of
        other code may lack the gradients.
        """
        if self.oracle.workload != workload:
            self.oracle.workload, self.oracle.around, self.second = workload, None, None


class CaseVerifier:
    """Verifies prepared calls. The oracle of the latest workload is kept for the other cases of its group, small ones
    for longer: each length gets its least row before any group is complete. It serves all modes of a workload."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device).verifies_on
        # Latest last.
        self._known: dict[tuple[Workload, str], _Known] = {}
        self._models = ModelSteps(device)

    def verify(self, call: PreparedCall) -> tuple[Verification, str]:
        """The checks of semantics.md §4 that apply to this call, and their summary in one line."""
        if call.spec.takes != "heads":
            call.reference = copy.deepcopy(getattr(call.module, "module", call.module))
        if call.spec.takes == "model":
            started = time.perf_counter_ns()
            checks = tuple(self._models.checks(call))
            # Other than dense attention is compared in short.
            rows = None if hides_nothing(call.workload) else short_form(call.workload).tokens
            duration = max(0, time.perf_counter_ns() - started)
            verification = Verification(checks=checks, sampled_rows=rows, duration_ns=duration)
            return verification, summary(verification)
        known = self._known_of(call)
        verification = verify(
            call.whole if device_of(call.device).facts.holds_float64 else OnHost(call.whole, call.device),
            call.workload,
            takes=call.spec.takes,
            deterministic=call.spec.deterministic,
            module=getattr(call.module, "module", call.module),
            oracle=known.oracle,
            confirmed=self._confirmed(call, known),
        )
        return verification, summary(verification)

    def forget(self) -> None:
        """Free all oracles, and what they have confirmed, but small ones."""
        self._keep(KEPT_BYTES)
        self._models.forget()
        for known in self._known.values():
            known.fresh = False

    def _keep(self, nbytes: int) -> None:
        """Free the oldest until the inputs of those that are left take at most `nbytes`."""
        while sum(known.nbytes for known in self._known.values()) > nbytes:
            del self._known[next(iter(self._known))]

    def _known_of(self, call: PreparedCall) -> _Known:
        key = call.workload.replace(mode="both"), call.spec.takes
        known = self._known.pop(key, None)
        if known is None:
            # Large ones go first: two at once may not fit.
            self._keep(KEPT_BYTES)
            known = _Known(Oracle(call.workload, takes=call.spec.takes, seed=call.spec.seed, device=self._device))
        elif not known.fresh:
            # Code that was verified with them has run since, and may have kept them.
            known.oracle.restore()
            known.fresh = True
        known.turn_to(call.workload)
        self._known[key] = known
        return known

    def _confirmed(self, call: PreparedCall, known: _Known) -> Confirmed | None:
        """The first of the case's second implementations that the oracle confirms; None if it needs none."""
        if known.oracle.sample.complete:
            return None
        for spec in call.spec.seconds:
            if known.second is None or known.second[0] != spec:
                # As with oracles: the results of the old one go first.
                known.second = None
                known.second = spec, Confirmed(spec.name, partial(_built, spec, call.workload, self._device))
            if known.second[1].results(known.oracle) is not None:
                return known.second[1]
        return None


def _built(spec: SecondSpec, workload: Workload, device: torch.device) -> AttentionFn:
    backend = load_backend(spec.backend) if spec.backend else None
    function: AttentionFn = load_target(spec.target)(workload, BuildContext(device=device, backend=backend))
    return function

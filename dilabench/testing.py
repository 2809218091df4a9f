"""The kit for authors: `check_plugin` runs every conformance check on a registered component.

    from dilabench.testing import check_implementation, check_plugin

    def test_it_conforms():
        check_plugin("my-attention")                  # what `dilabench plugin check my-attention` does

    def test_my_attention():
        check_implementation("my-attention")          # by name, once the plug-in is installed
        check_implementation(my_package.kernel.build) # or the build function itself

Needs torch; `random_workloads` needs hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target
from dilabench.conformance.component import registries_with, scorecard
from dilabench.conformance.odd_workloads import odd_workloads
from dilabench.conformance.scorecard import Scorecard
from dilabench.contracts import Build, BuildContext, LoadedBackend
from dilabench.engine.verify import Oracle, poisoned, summary, verify
from dilabench.machine import Machine, detect
from dilabench.patterns.registry import pattern_type
from dilabench.plugins.descriptors import Backend, Capabilities, Implementation
from dilabench.plugins.manager import discover
from dilabench.record import Case, Takes, Verification
from dilabench.workload.spec import DType, Workload

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["check_implementation", "check_plugin", "odd_workloads", "poisoned", "poisoned_memory", "random_workloads"]


def check_plugin(name: str, *, kind: str | None = None, device: str = "auto") -> tuple[Scorecard, ...]:
    """Run every conformance check on all registered components of this name (`dilabench plugin check`).

    `kind`: 'implementation', 'backend', 'pattern', 'suite', 'reporter', 'timer' or 'workload', if several things have
    the name. device: 'cpu', 'cuda' or 'auto'. Checks that need another machine are skipped.

    Raises AssertionError with every failure, or if no check could run; ConfigError for an unknown name.
    """
    found, machine = discover(), detect(device)
    cards = tuple(
        scorecard(registry, name, found, machine) for registry in registries_with(name, found.catalogue, kind)
    )
    for card in cards:
        if not card.passed:
            failures = "\n".join(card.failures()) or "none of its features could be tried here"
            raise AssertionError(f"{card.kind} {card.name} does not conform:\n{failures}")
    return cards


def check_implementation(
    build_or_name: Build | str,
    workloads: Sequence[Workload] | None = None,
    *,
    backend: str | None = None,
    device: str = "cpu",
    takes: Takes = "heads",
    supports: Capabilities | None = None,
    deterministic: bool = False,
    seed: int = 0,
) -> tuple[Verification, ...]:
    """Build the implementation for each workload and check it against the oracle; one Verification per workload that
    ran.

    By name, the descriptor says what it takes, supports and promises; `takes`, `supports` and `deterministic` are for a
    bare build function, checked on dilated patterns if it states nothing. `backend`: the name of the dense kernel it is
    built over; if one is needed and none is named, the one of lowest priority, which supports most. Unsupported
    workloads are skipped; if only the gradient is unsupported, they run in mode forward.

    Raises AssertionError with the failing check, or when no workload is supported; ConfigError for an unknown name.
    Exceptions of building or calling pass through.
    """
    catalogue = discover().catalogue
    if isinstance(build_or_name, str):
        implementation = catalogue.implementations.get(build_or_name)
        build = load_target(implementation.target)
    else:
        build = build_or_name
        # Its target is never loaded: the function is there.
        own = "dilabench.testing:check_implementation"
        implementation = Implementation(
            "under-test", "a function", own, supports or Capabilities(), takes=takes, deterministic=deterministic
        )
    machine = Machine(device=device.partition(":")[0])
    if backend is None and implementation.uses_backend:
        backend = catalogue.preferred_backends(machine)[-1]
    descriptor = catalogue.backends.get(backend) if backend else None
    context = BuildContext(device=torch.device(device), backend=_loaded(descriptor))
    verifications = []
    for asked in odd_workloads() if workloads is None else workloads:
        workload = _supported(asked, implementation, device)
        if workload is None or (descriptor and _backend_reasons(catalogue, descriptor, workload, machine)):
            continue
        assert callable(build)
        function = build(workload, context)
        oracle = Oracle(workload, takes=implementation.takes, seed=seed, device=device)
        verification = verify(
            function, workload, takes=implementation.takes, deterministic=implementation.deterministic, oracle=oracle
        )
        if not verification.passed:
            raise AssertionError(
                f"{implementation.name} on {workload.label()}, {workload.pattern}: {summary(verification)}"
            )
        verifications.append(verification)
    if not verifications:
        raise AssertionError(f"{implementation.name} supports none of the workloads, so nothing was checked")
    return tuple(verifications)


def poisoned_memory() -> Iterator[None]:
    """NaN in uninitialised memory for the length of a test. Make it a fixture: `pytest.fixture(poisoned_memory)`."""
    with poisoned():
        yield


def random_workloads(
    dtype: DType = "float64", kind: str = "dilated", max_seq_len: int = 64
) -> SearchStrategy[Workload]:
    """A Hypothesis strategy of small workloads in mode both: any heads, mask and window over the patterns of a kind
    that its `strategy` draws."""
    from hypothesis import strategies as st

    @st.composite
    def workloads(draw: st.DrawFn) -> Workload:
        kv_heads = draw(st.integers(1, 4))
        return Workload.model_validate(
            {
                "pattern": draw(pattern_type(kind).strategy(max_seq_len)),
                "batch_size": draw(st.integers(1, 2)),
                "seq_len": draw(st.integers(1, max_seq_len)),
                "num_heads": kv_heads * draw(st.integers(1, 3)),
                "num_kv_heads": kv_heads,
                "head_dim": draw(st.sampled_from([1, 3, 8])),
                "dtype": dtype,
                "causal": draw(st.booleans()),
                "window": (draw(st.sampled_from([-1, 0, 5])), draw(st.sampled_from([-1, 0]))),
                "mode": "both",
            }
        )

    return workloads()


def _loaded(backend: Backend | None) -> LoadedBackend | None:
    return load_backend(backend) if backend else None


def _supported(workload: Workload, implementation: Implementation, device: str) -> Workload | None:
    """The workload, in mode forward if only that is supported; None if it is not supported."""
    for mode in (workload.mode, "forward"):
        trial = workload.replace(mode=mode)
        if not implementation.supports.reasons(trial, torch.device(device).type):
            return trial
    return None


def _backend_reasons(catalogue: Any, backend: Backend, workload: Workload, machine: Machine) -> tuple[str, ...]:
    case = Case(implementation="under-test", backend=backend.name, workload=workload)
    return tuple(catalogue.reasons_against_backend(case, machine))

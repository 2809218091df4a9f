"""dilabench's components, registered through the same hooks as a third party's plug-in."""

from dilabench.choice.backends import BACKENDS
from dilabench.choice.implementations import BOTH_LAYOUTS, BOTH_MERGES, IMPLEMENTATIONS
from dilabench.choice.rings import RINGS
from dilabench.patterns.registry import OWN_KINDS
from dilabench.plugins import (
    Backend,
    Capabilities,
    Implementation,
    PatternKind,
    Reporter,
    Suite,
    Timer,
    WorkloadPreset,
    hookimpl,
)
from dilabench.plugins.builtin.model_presets import MODELS
from dilabench.plugins.builtin.models import MODEL_STEPS
from dilabench.plugins.builtin.reporters import REPORTERS
from dilabench.plugins.builtin.suites import SUITES
from dilabench.plugins.builtin.timers import TIMERS
from dilabench.plugins.builtin.workloads import PRESETS
from dilabench.plugins.descriptors import ANY_PATTERN

# The benchmark's own, not the library's: it is what others are compared with.
REFERENCE = Implementation(
    "reference",
    "the formula in float64, blocked over queries: the oracle",
    "dilabench.engine.verify.oracle.reference:build",
    supports=Capabilities(
        patterns=ANY_PATTERN,
        layouts=BOTH_LAYOUTS,
        merge_grads=BOTH_MERGES,
        zero_keys=True,
        last_rows=True,
        sums=True,
    ),
    deterministic=True,
    role="oracle",
)


@hookimpl
def dilabench_register_patterns() -> list[PatternKind]:
    """Dense, dilated, and the sparse ones."""
    return list(OWN_KINDS)


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    """Ways to compute attention on one device and over ranks."""
    return [REFERENCE, *IMPLEMENTATIONS, *RINGS, *MODEL_STEPS]


@hookimpl
def dilabench_register_backends() -> list[Backend]:
    """Dense kernels."""
    return list(BACKENDS)


@hookimpl
def dilabench_register_workloads() -> list[WorkloadPreset]:
    """The named workloads and sets of the catalogue."""
    return [*PRESETS, *MODELS]


@hookimpl
def dilabench_register_suites() -> list[Suite]:
    """The suites."""
    return list(SUITES)


@hookimpl
def dilabench_register_reporters() -> list[Reporter]:
    """Renderings of a run record."""
    return list(REPORTERS)


@hookimpl
def dilabench_register_timers() -> list[Timer]:
    """Ways to take samples."""
    return list(TIMERS)

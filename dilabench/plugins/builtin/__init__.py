"""dilabench's components, registered through the same hooks as a third party's plug-in."""

from dilabench.choice.backends import BACKENDS
from dilabench.choice.implementations import IMPLEMENTATIONS
from dilabench.choice.rings import RINGS
from dilabench.patterns.registry import OWN_KINDS
from dilabench.plugins import Backend, Implementation, PatternKind, Reporter, Suite, Timer, WorkloadPreset, hookimpl
from dilabench.plugins.builtin.reporters import REPORTERS
from dilabench.plugins.builtin.suites import SUITES
from dilabench.plugins.builtin.timers import TIMERS
from dilabench.plugins.builtin.workloads import PRESETS


@hookimpl
def dilabench_register_patterns() -> list[PatternKind]:
    """Dense, dilated, and the sparse ones."""
    return list(OWN_KINDS)


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    """Ways to compute attention on one device and over ranks."""
    return [*IMPLEMENTATIONS, *RINGS]


@hookimpl
def dilabench_register_backends() -> list[Backend]:
    """Dense kernels."""
    return list(BACKENDS)


@hookimpl
def dilabench_register_workloads() -> list[WorkloadPreset]:
    """The named workloads and sets of the catalogue."""
    return list(PRESETS)


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

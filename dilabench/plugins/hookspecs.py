"""The hooks. Each returns descriptors without side effects; each is called once, when the catalogue is built."""

from collections.abc import Sequence

import pluggy

from dilabench.patterns.registry import PatternKind
from dilabench.plugins.descriptors import Backend, Implementation, Reporter, Suite, Timer, WorkloadPreset

hookspec = pluggy.HookspecMarker("dilabench")


@hookspec
def dilabench_register_patterns() -> Sequence[PatternKind]:  # type: ignore[empty-body]
    """Kinds of pattern: which query sees which key."""


@hookspec
def dilabench_register_implementations() -> Sequence[Implementation]:  # type: ignore[empty-body]
    """Ways to compute an attention workload."""


@hookspec
def dilabench_register_backends() -> Sequence[Backend]:  # type: ignore[empty-body]
    """Dense attention kernels that implementations may call."""


@hookspec
def dilabench_register_workloads() -> Sequence[WorkloadPreset]:  # type: ignore[empty-body]
    """Named workloads and sets of them, for `--config NAME`."""


@hookspec
def dilabench_register_suites() -> Sequence[Suite]:  # type: ignore[empty-body]
    """Suites for `dilabench run NAME`: each expands a request into cases."""


@hookspec
def dilabench_register_reporters() -> Sequence[Reporter]:  # type: ignore[empty-body]
    """Renderings of a run record, for `-f NAME`."""


@hookspec
def dilabench_register_timers() -> Sequence[Timer]:  # type: ignore[empty-body]
    """Ways to take time samples, each stating what it proves."""

"""How to extend dilabench: one entry point and one function.

pyproject.toml of your package:

    [project.entry-points.dilabench]
    my_attention = "my_package.bench"

my_package/bench.py:

    from dilabench.plugins import hookimpl, Implementation

    @hookimpl
    def dilabench_register_implementations():
        return [Implementation("my-attention", "what it does, in a line", "my_package.kernel:build")]

my_package/kernel.py has `build(workload, context)`, which returns the function that is verified and timed.
Everything that dilabench ships is registered through these same hooks (dilabench/plugins/builtin).
"""

import pluggy

from dilabench.patterns.registry import PatternKind
from dilabench.plugins.descriptors import (
    ANY_PATTERN,
    Backend,
    Capabilities,
    Implementation,
    Reporter,
    Suite,
    Timer,
    WorkloadPreset,
)

NAME = "dilabench"
hookimpl = pluggy.HookimplMarker(NAME)

__all__ = [
    "ANY_PATTERN",
    "NAME",
    "Backend",
    "Capabilities",
    "Implementation",
    "PatternKind",
    "Reporter",
    "Suite",
    "Timer",
    "WorkloadPreset",
    "hookimpl",
]

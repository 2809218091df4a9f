"""Device memory of a call, and the longest sequence that fits, before anything runs. No tensors and no torch here.

A separate process runs the implementation on tensors without data (`dilabench.engine.trace`); answers are cached.
"""

from dilabench.predict.memory.longest import SEVERAL, longest_that_fits
from dilabench.predict.memory.plan import (
    WITHIN,
    each_traced,
    plan_ahead,
    plan_memory,
    why_no_plan,
)
from dilabench.record import MemoryPlan

__all__ = [
    "SEVERAL",
    "WITHIN",
    "MemoryPlan",
    "each_traced",
    "longest_that_fits",
    "plan_ahead",
    "plan_memory",
    "why_no_plan",
]

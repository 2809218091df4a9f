"""How much device memory a call needs, by formula: what fits, before anything runs. No tensors.

Bytes follow from what the implementations keep alive at one time. Tests hold the formulas to measured peaks within
10 %; what has no formula is None, never a guess. Constants that do not grow with the length (a kernel's buffers per
thread, tile tables of fixed size) are left out, but for blocks of a fixed size that dominate short calls.
"""

from dilabench.predict.memory.plan import longest_that_fits, plan_memory
from dilabench.predict.memory.sizes import MemoryPlan

__all__ = ["MemoryPlan", "longest_that_fits", "plan_memory"]

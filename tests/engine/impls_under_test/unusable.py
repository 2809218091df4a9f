"""An implementation that cannot be optimized as asked."""

from dilabench.engine.call.compile_and_graph import OptimizationUnusableError


def build(workload, context):
    raise OptimizationUnusableError("a CUDA graph cannot capture it: it waits for the device")

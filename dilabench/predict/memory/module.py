"""Memory of attention inside a module: q, k and v are projected from embeddings, and the result is projected, too."""

from dataclasses import replace

from dilabench.predict.memory.sizes import MemoryPlan, Sizes
from dilabench.workload.spec import DTYPE_BYTES, Workload


def projected(core: MemoryPlan, workload: Workload) -> MemoryPlan:
    """The plan of a module around attention whose plan is `core`; its workload is that of the attention."""
    sizes = Sizes.of(workload)
    output_weights = output_weight_bytes(workload)
    parameters = parameter_bytes(workload)
    if workload.mode == "forward":
        # After the attention its out and the projected result stand beside q, k and v.
        workspace = sizes.gradients + max(core.workspace_bytes, 2 * sizes.q)
        return replace(core, inputs_bytes=round(sizes.q), parameters_bytes=parameters, workspace_bytes=round(workspace))
    # The result that the user holds, and the gradient of the attention's out.
    workspace = core.workspace_bytes + 2 * sizes.q + output_weights
    return replace(
        core,
        inputs_bytes=round(2 * sizes.q),
        parameters_bytes=parameters,
        saved_bytes=core.saved_bytes + round(sizes.gradients),
        workspace_bytes=round(workspace),
    )


def parameter_bytes(workload: Workload) -> int:
    """Weights and biases of the four projections."""
    item = DTYPE_BYTES[workload.dtype]
    width, key_width = workload.num_heads * workload.head_dim, workload.num_kv_heads * workload.head_dim
    return 2 * output_weight_bytes(workload) + 2 * width * key_width * item + 2 * (width + key_width) * item


def output_weight_bytes(workload: Workload) -> int:
    """Weights of the output projection."""
    width = workload.num_heads * workload.head_dim
    return width * width * DTYPE_BYTES[workload.dtype]

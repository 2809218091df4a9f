"""NSA's sum of three attentions, with drawn gates: for tests of kernels on a GPU."""

from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls import native_sparse
from dilabench.patterns.native_sparse import NativeSparsePattern
from dilabench.workload.spec import Workload


def gated_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D], causal; differentiable."""
    batch, length, heads, dim = q.shape
    workload = Workload(
        pattern=NativeSparsePattern.examples()[0],
        batch_size=batch,
        seq_len=length,
        num_heads=heads,
        num_kv_heads=k.shape[2],
        head_dim=dim,
        dtype=str(q.dtype).removeprefix("torch."),
        causal=True,
    )
    return native_sparse.build(workload, BuildContext(device=q.device, backend=None))(q, k, v)

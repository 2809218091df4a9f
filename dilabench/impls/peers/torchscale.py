"""`torchscale`: the DilatedAttention of LongNet, LongViT and Prov-GigaPath, from their authors' own repository.

Its own forward pass, with the identity in place of the projections, and neither norm nor xPos. Read at the head of its
main branch, November 2026, which GigaPath's copy equals in this module.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls.peers import flash_attn_stand_in
from dilabench.impls.peers.private_import import imported
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload

COMPONENT = "torchscale.component"
INSTALL = "clone it, and name the clone in DILABENCH_PEERS"


class TorchscaleAttention(nn.Module):
    """out [B, N, H, D] of q, k, v [B, N, H, D] by torchscale's module; differentiable as torchscale is.

    Packed sequences [T, H, D], which it does not support, are computed one after another.
    """

    def __init__(self, workload: Workload, backend: LoadedBackend) -> None:
        super().__init__()
        pattern = DilatedPattern.of(workload)
        arguments = SimpleNamespace(
            segment_length=list(pattern.segment_lengths),
            dilated_ratio=list(pattern.dilation_rates),
            flash_attention=True,
            seq_parallel=False,
            multiway=False,
            xpos_rel_pos=False,
        )
        project = imported(f"{COMPONENT}.dilated_attention", *kernel_of(backend), install=INSTALL)
        # Without data: of its parameters none is used.
        with torch.device("meta"):
            module = project.DilatedAttention(
                arguments, workload.num_heads * workload.head_dim, workload.num_heads, self_attention=True
            )
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(module, projection, nn.Identity())
        self._module, self._causal = module, workload.causal
        self._packed = workload.sequences if workload.layout == "packed" else ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Differentiable."""
        if self._packed:
            parts = (self._attend(*(x[None, start:stop] for x in (q, k, v))) for start, stop in self._packed)
            return torch.cat([part[0] for part in parts])
        return self._attend(q, k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self._module(*(x.flatten(2) for x in (q, k, v)), is_causal=self._causal)[0]
        return out.view_as(q)


def build(workload: Workload, context: BuildContext) -> TorchscaleAttention:
    """Raises ModuleNotFoundError where torchscale, or einops, is not there."""
    return TorchscaleAttention(workload, context.require_backend())


def kernel_of(backend: LoadedBackend) -> tuple[ModuleType, ...]:
    """The replacement of torchscale's choice of a kernel: none over flash-attn itself, else the backend.

    torchscale chooses flash-attn or xformers, and has no kernel for a CPU.
    """
    if backend.name == flash_attn_stand_in.ITSELF:
        return ()
    attend = flash_attn_stand_in.stand_in(backend).flash_attn_func

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float = 0.0,
        bias: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
    ) -> tuple[Any, Any]:
        assert bias is None
        out, lse, _ = attend(q, k, v, dropout, softmax_scale, is_causal, return_attn_probs=True)
        return out, lse

    module = ModuleType(f"{COMPONENT}.flash_attention")
    module.__dict__.update(flash_attn_func=flash_attn_func)
    return (module,)

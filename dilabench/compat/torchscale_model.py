"""The step of torchscale's LongNet encoder or decoder with one attention, as a module: losses, or hidden states."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dilabench.compat.step_parts import SEED, Values, drawn_targets, losses
from dilabench.compat.torchscale import DilatedAttention, patch
from dilabench.contracts import BuildContext
from dilabench.impls.peers.private_import import imported_together
from dilabench.impls.peers.torchscale import COMPONENT, INSTALL, kernel_of
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.model import ITSELF
from dilabench.workload.spec import Workload

# Modules that torchscale imports for what these models do not use: sharding of parameters, and drop path.
UNUSED = {"fairscale.nn": ("checkpoint_wrapper", "wrap"), "timm.models.layers": ("drop_path",)}
ROLES = {False: ("encoder", "LongNetEncoder", "EncoderConfig"), True: ("decoder", "LongNetDecoder", "DecoderConfig")}


class TorchscaleStep(nn.Module):
    """A step of an encoder, or with a causal mask of a decoder, on embeddings [B, N, E]: the loss of each token over
    the model's vocabulary, [B, N, 1] in float32, or in mode `forward` the last hidden states [B, N, E].

    The target of each token is drawn once. Embeddings and positions are not part of the step, a linear head is.
    """

    targets: Tensor

    def __init__(self, model: nn.Module, workload: Workload, device: torch.device) -> None:
        super().__init__()
        assert workload.model is not None
        self.model, self._workload = model, workload
        self.head = nn.Linear(workload.model.width, workload.model.vocabulary, bias=False, device=device)
        self.register_buffer("targets", drawn_targets(workload).to(device), persistent=False)
        self.parts = [(slice(None), slice(0, workload.seq_len))]

    def forward(self, x: Tensor, _key: Tensor | None = None, _value: Tensor | None = None) -> Tensor:
        """The result for all tokens."""
        if self._workload.causal:
            # Of the tokens it reads their number.
            hidden = self.model(x[..., 0], token_embeddings=x, features_only=True)[0]
        else:
            hidden = self.model(None, token_embeddings=x, features_only=True)["encoder_out"]
        if self._workload.mode == "forward":
            return hidden
        return losses(self.head(hidden), self.targets, x.dtype)

    def alone(self, x: Tensor, _items: slice, _tokens: slice) -> Tensor:
        """The result for all tokens: there is neither padding nor packing."""
        return self(x)


class WithoutAttention(DilatedAttention):
    """torchscale's module with values for attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """([B, N, E], None)."""
        projected = ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        heads = (projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for projection, x in projected)
        out = Values.apply(*heads).flatten(-2)
        return self.out_proj(out if self.inner_attn_ln is None else self.inner_attn_ln(out)), None


def build_torchscale(workload: Workload, context: BuildContext) -> TorchscaleStep:
    """torchscale's own attention, through flash-attn. Raises ModuleNotFoundError if torchscale or einops is missing."""
    return _built(workload, context.device, kernel_of(context.require_backend()))


def build_plain(workload: Workload, context: BuildContext) -> TorchscaleStep:
    """torchscale's own attention over plain products of all scores of a segment. Raises as `build_torchscale`."""
    return _built(workload, context.device, _kernel(_plain))


def build_dilabench(workload: Workload, context: BuildContext) -> TorchscaleStep:
    """dilabench's attention, by `patch`. Raises as `build_torchscale`."""
    step = _built(workload, context.device, _kernel(None))
    patch(step)
    return step


def build_identity(workload: Workload, context: BuildContext) -> TorchscaleStep:
    """Values for attention. Raises as `build_torchscale`."""
    step = build_dilabench(workload, context)
    for part in step.modules():
        if isinstance(part, DilatedAttention):
            part.__class__ = WithoutAttention
    return step


def _built(workload: Workload, device: torch.device, kernel: tuple[ModuleType, ...]) -> TorchscaleStep:
    """The same parameters for every attention on a kind of device."""
    shape, pattern = workload.model, DilatedPattern.of(workload)
    assert shape is not None
    role, model_name, config_name = ROLES[workload.causal]
    modules = ("torchscale.model.LongNet", "torchscale.architecture.config")
    longnet, config = imported_together(modules, *kernel, *_unused(), install=INSTALL)
    # A window of each token alone is a segment of one token.
    segments = pattern.segment_lengths if workload.window != ITSELF else (1,)
    sizes = {
        "embed_dim": shape.width,
        "attention_heads": workload.num_heads,
        "ffn_embed_dim": shape.inner or 4 * shape.width,
        "layers": shape.layers,
    }
    args = getattr(config, config_name)(
        **{f"{role}_{name}": size for name, size in sizes.items()},
        # As text, which torchscale evaluates.
        segment_length=str(list(segments)),
        dilated_ratio=str(list(pattern.dilation_rates[: len(segments)])),
        flash_attention=True,
        subln=True,
        vocab_size=-1,
        no_output_layer=True,
        **dict(shape.options),
    )
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.device(device):
        torch.manual_seed(SEED)
        step = TorchscaleStep(getattr(longnet, model_name)(args), workload, device)
    return step.to(getattr(torch, workload.dtype)).train(workload.mode != "forward")


def _kernel(attend: Callable[..., Any] | None) -> tuple[ModuleType]:
    """The replacement of torchscale's choice of a kernel."""
    module = ModuleType(f"{COMPONENT}.flash_attention")
    module.__dict__.update(flash_attn_func=attend)
    return (module,)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _dropout: float = 0.0,
    _bias: None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [B, N, H, D] and lse [B, H, N] of q, k, v [B, N, H, D], scores at least in float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    scores = query.to(wide) @ key.to(wide).mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1).to(value.dtype) @ value
    return out.transpose(1, 2).contiguous(), scores.detach().logsumexp(-1)


def _unused() -> list[ModuleType]:
    """Packages with functions that refuse to be called."""
    modules: dict[str, ModuleType] = {}
    for path, names in UNUSED.items():
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            modules.setdefault(name, ModuleType(name))
        modules[path].__dict__.update(dict.fromkeys(names, _refuse))
    return [*modules.values()]


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a step of torchscale's models has neither drop path nor sharded or recomputed layers")

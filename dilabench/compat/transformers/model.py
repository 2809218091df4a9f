"""The step of a model of transformers with one attention, as a module: losses of all tokens, last hidden states, or
logits of tokens over a cache.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dilabench.choice.descriptors import load_target
from dilabench.compat.step_parts import SEED, Values, drawn_targets, losses
from dilabench.compat.transformers import register
from dilabench.contracts import BuildContext
from dilabench.impls.visible_keys import multiplicity
from dilabench.patterns.dense import DENSE
from dilabench.workload.model import ITSELF, SOFTCAP, heads_of
from dilabench.workload.spec import Workload
from dilabench.workload.visibility import alike_heads, hides_nothing

NO_ATTENTION, BY_ROWS = "no_attention", "eager_by_rows"
# Queries whose scores are held at a time.
ROWS = 512


class ModelStep(nn.Module):
    """A step of a model on embeddings [B, N, E], packed [T, E]: the loss of each token, [B, N, 1] in float32, or in
    mode `forward` the last hidden states [B, N, E], for which the cache is filled and the logits of the last token are
    computed. Packed documents fill no cache.

    With `query_len` M, of embeddings [B, M, E]: the logits [B, M, V] of tokens that are generated one after another,
    behind the `prefix` [B, N - M, E], whose cache the first call fills. In a padded batch rows of padding are 0.

    Targets and the prefix are drawn once. The table of embeddings is not part of the step, the head is.
    """

    targets: Tensor
    bounds: Tensor
    places: Tensor
    prefix: Tensor
    seen: Tensor

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        super().__init__()
        assert workload.model is not None
        self.model = model
        self._workload = workload
        self.register_buffer("targets", drawn_targets(workload).to(model.device), persistent=False)
        self._cache: Any = None
        if workload.query_len is not None:
            drawn = torch.Generator(model.device).manual_seed(SEED)
            size = workload.batch_size, workload.first_row, workload.model.width
            prefix = torch.randn(size, generator=drawn, device=model.device, dtype=model.dtype)
            self.register_buffer("prefix", prefix, persistent=False)
        if workload.model.lengths is not None:
            seen = torch.zeros(workload.batch_size, workload.seq_len, dtype=torch.int64)
            for items, tokens in self.parts:
                seen[items, tokens] = 1
            self.register_buffer("seen", seen.to(model.device), persistent=False)
            # As `generate` of transformers numbers them; padding has any number.
            self.register_buffer("places", (self.seen.cumsum(1) - 1).clamp_min(0), persistent=False)
        if workload.cu_seqlens is not None:
            bounds = torch.tensor(workload.cu_seqlens, dtype=torch.int32, device=model.device)
            self.register_buffer("bounds", bounds, persistent=False)
            lengths = [end - start for start, end in workload.sequences]
            places = torch.cat([torch.arange(length) for length in lengths])[None].to(model.device)
            self.register_buffer("places", places, persistent=False)
            self._longest = max(lengths)

    @property
    def parts(self) -> list[tuple[slice, slice]]:
        """Items of the batch and tokens of each sequence, that of padding excluded; without padding of all items."""
        shape, length = self._workload.model, self._workload.seq_len
        if shape is None or shape.lengths is None:
            return [(slice(None), slice(*bounds)) for bounds in self._workload.sequences]
        left = self._workload.mode == "forward"
        ends = [slice(length - tokens, length) if left else slice(tokens) for tokens in shape.lengths]
        return [(slice(item, item + 1), tokens) for item, tokens in enumerate(ends)]

    def forward(self, x: Tensor, _key: Tensor | None = None, _value: Tensor | None = None) -> Tensor:
        """The result for all tokens; packed documents do not see each other."""
        if self._workload.query_len is not None:
            return self._generated(x)
        if self._workload.layout != "packed":
            out = self._result(x, self.targets, **self._padding(0, x.shape[1]))
            return out if self._is_whole else out.masked_fill(self.seen[..., None] == 0, 0.0)
        # Copies, as each batch has its own.
        bounds = self.bounds.clone()
        documents = {
            "position_ids": self.places.clone(),
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": self._longest,
            "max_length_k": self._longest,
        }
        return self._result(x[None], self.targets, **documents)[0]

    def alone(self, x: Tensor, items: slice, tokens: slice) -> Tensor:
        """The result for one of the `parts` of x [B, M, E], alone: without cache, padding and other documents."""
        workload, rows = self._workload, x.shape[1]
        assert workload.model is not None
        if x.dtype == torch.float64:
            _without_grouped_products(self.model)
        if workload.query_len is not None:
            x = torch.cat([self.prefix, x], 1)
        x = x[items, tokens]
        options: dict[str, Any] = {}
        if self.model.config._attn_implementation == "eager" and not hides_nothing(workload):
            shape = {"batch_size": 1, "seq_len": x.shape[1], "layout": "padded", "cu_seqlens": None, "query_len": None}
            model = workload.model.model_copy(update={"lengths": None})
            options["attention_mask"] = _log_counts(workload.replace(**shape, model=model)).to(x.device, x.dtype)
        if workload.query_len is not None:
            logits = self.model(inputs_embeds=x, use_cache=False, logits_to_keep=rows, **options).logits
            return logits[:, -rows:].to(x.dtype)
        return self._result(x, self.targets[items, tokens], **options)

    @property
    def _is_whole(self) -> bool:
        """Whether the batch has no padding."""
        return self._workload.model is None or self._workload.model.lengths is None

    def _padding(self, start: int, stop: int) -> dict[str, Tensor]:
        """The mask and positions of tokens from `start` on, over a cache of those before; none without padding."""
        if self._is_whole:
            return {}
        return {"attention_mask": self.seen[:, :stop], "position_ids": self.places[:, start:stop]}

    def start(self, prefix: Tensor) -> None:
        """Continue another prefix [B, N - M, E]."""
        self.prefix, self._cache = prefix, None

    def _generated(self, x: Tensor) -> Tensor:
        """Logits [B, M, V] of the tokens [B, M, E] that follow the prefix, a token for each call of the model."""
        if self._cache is None:
            padding = self._padding(0, self._workload.first_row)
            self._cache = self.model.base_model(inputs_embeds=self.prefix, use_cache=True, **padding).cache
        # A cache grows into new tensors, so that a copy of its layers leaves it as it is.
        past = copy(self._cache)
        past.layers = [copy(layer) for layer in past.layers]
        logits = []
        for place, token in enumerate(x.split(1, 1), self._workload.first_row):
            padding = self._padding(place, place + 1)
            logits.append(self.model(inputs_embeds=token, cache=past, use_cache=True, **padding).logits)
        return (logits[0] if len(logits) == 1 else torch.cat(logits, 1)).to(x.dtype)

    def _result(self, x: Tensor, targets: Tensor, **options: Any) -> Tensor:
        if self._workload.mode == "forward":
            # Not of packed documents, and not below a mask for every pair.
            fills_cache = self._workload.layout != "packed" and getattr(options.get("attention_mask"), "ndim", 2) == 2
            hidden: Tensor = self.model.base_model(inputs_embeds=x, use_cache=fills_cache, **options)[0]
            # The rest of the time to the first token.
            self.model.get_output_embeddings()(hidden[:, -1:])
            return hidden
        logits = self.model(inputs_embeds=x, use_cache=False, **options).logits
        return losses(logits, targets, x.dtype)

    def checkpointed(self) -> None:
        """Compute each layer again in the backward pass, for less memory."""
        self.model.train()
        self.model.activation_checkpointing_enable()


def build_eager(workload: Workload, context: BuildContext) -> ModelStep:
    """With eager attention, which takes any pattern as a mask for every pair."""
    return _built(workload, context, "eager")


def build_eager_rows(workload: Workload, context: BuildContext) -> ModelStep:
    """With eager attention of some queries at a time, for lengths at which all scores take too much memory."""
    ALL_ATTENTION_FUNCTIONS.register(BY_ROWS, _by_rows)
    ALL_MASK_ATTENTION_FUNCTIONS.register(BY_ROWS, lambda *_, **__: None)
    return _built(workload, context, BY_ROWS)


def build_sdpa(workload: Workload, context: BuildContext) -> ModelStep:
    """With torch's scaled_dot_product_attention."""
    return _built(workload, context, "sdpa")


def build_flash2(workload: Workload, context: BuildContext) -> ModelStep:
    """With FlashAttention 2."""
    return _built(workload, context, "flash_attention_2")


def build_flex(workload: Workload, context: BuildContext) -> ModelStep:
    """With torch's FlexAttention."""
    return _built(workload, context, "flex_attention")


def build_dilabench(workload: Workload, context: BuildContext) -> ModelStep:
    """With dilabench's attention."""
    if workload.pattern == DENSE:
        return _built(workload, context, register())
    return _built(workload, context, register(f"dilabench_{workload.pattern.kind}", pattern=workload.pattern))


def build_identity(workload: Workload, context: BuildContext) -> ModelStep:
    """With values for attention, which is what a window of each token alone gives."""
    ALL_ATTENTION_FUNCTIONS.register(NO_ATTENTION, _values)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NO_ATTENTION, lambda *_, **__: None)
    return _built(workload, context, NO_ATTENTION)


def _by_rows(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """out [B, M, H, D] of causal attention, M queries that are the last of N tokens, scores at least in float32."""
    rows, length = query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v

    outs = []
    for start in range(0, rows, ROWS):
        q = query[:, :, start : start + ROWS]
        places = torch.arange(q.shape[2], device=q.device) + (length - rows + start)
        stop = length - rows + start + q.shape[2]
        first = 0 if sliding_window is None else max(0, stop - q.shape[2] - sliding_window + 1)
        distance = places[:, None] - torch.arange(first, stop, device=q.device)
        visible = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
        # Each piece is computed again in the backward pass.
        outs.append(checkpoint(attend, q, key[:, :, first:stop], value[:, :, first:stop], visible, use_reentrant=False))
    return torch.cat(outs, 2).transpose(1, 2).contiguous(), None


def _values(_module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return Values.apply(query, key, value), None


def _log_counts(workload: Workload) -> Tensor:
    """[1, H, N, N] to be added to scores: the logarithm of how often each row sees each key."""
    rows = torch.arange(workload.seq_len)
    counts = torch.empty(1, workload.num_heads, workload.seq_len, workload.seq_len, dtype=torch.float64)
    for heads in alike_heads(workload):
        counts[:, heads] = multiplicity(workload, heads[0], rows).double().log()
    return counts


def _built(workload: Workload, context: BuildContext, attention: str) -> ModelStep:
    """The same parameters for every attention on a kind of device. Raises ValueError for a model of other heads."""
    shape = workload.model
    assert shape is not None
    dtype = getattr(torch, workload.dtype)
    devices = [context.device] if context.device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=context.device.type if devices else "cuda"):
        torch.manual_seed(SEED)
        with torch.device(context.device):
            if ":" in shape.source:
                model = load_target(shape.source)()
                model.set_attn_implementation(attention)
            else:
                options = {"dtype": dtype, "attn_implementation": attention}
                model = AutoModelForCausalLM.from_config(_config(workload), **options)
    model = model.to(context.device, dtype)
    _check(model, workload)
    # Embeddings are given.
    model.set_input_embeddings(nn.Identity())
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if workload.window == ITSELF and isinstance(getattr(part, "sinks", None), nn.Parameter):
            # A sink would take a share of the weight.
            nn.init.constant_(part.sinks, torch.finfo(dtype).min)
    if dtype == torch.float64:
        _without_grouped_products(model)
    model.train(workload.mode != "forward")
    return ModelStep(model, workload)


def _without_grouped_products(model: PreTrainedModel) -> None:
    """Compute experts one by one: torch groups no products in float64."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def _config(workload: Workload) -> PretrainedConfig:
    shape = workload.model
    assert shape is not None
    # Scores and hidden states of about 1, so that a wrong key shows.
    usual = {"initializer_range": shape.width**-0.5, "max_position_embeddings": workload.seq_len}
    if "/" in shape.source:
        config = AutoConfig.from_pretrained(shape.source, local_files_only=True)
        config.update({**usual, **dict(shape.options), "num_hidden_layers": shape.layers})
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: shape.layers]
        return config
    heads: dict[str, Any] = {
        "num_attention_heads": workload.num_heads,
        "num_key_value_heads": workload.num_kv_heads,
        "head_dim": workload.head_dim,
    }
    if workload.softcap is not None:
        heads[SOFTCAP] = workload.softcap
    return AutoConfig.for_model(shape.source, **{**usual, **heads, **shape.config})


def _check(model: PreTrainedModel, workload: Workload) -> None:
    """Raise ValueError unless the model has the heads and sizes of the workload; cut its layers to their number."""
    shape, config = workload.model, model.config
    assert shape is not None
    config.attention_dropout = 0.0
    layers = getattr(model.base_model, "layers", None)
    if layers is not None and len(layers) > shape.layers:
        model.base_model.layers = layers[: shape.layers]
        config.num_hidden_layers = shape.layers
    found = heads_of(config.to_dict()) | {"width": config.hidden_size, "vocabulary": config.vocab_size}
    given = {"width": shape.width, "vocabulary": shape.vocabulary}
    given |= {name: getattr(workload, name) for name in ("num_heads", "num_kv_heads", "head_dim", "softcap")}
    wrong = [f"{name} {given[name]} where it has {size}" for name, size in found.items() if given[name] != size]
    if wrong:
        raise ValueError(f"model {shape.name}: {', '.join(wrong)}; give its own")
    if not model._supports_sdpa and shape.sdpa is not False:
        raise ValueError(f"model {shape.name}: transformers has no sdpa attention for it; give sdpa=false to its model")

"""The model around an attention, as data: enough to build it with random weights from a seed. No torch."""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from dilabench.validation import Extended

# Fields of a configuration of transformers, by the fields of a ModelShape.
CONFIG_FIELDS = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
}
CONFIG_FILE = "config.json"
SLIDING_WINDOW, SOFTCAP = "sliding_window", "attn_logit_softcapping"

# The mode of a request for two workloads: a prefill and the tokens after it.
GENERATE = "generate"
# The window in which each token sees itself alone.
ITSELF = (0, 0)


class ModelShape(Extended):
    """A model whose step is computed, with the heads of its workload.

    source: a model type of transformers ('llama'), a folder with a `config.json`, or 'module:function' of a function
    without arguments that returns a causal model of transformers. name: as tables show it. width: channels of its
    embeddings. inner: channels of its feed-forward layers. options: further fields of its configuration. sdpa: False if
    transformers refuses to compute it with torch's scaled_dot_product_attention, as for sinks and capped scores.
    project: the public project that builds it, None for transformers: 'torchscale' builds LongNet's encoder, or with a
    causal mask its decoder, whose source is a word for it.
    lengths: tokens of each sequence of a padded batch; padding is behind them in training, else before them.
    """

    later: ClassVar = ("sdpa", "lengths", "project")
    source: str
    name: str = ""
    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    vocabulary: int = Field(ge=2)
    inner: int | None = Field(default=None, ge=1)
    options: tuple[tuple[str, str | float | int | bool | None], ...] = ()
    sdpa: bool | None = None
    project: str | None = None
    lengths: tuple[Annotated[int, Field(ge=1)], ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        """Text is a source. A folder's configuration gives the sizes; a model without a name has its source's."""
        fields = {"source": data} if isinstance(data, str) else data
        if not isinstance(fields, dict) or not isinstance(fields.get("source"), str):
            return fields
        source = fields["source"]
        if "/" in source:
            config = config_of(source)
            window = {SLIDING_WINDOW: config[SLIDING_WINDOW]} if config.get(SLIDING_WINDOW) else {}
            fields = {"options": window, **_sizes(config), **fields}
        options = fields.get("options", ())
        pairs = tuple(sorted(options.items())) if isinstance(options, dict) else options
        return {**fields, "options": pairs, "name": fields.get("name") or source.rstrip("/").rpartition("/")[2]}

    @property
    def config(self) -> dict[str, Any]:
        """The fields of its configuration in transformers, without the fields of the heads."""
        sizes = {theirs: getattr(self, ours) for ours, theirs in CONFIG_FIELDS.items()}
        return {name: size for name, size in sizes.items() if size is not None} | dict(self.options)

    def check_lengths(self, batch_size: int, seq_len: int, queries: int, *, packed: bool) -> None:
        """Raise ValueError if the lengths do not fit a batch, of which `queries` last rows are queries, 0 for all."""
        if self.lengths is None:
            return
        least = queries + 1
        if packed or len(self.lengths) != batch_size or min(self.lengths) < least:
            raise ValueError(
                f"lengths {list(self.lengths)} of a padded batch must be one for each of its {batch_size} sequences, "
                f"at least {least}; packed ones are cu_seqlens"
            )
        if max(self.lengths) > seq_len:
            raise ValueError(f"lengths {list(self.lengths)} are of at most seq_len={seq_len} tokens; give a longer one")

    def small(self, layers: int, window: int) -> "ModelShape":
        """The model with at most this many layers, and this window in the layers that have one."""
        options = tuple(
            (name, min(value, window)) if name == SLIDING_WINDOW and isinstance(value, int) else (name, value)
            for name, value in self.options
        )
        return self.model_copy(update={"layers": min(layers, self.layers), "options": options})


def config_of(folder: str) -> dict[str, Any]:
    """The configuration of a model in a folder. Raises ValueError if there is none."""
    try:
        config = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"model {folder!r} has no readable {CONFIG_FILE}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model {folder!r}: {CONFIG_FILE} holds no fields")
    return config


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {ours: config[theirs] for ours, theirs in CONFIG_FIELDS.items() if theirs in config}


def heads_of(config: dict[str, Any]) -> dict[str, Any]:
    """num_heads, num_kv_heads, head_dim and softcap of a configuration that has heads."""
    heads = config.get("num_attention_heads")
    if not heads:
        return {}
    dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    sizes = {"num_heads": heads, "num_kv_heads": config.get("num_key_value_heads") or heads, "head_dim": dim}
    return sizes | {"softcap": config.get(SOFTCAP)}


def with_heads(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a workload with the heads of its model's folder, if it has one. Raises ValueError as `config_of`."""
    model = fields["model"]
    source = model.get("source") if isinstance(model, dict) else getattr(model, "source", model)
    return {**heads_of(config_of(source)), **fields} if isinstance(source, str) and "/" in source else fields

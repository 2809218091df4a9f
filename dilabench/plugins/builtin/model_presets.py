"""The named workloads of whole models, with random weights, for suite `model`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dilabench.plugins.builtin.workloads import AS_TORCHSCALE, GIGAPATH_SEGMENTS, LONGNET_SEGMENTS, preset
from dilabench.plugins.descriptors import WorkloadPreset


def _whole_model(
    name: str,
    summary: str,
    source: str,
    shape: tuple[int, int, int, int, int],
    *,
    dtype: str = "bfloat16",
    fields: Mapping[str, Any] = MappingProxyType({}),
    **sizes: Any,
) -> WorkloadPreset:
    """A step of a whole model, around attention of this shape (B, H, K, D, N) with these further fields."""
    model = {"source": source, "name": name, **sizes}
    return preset(name, summary, shape, **{"dtype": dtype, "mode": "both", "model": model, **fields})


TIED = {"tie_word_embeddings": True}
LONGNET: dict[str, Any] = {"pattern": "dilated", **AS_TORCHSCALE}
# Of the presets for a CPU.
TINY_MODEL: dict[str, Any] = {"dtype": "auto", "layers": 2, "width": 64}
# Rotary positions are scaled by the length for which it was made.
GPT_OSS = {"sliding_window": 128, "max_position_embeddings": 131072}
MODELS: tuple[WorkloadPreset, ...] = (
    _whole_model(
        "llama_tiny",
        "a Llama of two layers, for a CPU",
        "llama",
        (1, 4, 2, 16, 512),
        **TINY_MODEL,
        inner=128,
        vocabulary=512,
    ),
    _whole_model(
        "llama_400m",
        "a Llama of 400 M parameters",
        "llama",
        (1, 16, 4, 64, 8192),
        layers=24,
        width=1024,
        inner=4096,
        vocabulary=32000,
    ),
    _whole_model(
        "llama_1b",
        "Llama 3.2 1B",
        "llama",
        (1, 32, 8, 64, 8192),
        layers=16,
        width=2048,
        inner=8192,
        vocabulary=128256,
        options=TIED,
    ),
    _whole_model(
        "qwen3_600m",
        "Qwen3 0.6B",
        "qwen3",
        (1, 16, 8, 128, 8192),
        layers=28,
        width=1024,
        inner=3072,
        vocabulary=151936,
        options=TIED,
    ),
    # openai/gpt-oss-20b. Each token goes through four experts, as there, but there are no others: which of 32 are taken
    # would change with the rounding of attention.
    _whole_model(
        "gpt_oss_layer",
        "two layers of gpt-oss 20B, with sinks, one with a window of 128",
        "gpt_oss",
        (1, 64, 8, 64, 8192),
        layers=2,
        width=2880,
        inner=2880,
        vocabulary=201088,
        options={**GPT_OSS, "num_local_experts": 4, "num_experts_per_tok": 4},
        sdpa=False,
    ),
    _whole_model(
        "gpt_oss_tiny",
        "two small layers of gpt-oss, for a CPU",
        "gpt_oss",
        (1, 4, 2, 16, 512),
        **TINY_MODEL,
        inner=64,
        vocabulary=512,
        options={**GPT_OSS, "num_local_experts": 2, "num_experts_per_tok": 2},
        sdpa=False,
    ),
    # google/gemma-2-2b.
    _whole_model(
        "gemma2_layer",
        "two layers of Gemma 2 2B, scores capped, one with a window of 4096",
        "gemma2",
        (1, 8, 4, 256, 8192),
        fields={"softcap": 50.0},
        layers=2,
        width=2304,
        inner=9216,
        vocabulary=256000,
        options={"sliding_window": 4096},
        sdpa=False,
    ),
    _whole_model(
        "gemma2_tiny",
        "two small layers of Gemma 2, for a CPU",
        "gemma2",
        (1, 4, 2, 16, 512),
        fields={"softcap": 50.0},
        **TINY_MODEL,
        inner=128,
        vocabulary=512,
        options={"sliding_window": 128, "query_pre_attn_scalar": 16},
        sdpa=False,
    ),
    # gigapath_slide_enc12l768d. Its head is one of two classes for each tile.
    _whole_model(
        "gigapath_encoder",
        "Prov-GigaPath's slide encoder, 12 layers of torchscale",
        "longnet",
        (1, 16, 16, 48, 10001),
        dtype="float16",
        fields={
            **LONGNET,
            "causal": False,
            "segment_lengths": GIGAPATH_SEGMENTS,
            "dilation_rates": (1, 2, 4, 8, 16),
        },
        project="torchscale",
        layers=12,
        width=768,
        inner=3072,
        vocabulary=2,
    ),
    _whole_model(
        "longnet_decoder",
        "LongNet's language model, 12 layers of torchscale",
        "longnet",
        (1, 12, 12, 64, 32768),
        fields={**LONGNET, "segment_lengths": LONGNET_SEGMENTS, "dilation_rates": (1, 2, 4, 8, 16)},
        project="torchscale",
        layers=12,
        width=768,
        inner=3072,
        vocabulary=64000,
    ),
    _whole_model(
        "longnet_tiny",
        "two small layers of torchscale's LongNet, for a CPU",
        "longnet",
        (1, 4, 4, 16, 512),
        fields={**LONGNET, "segment_lengths": (64, 256), "dilation_rates": (1, 2)},
        project="torchscale",
        **TINY_MODEL,
        inner=128,
        vocabulary=128,
    ),
)

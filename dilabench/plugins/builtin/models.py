"""Models by attention, and the models that have a name, as data."""

from typing import Any

from dilabench.choice.implementations import BOTH_LAYOUTS, BOTH_MERGES, DENSE
from dilabench.plugins.descriptors import ANY_PATTERN, Capabilities, Implementation, WorkloadPreset
from dilabench.workload.spec import UNBOUNDED, Workload

MODES = frozenset({"forward", "both"})
# What each token of a window of itself sees.
ITSELF = (0, 0)
_DENSE = Capabilities(patterns=DENSE, layouts=BOTH_LAYOUTS, modes=MODES, window=False, causal=frozenset({True}))


def _without_window(workload: Workload) -> str | None:
    return None if workload.window == UNBOUNDED else f"window {workload.window}: the model's own layers say theirs"


def _only_itself(workload: Workload) -> str | None:
    return None if workload.window == ITSELF else "it has no attention, so that it is what a window of 0,0 gives"


def _step(attention: str, summary: str, builder: str, supports: Capabilities = _DENSE, **fields: Any) -> Implementation:
    return Implementation(
        f"{attention}-model",
        summary,
        f"dilabench.compat.transformers.model:{builder}",
        supports=supports,
        requires=("transformers>=5.17", *fields.pop("requires", ())),
        takes="model",
        **fields,
    )


MODEL_STEPS: tuple[Implementation, ...] = (
    _step(
        "eager",
        "a model's step with eager attention of transformers, a mask for every pair: what others are compared with",
        "build_eager",
        Capabilities(patterns=ANY_PATTERN, layouts=BOTH_LAYOUTS, modes=MODES, merge_grads=BOTH_MERGES),
        role="oracle",
    ),
    _step("sdpa", "a model's step with torch's scaled_dot_product_attention", "build_sdpa", role="plain"),
    _step(
        "flash2",
        "a model's step with FlashAttention 2 in transformers (`flash_attention_2`)",
        "build_flash2",
        Capabilities(
            patterns=DENSE,
            layouts=BOTH_LAYOUTS,
            modes=MODES,
            window=False,
            causal=frozenset({True}),
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"float16", "bfloat16"}),
        ),
        requires=("cuda>=sm80", "flash_attn>=2.3"),
    ),
    _step(
        "flex",
        "a model's step with torch's FlexAttention in transformers (`flex_attention`)",
        "build_flex",
        Capabilities(
            patterns=DENSE,
            layouts=BOTH_LAYOUTS,
            modes=MODES,
            window=False,
            causal=frozenset({True}),
            devices=frozenset({"cuda"}),
        ),
        requires=("cuda>=sm80", "triton"),
        compiles=True,
    ),
    _step(
        "dilabench",
        "a model's step with dilabench's attention, of any pattern",
        "build_dilabench",
        Capabilities(
            patterns=ANY_PATTERN,
            layouts=BOTH_LAYOUTS,
            modes=MODES,
            causal=frozenset({True}),
            check=_without_window,
        ),
    ),
    _step(
        "identity",
        "a model's step with values instead of attention: what remains of it",
        "build_identity",
        Capabilities(patterns=DENSE, layouts=BOTH_LAYOUTS, modes=MODES, causal=frozenset({True}), check=_only_itself),
        role="yardstick",
    ),
)


def _model(
    name: str,
    summary: str,
    shape: tuple[int, int, int, int, int],
    sizes: tuple[str, int, int, int, int],
    dtype: str = "bfloat16",
    **options: Any,
) -> WorkloadPreset:
    """A preset from (B, H, K, D, N) and (source, layers, width, inner, vocabulary)."""
    batch, heads, kv_heads, head_dim, length = shape
    source, layers, width, inner, vocabulary = sizes
    model = {
        "source": source,
        "name": name,
        "layers": layers,
        "width": width,
        "inner": inner,
        "vocabulary": vocabulary,
        "options": options,
    }
    return WorkloadPreset(
        name,
        summary,
        {
            "model": model,
            "pattern": "dense",
            "batch_size": batch,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "seq_len": length,
            "dtype": dtype,
            "causal": True,
            "mode": "both",
        },
    )


MODEL_PRESETS: tuple[WorkloadPreset, ...] = (
    _model("llama_tiny", "a Llama of two layers, for a CPU", (1, 4, 2, 16, 512), ("llama", 2, 64, 128, 512), "auto"),
    _model("llama_400m", "a Llama of 400 M parameters", (1, 16, 4, 64, 8192), ("llama", 24, 1024, 4096, 32000)),
    _model(
        "llama_1b",
        "Llama 3.2 1B",
        (1, 32, 8, 64, 8192),
        ("llama", 16, 2048, 8192, 128256),
        tie_word_embeddings=True,
    ),
    _model(
        "qwen3_600m",
        "Qwen3 0.6B",
        (1, 16, 8, 128, 8192),
        ("qwen3", 28, 1024, 3072, 151936),
        tie_word_embeddings=True,
    ),
)

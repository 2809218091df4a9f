"""The named workloads and sets, as data: fields of WorkloadRequest, for `--config NAME`.

The ring configurations are dense and causal in bfloat16 unless their row says otherwise; the longnet and seed ones are
dilated.
"""

from dataclasses import replace
from typing import Any

from dilabench.plugins.descriptors import WorkloadPreset

LONGNET_SEGMENTS = (2048, 4096, 8192, 16384, 32768)


def _preset(name: str, summary: str, shape: tuple[int, int, int, int, int], **fields: Any) -> WorkloadPreset:
    """A preset from (B, H, K, D, N). K is left open where it equals H, so that it follows an override of H."""
    batch, heads, kv_heads, head_dim, length = shape
    base = {
        "pattern": "dense",
        "batch_size": batch,
        "num_heads": heads,
        "head_dim": head_dim,
        "seq_len": length,
        "dtype": "bfloat16",
        "causal": True,
    }
    grouped = {"num_kv_heads": kv_heads} if kv_heads != heads else {}
    return WorkloadPreset(name, summary, {**base, **grouped, **fields})


def _dilated(
    name: str,
    summary: str,
    shape: tuple[int, int, int, int, int],
    segments: tuple[int, ...],
    rates: tuple[int, ...],
) -> WorkloadPreset:
    return _preset(name, summary, shape, pattern="dilated", segment_lengths=segments, dilation_rates=rates)


def _named(name: str, summary: str, original: WorkloadPreset) -> WorkloadPreset:
    """The same workload under a name of its own."""
    return replace(original, name=name, summary=summary)


TINY = _preset("tiny", "1K tokens, for a first look", (2, 8, 8, 64, 1024))
SMALL = _preset("small", "4K tokens, 12 heads", (4, 12, 12, 128, 4096))
MEDIUM = _preset("medium", "8K tokens, 24 heads", (4, 24, 24, 128, 8192))
LARGE = _preset("large", "16K tokens, 32 heads", (4, 32, 32, 128, 16384))

RING: tuple[WorkloadPreset, ...] = (
    TINY,
    SMALL,
    _preset("small_fp16", "small in fp16, not causal", (4, 12, 12, 128, 4096), dtype="float16", causal=False),
    _preset("small_window", "small with a window of 512", (4, 12, 12, 128, 4096), window=(512, 0)),
    MEDIUM,
    _preset("medium_large_head", "head dim 256, not causal", (4, 12, 12, 256, 8192), causal=False),
    _preset("medium_many_heads", "medium with 32 heads", (4, 32, 32, 128, 8192)),
    _preset("medium_fp16", "medium in fp16", (4, 24, 24, 128, 8192), dtype="float16"),
    _preset("medium_window", "medium with a window of 512", (4, 24, 24, 128, 8192), window=(512, 0)),
    LARGE,
    _preset("large_seq", "32K tokens, 24 heads", (4, 24, 24, 128, 32768)),
    _preset("large_head", "16K tokens, head dim 256, not causal", (4, 24, 24, 256, 16384), causal=False),
    _preset("large_window", "large with a window of 512", (4, 32, 32, 128, 16384), window=(512, 0)),
    _preset("xlarge", "32K tokens, 32 heads, batch 8", (8, 32, 32, 128, 32768)),
    _preset("qwen3_235b_a22b", "GQA as in Qwen3 235B-A22B", (2, 64, 4, 64, 16384)),
    _preset("qwen3_30b_a3b", "GQA as in Qwen3 30B-A3B", (4, 32, 4, 64, 16384)),
    _preset("qwen3_4b", "GQA as in Qwen3 4B, head dim 80", (4, 32, 4, 80, 16384)),
    _preset("qwen3_32b", "GQA as in Qwen3 32B", (2, 64, 8, 128, 16384)),
    _preset("qwen3_14b", "GQA as in Qwen3 14B", (4, 40, 8, 128, 16384)),
    _named("zigzag_tiny", "tiny, for the zigzag ring", TINY),
    _named("zigzag_small", "small, for the zigzag ring", SMALL),
    _named("zigzag_medium", "medium, for the zigzag ring", MEDIUM),
    _named("zigzag_large", "large, for the zigzag ring", LARGE),
    _preset("zigzag_fp16", "small in fp16, for the zigzag ring", (4, 12, 12, 128, 4096), dtype="float16"),
    _preset("zigzag_gqa", "8K tokens, 32 heads over 8, for the zigzag ring", (4, 32, 8, 128, 8192)),
)

DILATED: tuple[WorkloadPreset, ...] = (
    _dilated("longnet_32k", "LongNet's published setting", (1, 12, 12, 64, 32768), LONGNET_SEGMENTS, (1, 2, 4, 6, 12)),
    _dilated("longnet_128k", "LongNet at 128K tokens", (1, 16, 16, 128, 131072), LONGNET_SEGMENTS, (1, 2, 4, 8, 16)),
    _dilated("seed_small", "2K tokens, 2 branches", (1, 8, 8, 64, 2048), (1024, 2048), (1, 2)),
    _dilated("seed_medium", "4K tokens, 3 branches", (2, 8, 8, 64, 4096), (1024, 2048, 4096), (1, 2, 4)),
    _dilated("seed_large", "8K tokens, 3 branches", (4, 8, 8, 64, 8192), (2048, 4096, 8192), (1, 2, 4)),
)

SETS: tuple[WorkloadPreset, ...] = (
    WorkloadPreset("correctness", "workloads to check results on", members=("tiny", "small", "medium")),
    WorkloadPreset("performance", "workloads to time", members=("medium", "large")),
    WorkloadPreset("multi_gpu", "workloads for several GPUs", members=("small", "medium")),
    WorkloadPreset("gqa", "grouped-query workloads", members=("qwen3_4b", "qwen3_14b", "qwen3_32b")),
    WorkloadPreset("zigzag", "workloads for the zigzag ring", members=("zigzag_tiny", "zigzag_small", "zigzag_medium")),
)

PRESETS: tuple[WorkloadPreset, ...] = (*RING, *DILATED, *SETS)

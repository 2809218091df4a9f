"""The named workloads and sets, as data: fields of WorkloadRequest, for `--config NAME`.

The ring configurations are dense and causal in bfloat16 unless stated otherwise; the longnet and seed ones are
dilated. So are the real models: torchscale's function in float16, not causal. Sparse ones are sizes
of the papers that they name.
"""

from collections.abc import Callable
from dataclasses import replace
from math import log
from random import Random
from typing import Any

from dilabench.plugins.descriptors import WorkloadPreset

LONGNET_SEGMENTS = (2048, 4096, 8192, 16384, 32768)


def preset(name: str, summary: str, shape: tuple[int, int, int, int, int], **fields: Any) -> WorkloadPreset:
    """A preset from (B, H, K, D, N). K is omitted if it equals H, so that it follows an override of H."""
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
    return preset(name, summary, shape, pattern="dilated", segment_lengths=segments, dilation_rates=rates)


def _named(name: str, summary: str, original: WorkloadPreset) -> WorkloadPreset:
    """The same workload under another name."""
    return replace(original, name=name, summary=summary)


TINY = preset("tiny", "1K tokens, for a first look", (2, 8, 8, 64, 1024))
SMALL = preset("small", "4K tokens, 12 heads", (4, 12, 12, 128, 4096))
MEDIUM = preset("medium", "8K tokens, 24 heads", (4, 24, 24, 128, 8192))
MLA = (1, 128, 128, 192, 8192)
LARGE = preset("large", "16K tokens, 32 heads", (4, 32, 32, 128, 16384))

RING: tuple[WorkloadPreset, ...] = (
    TINY,
    SMALL,
    preset("small_fp16", "small in fp16, not causal", (4, 12, 12, 128, 4096), dtype="float16", causal=False),
    preset("small_window", "small with a window of 512", (4, 12, 12, 128, 4096), window=(512, 0)),
    MEDIUM,
    preset("medium_large_head", "head dim 256, not causal", (4, 12, 12, 256, 8192), causal=False),
    preset("medium_many_heads", "medium with 32 heads", (4, 32, 32, 128, 8192)),
    preset("medium_fp16", "medium in fp16", (4, 24, 24, 128, 8192), dtype="float16"),
    preset("medium_window", "medium with a window of 512", (4, 24, 24, 128, 8192), window=(512, 0)),
    LARGE,
    preset("large_seq", "32K tokens, 24 heads", (4, 24, 24, 128, 32768)),
    preset("large_head", "16K tokens, head dim 256, not causal", (4, 24, 24, 256, 16384), causal=False),
    preset("large_window", "large with a window of 512", (4, 32, 32, 128, 16384), window=(512, 0)),
    preset("xlarge", "32K tokens, 32 heads, batch 8", (8, 32, 32, 128, 32768)),
    preset("qwen3_235b_a22b", "GQA as in Qwen3 235B-A22B", (2, 64, 4, 64, 16384)),
    preset("qwen3_30b_a3b", "GQA as in Qwen3 30B-A3B", (4, 32, 4, 64, 16384)),
    preset("qwen3_4b", "GQA as in Qwen3 4B, head dim 80", (4, 32, 4, 80, 16384)),
    preset("qwen3_32b", "GQA as in Qwen3 32B", (2, 64, 8, 128, 16384)),
    preset("qwen3_14b", "GQA as in Qwen3 14B", (4, 40, 8, 128, 16384)),
    _named("zigzag_tiny", "tiny, for the zigzag ring", TINY),
    _named("zigzag_small", "small, for the zigzag ring", SMALL),
    _named("zigzag_medium", "medium, for the zigzag ring", MEDIUM),
    _named("zigzag_large", "large, for the zigzag ring", LARGE),
    preset("zigzag_fp16", "small in fp16, for the zigzag ring", (4, 12, 12, 128, 4096), dtype="float16"),
    preset("zigzag_gqa", "8K tokens, 32 heads over 8, for the zigzag ring", (4, 32, 8, 128, 8192)),
)

DILATED: tuple[WorkloadPreset, ...] = (
    _dilated("longnet_32k", "LongNet's published setting", (1, 12, 12, 64, 32768), LONGNET_SEGMENTS, (1, 2, 4, 6, 12)),
    _dilated("longnet_128k", "LongNet at 128K tokens", (1, 16, 16, 128, 131072), LONGNET_SEGMENTS, (1, 2, 4, 8, 16)),
    _dilated("seed_small", "2K tokens, 2 branches", (1, 8, 8, 64, 2048), (1024, 2048), (1, 2)),
    _dilated("seed_medium", "4K tokens, 3 branches", (2, 8, 8, 64, 4096), (1024, 2048, 4096), (1, 2, 4)),
    _dilated("seed_large", "8K tokens, 3 branches", (4, 8, 8, 64, 8192), (2048, 4096, 8192), (1, 2, 4)),
)

# torchscale's dilated attention, with which Prov-GigaPath (its slide encoder) and LongViT were trained.
AS_TORCHSCALE = {"offset": "blocked", "merge_grad": "detached", "padding": "zero_key"}
GIGAPATH_SEGMENTS = (1024, 5792, 32768, 185363, 1048576)


def _model(name: str, summary: str, head_dim: int, length: int, segments: tuple[int, ...]) -> WorkloadPreset:
    """16 heads, rates 1 to 16."""
    dilated = _dilated(name, summary, (1, 16, 16, head_dim, length), segments, (1, 2, 4, 8, 16))
    return replace(dilated, fields={**dilated.fields, **AS_TORCHSCALE, "dtype": "float16", "causal": False})


REAL_MODELS: tuple[WorkloadPreset, ...] = (
    _model("gigapath", "Prov-GigaPath's slide encoder, a typical slide", 48, 10001, GIGAPATH_SEGMENTS),
    _model("gigapath_large_slide", "Prov-GigaPath's slide encoder, a large slide", 48, 70001, GIGAPATH_SEGMENTS),
    _model("gigapath_panda", "Prov-GigaPath, segments as for PANDA", 48, 20001, (1024, 4870, 23170, 110217, 524288)),
    _model("gigapath_1536", "Prov-GigaPath, 1536 wide", 96, 10001, GIGAPATH_SEGMENTS),
    _model("longvit_1024", "LongViT, images of 1024 pixels", 24, 1024, (64, 128, 256, 512, 1024)),
    _model("longvit_4096", "LongViT, images of 4096 pixels", 24, 16384, (1024, 2048, 4096, 8192, 16384)),
    _model("longvit_8192", "LongViT, images of 8192 pixels", 24, 65536, (1024, 4096, 8192, 16384, 65536)),
    _model("longvit_16384", "LongViT, images of 16384 pixels", 24, 262144, (1024, 4096, 16384, 65536, 262144)),
    _model("longvit_32768", "LongViT, images of 32768 pixels", 24, 1048576, (1024, 4096, 32768, 262144, 1048576)),
)


def _packed(preset: WorkloadPreset, draw: Callable[[Random], float]) -> WorkloadPreset:
    bounds = drawn_bounds(int(preset.fields["seq_len"]), draw)
    return replace(preset, fields={**preset.fields, "layout": "packed", "cu_seqlens": bounds})


def drawn_bounds(length: int, draw: Callable[[Random], float]) -> tuple[int, ...]:
    """Bounds of sequences of lengths as drawn, at most half of all tokens, the last one cut."""
    random, bounds = Random(0), [0]
    while bounds[-1] < length:
        bounds.append(min(length, bounds[-1] + max(1, min(round(draw(random)), length // 2))))
    return tuple(bounds)


def drawn_lengths(length: int, count: int) -> tuple[int, ...]:
    """Tokens of each sequence of a padded batch, from a quarter of the longest on, which comes first."""
    random = Random(0)
    return (length, *(random.randint(-(-length // 4), length) for _ in range(count - 1)))


def document_length(random: Random) -> float:
    """Tokens: log-normal, median 1K, sigma 1.3."""
    return random.lognormvariate(log(1024), 1.3)


PACKED: tuple[WorkloadPreset, ...] = (
    _packed(
        preset("packed_documents_32k", "documents of random lengths in 32K tokens", (1, 64, 8, 128, 32768)),
        document_length,
    ),
    _packed(
        preset("packed_documents_128k", "documents of random lengths in 128K tokens", (1, 64, 8, 128, 131072)),
        document_length,
    ),
    _packed(
        _dilated(
            "packed_documents_64k_dilated",
            "documents of random lengths in 64K tokens, 3 branches",
            (1, 16, 16, 64, 65536),
            (2048, 4096, 8192),
            (1, 2, 4),
        ),
        document_length,
    ),
    _packed(
        _model("packed_slides_64k", "slides of 5K to 30K tiles in 64K tokens, GigaPath", 48, 65536, GIGAPATH_SEGMENTS),
        lambda random: random.uniform(5000, 30000),
    ),
)

SPARSE: tuple[WorkloadPreset, ...] = (
    preset(
        "vsa_h3",
        "VSA in a video model, 64 of 1713 blocks",
        (1, 7, 7, 128, 109632),
        causal=False,
        pattern="topk_blocks",
        selector="pooled",
        block_size=64,
        top_k=64,
    ),
    # The sizes of MoBA, figure 2: three of 64 blocks at every length. MoBA selects per query token.
    preset(
        "blockwise_moba_64k",
        "3 of 64 blocks per block of queries at 64K tokens, sizes of MoBA, GQA as in Llama 3 8B",
        (1, 32, 8, 128, 65536),
        pattern="topk_blocks",
        selector="mean_key",
        block_size=1024,
        top_k=3,
    ),
    # NSA selects per query token.
    preset(
        "blockwise_nsa_64k",
        "means, blocks selected per block of queries and a window at 64K tokens, sizes of NSA",
        (1, 64, 4, 128, 65536),
        pattern="blockwise_native_sparse",
        block_size=64,
        top_k=16,
        window_size=512,
    ),
    preset(
        "window_sink_128k",
        "StreamingLLM's window with sinks at 128K tokens",
        (1, 32, 8, 128, 131072),
        pattern="window_sink",
        sinks=64,
        window_size=4096,
    ),
    preset(
        "column_bounds_128k",
        "documents of 1 to 8K in 128K tokens, as bounds of columns (FlashMask)",
        (1, 16, 16, 128, 131072),
        pattern="column_bounds",
        document_lengths=(1024, 8192, 2048, 4096, 1500, 6000, 3000),
    ),
)

NSA = {"block_size": 64, "top_k": 16}

# Selected per query token and key/value head, with the figures of their papers and models. Kernels take head dims of
# queries and values that are equal, so that D is 128 also where it was published as another.
PER_TOKEN: tuple[WorkloadPreset, ...] = (
    # Yuan et al. 2025, arXiv:2502.11089, §4.1: 64 heads over 4, d_k 192, d_v 128; l 32, d 16, l' 64, n 16 with
    # the first block and two local ones, w 512.
    preset(
        "nsa_64k",
        "NSA at 64K tokens: means, 16 blocks of 64 per token and a window, gated; D 128 where NSA has 192 and 128",
        (1, 64, 4, 128, 65536),
        pattern="native_sparse",
        window_size=512,
        compression_length=32,
        compression_stride=16,
        **NSA,
    ),
    preset(
        "nsa_64k_selected",
        "the selected branch of nsa_64k alone, its blocks drawn at random: neighbours share few",
        (1, 64, 4, 128, 65536),
        pattern="selected_blocks",
        selector="random",
        **NSA,
    ),
    # Lu et al. 2025, arXiv:2502.13189, figure 2b: 64 blocks at every length, top 3, a sparsity of 95.31 %; heads of
    # Llama 3.1 8B, its model.
    preset(
        "moba_64k",
        "MoBA at 64K tokens: 3 of 64 blocks per token, GQA as in Llama 3.1 8B, whose heads of a group select together",
        (1, 32, 8, 128, 65536),
        pattern="selected_blocks",
        selector="mean_key",
        block_size=1024,
        top_k=3,
    ),
    # MiniMax 2026, arXiv:2606.13392; transformers' MiniMaxM3VLTextConfig: 64 heads over 4, head_dim 128,
    # index_n_heads 4 (one for each of those), index_block_size 128, index_topk_blocks 16, index_local_blocks 1.
    preset(
        "msa_128k",
        "MSA at 128K tokens: 16 blocks of 128 per token and group, heads of MiniMax-M3",
        (1, 64, 4, 128, 131072),
        pattern="selected_blocks",
        selector="indexer",
        index_heads=1,
        block_size=128,
        top_k=16,
    ),
    # DeepSeek-V3.2's config.json: 128 heads over one latent, index_topk 2048, 64 index heads, of which 4 here.
    replace(
        preset(
            "dsa_64k_d128",
            "DSA at 64K tokens: the top 2048 tokens of each, 128 heads over one; D 128 where DSA has 576 and 512",
            (1, 128, 1, 128, 65536),
            pattern="selected_blocks",
            selector="indexer",
            index_heads=4,
            block_size=1,
            top_k=2048,
        ),
        aliases=("dsa_64k",),
    ),
    preset(
        "selected_small",
        "blocks selected per token as in NSA at 1K tokens, for a first look on a CPU",
        (1, 8, 2, 64, 1024),
        pattern="selected_blocks",
        dtype="float32",
        block_size=32,
        top_k=4,
    ),
)


DENSE_MODELS: tuple[WorkloadPreset, ...] = (
    # google/gemma-2-2b: attn_logit_softcapping 50, and in every second layer sliding_window 4096, the token included.
    preset("gemma2_2b", "the full layers of Gemma 2 2B, scores capped", (4, 8, 4, 256, 8192), softcap=50.0),
    preset(
        "gemma2_2b_window",
        "the layers of Gemma 2 2B with a window of 4096, scores capped",
        (4, 8, 4, 256, 8192),
        softcap=50.0,
        window=(4095, 0),
    ),
    # deepseek-ai/DeepSeek-V3: qk_nope_head_dim 128, qk_rope_head_dim 64, v_head_dim 128.
    preset("mla_prefill_128h", "MLA of DeepSeek-V3, keys of 192 and values of 128", MLA, value_dim=128),
)


DECODE: tuple[WorkloadPreset, ...] = (
    preset(
        "llama3_8b_decode", "one token over a cache of 32K, heads of Llama 3 8B", (1, 32, 8, 128, 32768), query_len=1
    ),
    preset(
        "llama3_70b_tp8_decode",
        "one token over a cache of 32K, the heads of Llama 3 70B on one of 8 ranks",
        (1, 8, 1, 128, 32768),
        query_len=1,
    ),
    # openai/gpt-oss: sliding_window 128 counts the token itself. Its learned sinks are one number for each head, which
    # no workload has.
    preset(
        "gpt_oss_decode",
        "one token, layers with a window of 128 in gpt-oss, without its learned sinks",
        (1, 64, 8, 64, 32768),
        query_len=1,
        window=(127, 0),
    ),
    preset(
        "longnet_decode",
        "one token over a cache of 128K, the branches of longnet_128k, D 64",
        (1, 16, 16, 64, 131072),
        query_len=1,
        pattern="dilated",
        segment_lengths=LONGNET_SEGMENTS,
        dilation_rates=(1, 2, 4, 8, 16),
    ),
    preset(
        "speculative_4",
        "four drafted tokens over a cache of 32K, heads of Llama 3 8B",
        (1, 32, 8, 128, 32768),
        query_len=4,
    ),
    preset(
        "chunked_prefill_2k",
        "the last 2K tokens of a prompt of 128K, heads of Llama 3 8B",
        (1, 32, 8, 128, 131072),
        query_len=2048,
    ),
    # The absorbed form: all heads read one latent of kv_lora_rank 512, with 64 rotated channels as keys. The scale
    # stays that of keys of 192.
    preset(
        "mla_decode",
        "one token over a cache of 32K latents, the absorbed MLA of DeepSeek-V3: keys of 576, values of 512",
        (1, 128, 1, 576, 32768),
        query_len=1,
        value_dim=512,
        scale=192**-0.5,
    ),
)

SETS: tuple[WorkloadPreset, ...] = (
    WorkloadPreset("correctness", "workloads to check results on", members=("tiny", "small", "medium")),
    WorkloadPreset("performance", "workloads to time", members=("medium", "large")),
    WorkloadPreset("multi_gpu", "workloads for several GPUs", members=("small", "medium")),
    WorkloadPreset("gqa", "grouped-query workloads", members=("qwen3_4b", "qwen3_14b", "qwen3_32b")),
    WorkloadPreset("zigzag", "workloads for the zigzag ring", members=("zigzag_tiny", "zigzag_small", "zigzag_medium")),
)


PRESETS: tuple[WorkloadPreset, ...] = (
    *RING,
    *DILATED,
    *REAL_MODELS,
    *PACKED,
    *SPARSE,
    *PER_TOKEN,
    *DENSE_MODELS,
    *DECODE,
    *SETS,
)

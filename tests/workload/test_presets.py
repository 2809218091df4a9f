"""The named workloads, pinned to the catalogue (catalog.md §4) row by row."""

import pytest

from dilabench.plugins.builtin.model_presets import MODELS
from dilabench.plugins.builtin.workloads import PRESETS, RING
from dilabench.suites.planner import workload_request

LONGNET_SEGMENTS = (2048, 4096, 8192, 16384, 32768)

# name: B, H, K, D, N, dtype, causal, window
RING_CONFIGS = {
    "tiny": (2, 8, 8, 64, 1024, "bfloat16", True, (-1, -1)),
    "small": (4, 12, 12, 128, 4096, "bfloat16", True, (-1, -1)),
    "small_fp16": (4, 12, 12, 128, 4096, "float16", False, (-1, -1)),
    "small_window": (4, 12, 12, 128, 4096, "bfloat16", True, (512, 0)),
    "medium": (4, 24, 24, 128, 8192, "bfloat16", True, (-1, -1)),
    "medium_large_head": (4, 12, 12, 256, 8192, "bfloat16", False, (-1, -1)),
    "medium_many_heads": (4, 32, 32, 128, 8192, "bfloat16", True, (-1, -1)),
    "medium_fp16": (4, 24, 24, 128, 8192, "float16", True, (-1, -1)),
    "medium_window": (4, 24, 24, 128, 8192, "bfloat16", True, (512, 0)),
    "large": (4, 32, 32, 128, 16384, "bfloat16", True, (-1, -1)),
    "large_seq": (4, 24, 24, 128, 32768, "bfloat16", True, (-1, -1)),
    "large_head": (4, 24, 24, 256, 16384, "bfloat16", False, (-1, -1)),
    "xlarge": (8, 32, 32, 128, 32768, "bfloat16", True, (-1, -1)),
    "large_window": (4, 32, 32, 128, 16384, "bfloat16", True, (512, 0)),
    "qwen3_235b_a22b": (2, 64, 4, 64, 16384, "bfloat16", True, (-1, -1)),
    "qwen3_30b_a3b": (4, 32, 4, 64, 16384, "bfloat16", True, (-1, -1)),
    "qwen3_4b": (4, 32, 4, 80, 16384, "bfloat16", True, (-1, -1)),
    "qwen3_32b": (2, 64, 8, 128, 16384, "bfloat16", True, (-1, -1)),
    "qwen3_14b": (4, 40, 8, 128, 16384, "bfloat16", True, (-1, -1)),
    "zigzag_tiny": (2, 8, 8, 64, 1024, "bfloat16", True, (-1, -1)),
    "zigzag_small": (4, 12, 12, 128, 4096, "bfloat16", True, (-1, -1)),
    "zigzag_medium": (4, 24, 24, 128, 8192, "bfloat16", True, (-1, -1)),
    "zigzag_large": (4, 32, 32, 128, 16384, "bfloat16", True, (-1, -1)),
    "zigzag_fp16": (4, 12, 12, 128, 4096, "float16", True, (-1, -1)),
    "zigzag_gqa": (4, 32, 8, 128, 8192, "bfloat16", True, (-1, -1)),
}
# name: B, H, D, N, segment lengths, dilation rates
DILATED_CONFIGS = {
    "longnet_32k": (1, 12, 64, 32768, LONGNET_SEGMENTS, (1, 2, 4, 6, 12)),
    "longnet_128k": (1, 16, 128, 131072, LONGNET_SEGMENTS, (1, 2, 4, 8, 16)),
    "seed_small": (1, 8, 64, 2048, (1024, 2048), (1, 2)),
    "seed_medium": (2, 8, 64, 4096, (1024, 2048, 4096), (1, 2, 4)),
    "seed_large": (4, 8, 64, 8192, (2048, 4096, 8192), (1, 2, 4)),
}
GIGAPATH_SEGMENTS = (1024, 5792, 32768, 185363, 1048576)
# name: D, N, segment lengths
MODEL_CONFIGS = {
    "gigapath": (48, 10001, GIGAPATH_SEGMENTS),
    "gigapath_large_slide": (48, 70001, GIGAPATH_SEGMENTS),
    "gigapath_panda": (48, 20001, (1024, 4870, 23170, 110217, 524288)),
    "gigapath_1536": (96, 10001, GIGAPATH_SEGMENTS),
    "longvit_1024": (24, 1024, (64, 128, 256, 512, 1024)),
    "longvit_4096": (24, 16384, (1024, 2048, 4096, 8192, 16384)),
    "longvit_8192": (24, 65536, (1024, 4096, 8192, 16384, 65536)),
    "longvit_16384": (24, 262144, (1024, 4096, 16384, 65536, 262144)),
    "longvit_32768": (24, 1048576, (1024, 4096, 32768, 262144, 1048576)),
}
# name: tokens, documents, the longest
PACKED_CONFIGS = {"packed_documents_32k": (32768, 19, 9087), "packed_documents_128k": (131072, 56, 23482)}
# name: N, documents, the longest of them, H, D, whether causal, segment lengths
PACKED_DILATED_CONFIGS = {
    "packed_documents_64k_dilated": (65536, 34, 9087, 16, 64, True, (2048, 4096, 8192)),
    "packed_slides_64k": (65536, 3, 26111, 16, 48, False, (1024, 5792, 32768, 185363, 1048576)),
}
# name: H, K, N, causal, kind of pattern and fields of it
SPARSE_CONFIGS = {
    "vsa_h3": (7, 7, 109632, False, "topk_blocks", {"block_size": 64, "top_k": 64, "selector": "pooled"}),
    "blockwise_moba_64k": (32, 8, 65536, True, "topk_blocks", {"block_size": 1024, "top_k": 3, "selector": "mean_key"}),
    "blockwise_nsa_64k": (
        64,
        4,
        65536,
        True,
        "blockwise_native_sparse",
        {"block_size": 64, "top_k": 16, "window_size": 512},
    ),
    "nsa_64k": (
        64,
        4,
        65536,
        True,
        "native_sparse",
        {"block_size": 64, "top_k": 16, "window_size": 512, "compression_length": 32, "compression_stride": 16},
    ),
    "nsa_64k_selected": (
        64,
        4,
        65536,
        True,
        "selected_blocks",
        {"block_size": 64, "top_k": 16, "selector": "random"},
    ),
    "moba_64k": (32, 8, 65536, True, "selected_blocks", {"block_size": 1024, "top_k": 3, "selector": "mean_key"}),
    "msa_128k": (64, 4, 131072, True, "selected_blocks", {"block_size": 128, "top_k": 16, "selector": "indexer"}),
    "dsa_64k_d128": (128, 1, 65536, True, "selected_blocks", {"block_size": 1, "top_k": 2048, "selector": "indexer"}),
    "window_sink_128k": (32, 8, 131072, True, "window_sink", {"sinks": 64, "window_size": 4096}),
    "column_bounds_128k": (
        16,
        16,
        131072,
        True,
        "column_bounds",
        {"document_lengths": (1024, 8192, 2048, 4096, 1500, 6000, 3000)},
    ),
}
# name: H, K, D, N, queries, window, kind of pattern
DECODE_CONFIGS = {
    "llama3_8b_decode": (32, 8, 128, 32768, 1, (-1, -1), "dense"),
    "llama3_70b_tp8_decode": (8, 1, 128, 32768, 1, (-1, -1), "dense"),
    "gpt_oss_decode": (64, 8, 64, 32768, 1, (127, 0), "dense"),
    "longnet_decode": (16, 16, 64, 131072, 1, (-1, -1), "dilated"),
    "speculative_4": (32, 8, 128, 32768, 4, (-1, -1), "dense"),
    "chunked_prefill_2k": (32, 8, 128, 131072, 2048, (-1, -1), "dense"),
}
# name: source, layers, width, words, H, K, D
WHOLE_MODELS = {
    "llama_tiny": ("llama", 2, 64, 512, 4, 2, 16),
    "llama_400m": ("llama", 24, 1024, 32000, 16, 4, 64),
    "llama_1b": ("llama", 16, 2048, 128256, 32, 8, 64),
    "qwen3_600m": ("qwen3", 28, 1024, 151936, 16, 8, 128),
    "gpt_oss_layer": ("gpt_oss", 2, 2880, 201088, 64, 8, 64),
    "gpt_oss_tiny": ("gpt_oss", 2, 64, 512, 4, 2, 16),
    "gemma2_layer": ("gemma2", 2, 2304, 256000, 8, 4, 256),
    "gemma2_tiny": ("gemma2", 2, 64, 512, 4, 2, 16),
    "gigapath_encoder": ("longnet", 12, 768, 2, 16, 16, 48),
    "longnet_decoder": ("longnet", 12, 768, 64000, 12, 12, 64),
    "longnet_tiny": ("longnet", 2, 64, 128, 4, 4, 16),
}
# name: B, H, K, D, Dv, N, queries, window, softcap
WIDE_OR_CAPPED_CONFIGS = {
    "gemma2_2b": (4, 8, 4, 256, 256, 8192, 8192, (-1, -1), 50.0),
    "gemma2_2b_window": (4, 8, 4, 256, 256, 8192, 8192, (4095, 0), 50.0),
    "mla_prefill_128h": (1, 128, 128, 192, 128, 8192, 8192, (-1, -1), None),
    "mla_decode": (1, 128, 1, 576, 512, 32768, 1, (-1, -1), None),
}
SETS = {
    "correctness": ("tiny", "small", "medium"),
    "performance": ("medium", "large"),
    "multi_gpu": ("small", "medium"),
    "gqa": ("qwen3_4b", "qwen3_14b", "qwen3_32b"),
    "zigzag": ("zigzag_tiny", "zigzag_small", "zigzag_medium"),
}


def test_nothing_is_missing_or_extra(catalogue):
    assert len(RING_CONFIGS) == 25
    assert {preset.name for preset in RING} == set(RING_CONFIGS)
    assert {preset.name for preset in (*PRESETS, *MODELS)} == {
        *RING_CONFIGS,
        *DILATED_CONFIGS,
        *MODEL_CONFIGS,
        *PACKED_CONFIGS,
        *PACKED_DILATED_CONFIGS,
        *SPARSE_CONFIGS,
        *DECODE_CONFIGS,
        *WHOLE_MODELS,
        *WIDE_OR_CAPPED_CONFIGS,
        "selected_small",
        *SETS,
    }
    assert {preset.name for preset in (*PRESETS, *MODELS)} <= set(catalogue.workloads.names)


# float32 as the `auto` dtype: a preset fixes its dtype, so it must not show.
@pytest.mark.parametrize("name", RING_CONFIGS)
def test_ring_configuration(catalogue, name):
    workload = workload_request(catalogue, name, {}).resolve("float32")
    assert (
        workload.batch_size,
        workload.num_heads,
        workload.num_kv_heads,
        workload.head_dim,
        workload.seq_len,
        workload.dtype,
        workload.causal,
        workload.window,
    ) == RING_CONFIGS[name]
    assert workload.pattern.kind == "dense"


@pytest.mark.parametrize("name", DILATED_CONFIGS)
def test_dilated_configuration(catalogue, name):
    workload = workload_request(catalogue, name, {}).resolve("float32")
    pattern = workload.pattern
    assert (
        workload.batch_size,
        workload.num_heads,
        workload.head_dim,
        workload.seq_len,
        pattern.segment_lengths,
        pattern.dilation_rates,
    ) == DILATED_CONFIGS[name]
    assert (workload.num_kv_heads, workload.dtype, workload.causal) == (workload.num_heads, "bfloat16", True)
    assert (pattern.heads, pattern.offset, pattern.merge_grad) == ("all", "modulo", "exact")


def test_sparse_configurations(catalogue):
    for name, (heads, kv_heads, length, causal, kind, fields) in SPARSE_CONFIGS.items():
        workload = workload_request(catalogue, name, {}).resolve("float32")
        shape = (workload.batch_size, workload.num_heads, workload.num_kv_heads, workload.head_dim, workload.seq_len)
        assert shape == (1, heads, kv_heads, 128, length), name
        assert (workload.dtype, workload.causal, workload.pattern.kind) == ("bfloat16", causal, kind), name
        assert {key: getattr(workload.pattern, key) for key in fields} == fields, name


@pytest.mark.parametrize("name", DECODE_CONFIGS)
def test_decoding_configurations(catalogue, name):
    workload = workload_request(catalogue, name, {}).resolve("float32")
    assert (
        workload.num_heads,
        workload.num_kv_heads,
        workload.head_dim,
        workload.seq_len,
        workload.query_len,
        workload.window,
        workload.pattern.kind,
    ) == DECODE_CONFIGS[name]
    assert (workload.batch_size, workload.dtype, workload.causal) == (1, "bfloat16", True)


@pytest.mark.parametrize("name", WIDE_OR_CAPPED_CONFIGS)
def test_configurations_with_softcaps_or_values_of_another_width(catalogue, name):
    workload = workload_request(catalogue, name, {}).resolve("float32")
    assert (
        workload.batch_size,
        workload.num_heads,
        workload.num_kv_heads,
        workload.head_dim,
        workload.value_width,
        workload.seq_len,
        workload.rows,
        workload.window,
        workload.softcap,
    ) == WIDE_OR_CAPPED_CONFIGS[name]
    assert (workload.dtype, workload.causal, workload.is_dense) == ("bfloat16", True, True)


def test_another_name_of_a_preset_is_the_same_workload(catalogue):
    named = [workload_request(catalogue, name, {}).resolve("float32") for name in ("dsa_64k", "dsa_64k_d128")]
    assert named[0] == named[1]


def test_real_models_are_what_torchscale_computes(catalogue):
    for name, (head_dim, length, segments) in MODEL_CONFIGS.items():
        workload = workload_request(catalogue, name, {}).resolve("float32")
        pattern = workload.pattern
        assert (workload.batch_size, workload.num_heads, workload.num_kv_heads) == (1, 16, 16), name
        assert (workload.head_dim, workload.seq_len, pattern.segment_lengths) == (head_dim, length, segments), name
        assert (workload.dtype, workload.causal, pattern.dilation_rates) == ("float16", False, (1, 2, 4, 8, 16)), name
        assert (pattern.offset, pattern.merge_grad, pattern.padding) == ("blocked", "detached", "zero_key"), name


@pytest.mark.parametrize("name", PACKED_CONFIGS)
def test_packed_documents(catalogue, name):
    workload = workload_request(catalogue, name, {}).resolve("float32")
    lengths = [stop - start for start, stop in workload.sequences]
    assert (workload.seq_len, len(lengths), max(lengths)) == PACKED_CONFIGS[name]
    assert max(lengths) <= workload.seq_len // 2
    shape = (workload.num_heads, workload.num_kv_heads, workload.head_dim, workload.causal, workload.layout)
    assert shape == (64, 8, 128, True, "packed")


@pytest.mark.parametrize("name", PACKED_DILATED_CONFIGS)
def test_packed_dilated_configuration(catalogue, name):
    workload = workload_request(catalogue, name, {}).resolve("float32")
    lengths = [stop - start for start, stop in workload.sequences]
    assert workload.layout == "packed"
    assert (
        workload.seq_len,
        len(lengths),
        max(lengths),
        workload.num_heads,
        workload.head_dim,
        workload.causal,
        workload.pattern.segment_lengths,
    ) == PACKED_DILATED_CONFIGS[name]


@pytest.mark.parametrize("name", SETS)
def test_set(catalogue, name):
    assert catalogue.workloads.get(name).members == SETS[name]


def test_fewer_heads_take_their_key_value_heads_along(catalogue):
    """`--config medium --nheads 32` asks for plain attention with 32 heads, not for 32 over 24."""
    workload = workload_request(catalogue, "medium", {"num_heads": 32}).resolve("float32")
    assert (workload.num_heads, workload.num_kv_heads) == (32, 32)


def test_an_override_is_what_runs(catalogue):
    workload = workload_request(catalogue, "qwen3_4b", {"seq_len": 50000, "dtype": "float16", "batch_size": 1}).resolve(
        "float32"
    )
    assert (workload.seq_len, workload.dtype, workload.batch_size, workload.num_kv_heads) == (50000, "float16", 1, 4)


def test_every_preset_has_a_packed_form(catalogue):
    workload = workload_request(catalogue, "tiny", {"layout": "packed", "batch_size": 1}).resolve("float32")
    assert workload.cu_seqlens == (0, 128, 384, 896, 1024)


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_whole_models_have_the_sizes_of_their_names(catalogue, name):
    workload = workload_request(catalogue, name, {}).resolve("float32")
    model = workload.model
    sizes = (model.source, model.layers, model.width, model.vocabulary)
    assert (*sizes, workload.num_heads, workload.num_kv_heads, workload.head_dim) == WHOLE_MODELS[name]
    assert (model.name, workload.mode, workload.is_dense) == (name, "both", model.project is None)

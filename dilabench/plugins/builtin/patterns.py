"""The patterns that dilabench ships."""

from dilabench.patterns.registry import PatternKind

PATTERNS = (
    PatternKind("dense", "every query sees every key", "dilabench.patterns.dense:DensePattern"),
    PatternKind(
        "dilated", "LongNet's branches of strided segments, as one softmax", "dilabench.patterns.dilated:DilatedPattern"
    ),
    PatternKind(
        "block_sparse",
        "blocks of queries see blocks of keys, by a mask",
        "dilabench.patterns.block_sparse:BlockSparsePattern",
    ),
    PatternKind(
        "window_sink",
        "the first keys and a sliding window (StreamingLLM)",
        "dilabench.patterns.window_sink:WindowSinkPattern",
    ),
    PatternKind(
        "column_bounds",
        "keys hidden from ranges of rows: documents, prefixes, shared questions (FlashMask)",
        "dilabench.patterns.column_bounds:ColumnBoundsPattern",
    ),
    PatternKind(
        "topk_blocks",
        "the best key blocks of each query block, by a selector (MoBA, VSA)",
        "dilabench.patterns.topk_blocks:TopKBlocksPattern",
    ),
    PatternKind(
        "native_sparse",
        "compressed blocks, selected blocks and a window, summed with gates (NSA)",
        "dilabench.patterns.native_sparse:NativeSparsePattern",
    ),
)

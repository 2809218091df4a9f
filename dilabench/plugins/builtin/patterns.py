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
)

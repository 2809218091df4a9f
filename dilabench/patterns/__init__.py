"""Patterns: which query attends to which key. One file per kind; classes are imported when they are first used.

from dilabench.patterns import DilatedPattern
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilabench.patterns.block_sparse import BlockSparsePattern
    from dilabench.patterns.column_bounds import ColumnBoundsPattern
    from dilabench.patterns.dense import DensePattern
    from dilabench.patterns.dilated import DilatedPattern
    from dilabench.patterns.native_sparse import BlockwiseNativeSparsePattern, NativeSparsePattern
    from dilabench.patterns.selected_blocks import SelectedBlocksPattern
    from dilabench.patterns.topk_blocks import TopKBlocksPattern
    from dilabench.patterns.window_sink import WindowSinkPattern

__all__ = [
    "BlockSparsePattern",
    "BlockwiseNativeSparsePattern",
    "ColumnBoundsPattern",
    "DensePattern",
    "DilatedPattern",
    "NativeSparsePattern",
    "SelectedBlocksPattern",
    "TopKBlocksPattern",
    "WindowSinkPattern",
]

_MODULES = {
    "BlockSparsePattern": "block_sparse",
    "BlockwiseNativeSparsePattern": "native_sparse",
    "ColumnBoundsPattern": "column_bounds",
    "DensePattern": "dense",
    "DilatedPattern": "dilated",
    "NativeSparsePattern": "native_sparse",
    "SelectedBlocksPattern": "selected_blocks",
    "TopKBlocksPattern": "topk_blocks",
    "WindowSinkPattern": "window_sink",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"dilabench.patterns.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'dilabench.patterns' has no attribute {name!r}")

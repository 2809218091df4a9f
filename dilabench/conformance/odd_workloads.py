"""Small workloads with sizes that expose mistakes. No torch."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dilabench.patterns.dense import DENSE
from dilabench.patterns.registry import known_kinds, pattern_type
from dilabench.workload.spec import DType, Workload
from dilabench.workload.visibility import covered

_SHAPE: dict[str, Any] = {"batch_size": 2, "num_heads": 5, "num_kv_heads": 5, "head_dim": 24, "mode": "both"}
_SHAPES: tuple[dict[str, Any], ...] = (
    {"seq_len": 97, "causal": True},
    {"seq_len": 96, "causal": False, "head_dim": 80},
    {"seq_len": 61, "causal": False},
    {"seq_len": 53, "causal": True},
    {"seq_len": 96, "num_heads": 6, "num_kv_heads": 2, "scale": 0.3},
    {"seq_len": 48, "causal": False, "window": (9, 4)},
    {"seq_len": 83, "causal": False},
    {"seq_len": 1, "causal": True},
    {"seq_len": 97, "batch_size": 1, "layout": "packed", "cu_seqlens": (0, 1, 40, 97)},
)

# Queries that are the last rows of their keys.
_LAST_ROWS: tuple[dict[str, Any], ...] = (
    {"seq_len": 97, "query_len": 1, "causal": True},
    {"seq_len": 96, "query_len": 13, "causal": False, "num_heads": 6, "num_kv_heads": 2},
    {"seq_len": 83, "query_len": 48, "causal": True, "window": (9, 0)},
)


def odd_workloads(dtype: DType = "float32") -> tuple[Workload, ...]:
    """Small workloads of every known pattern with sizes that expose mistakes: H = 5, N prime or 3·2^k, D = 24 and 80,
    K < H, windows, a single token, packed sequences; and each pattern's own examples (`Pattern.examples`)."""
    return tuple(workload for kind in known_kinds() for workload in odd_workloads_of(kind, dtype))


def odd_workloads_of(kind: str, dtype: DType = "float32") -> Iterator[Workload]:
    """The odd workloads of one kind of pattern: every example over every shape for which it is defined."""
    yield from _over(_SHAPES, kind, dtype)


def odd_last_rows_of(kind: str, dtype: DType = "float32") -> Iterator[Workload]:
    """As `odd_workloads_of`, with fewer queries than keys, which an implementation takes only if it says so."""
    yield from _over(_LAST_ROWS, kind, dtype)


def _over(shapes: Sequence[dict[str, Any]], kind: str, dtype: DType) -> Iterator[Workload]:
    examples = pattern_type(kind).examples()
    for index in range(max(len(shapes), len(examples))):
        pattern, shape = examples[index % len(examples)], shapes[index % len(shapes)]
        full = Workload.model_validate({**_SHAPE, **shape, "pattern": DENSE, "dtype": dtype})
        # A sum of attentions is not defined over packed sequences.
        apart = full.layout == "packed" and pattern.summands(full.shapes[0])
        if not apart and not any(pattern.why_not_over(shape) for shape in full.shapes):
            yield full.replace(pattern=pattern)


def has_empty_rows(workload: Workload) -> bool:
    """Return True if some row of some head sees no key."""
    return not all(np.all(covered(workload, head)) for head in range(workload.num_heads))

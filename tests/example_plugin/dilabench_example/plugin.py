"""Registers what this package adds. It imports no heavy module."""

from dilabench.plugins import ANY_PATTERN, Capabilities, Implementation, PatternKind, hookimpl

FULL_PRECISION = Capabilities(patterns=ANY_PATTERN, dtypes=frozenset({"float32", "float64"}))


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    summary = "one dense softmax with log C as its bias"
    return [Implementation("masked", summary, "dilabench_example.masked:build", supports=FULL_PRECISION)]


@hookimpl
def dilabench_register_patterns() -> list[PatternKind]:
    summary = "local attention by chunks"
    return [PatternKind("chunked", summary, "dilabench_example.chunked:ChunkedPattern")]

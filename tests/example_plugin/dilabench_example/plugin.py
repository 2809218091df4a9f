"""Tells dilabench what this package adds. Nothing heavy is imported here."""

from dilabench.plugins import Capabilities, Implementation, hookimpl

FULL_PRECISION = Capabilities(dtypes=frozenset({"float32", "float64"}), window=False)


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    summary = "one dense softmax with log C as its bias"
    return [Implementation("masked", summary, "dilabench_example.masked:build", supports=FULL_PRECISION)]

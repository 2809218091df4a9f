"""Correctness before any timing: `verify` holds a function to the oracle (docs/explanation/semantics.md §4)."""

from dilabench.bench.verify.oracle import Oracle
from dilabench.bench.verify.poison import poisoned
from dilabench.bench.verify.verification import summary, verify

__all__ = ["Oracle", "poisoned", "summary", "verify"]

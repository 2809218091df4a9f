"""Correctness before any timing: `verify` holds a function to the oracle (docs/explanation/semantics.md §4)."""

from dilabench.engine.verify.call import poisoned
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.verification import summary, verify

__all__ = ["Oracle", "poisoned", "summary", "verify"]

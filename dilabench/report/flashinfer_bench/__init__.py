"""Workloads for FlashInfer-Bench: definitions with a reference in PyTorch, and workload files (its "trace" schema)."""

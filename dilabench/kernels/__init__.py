"""Triton kernels on plain tensors, one idea per file; nothing else of dilabench is imported here."""

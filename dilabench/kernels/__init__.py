"""Triton kernels on plain tensors, one idea per file, without imports from other parts of dilabench."""

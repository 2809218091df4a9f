"""Triton kernels for attention over key blocks that each query token selects per key/value head."""

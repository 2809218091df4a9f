"""Attention over key blocks that are selected per query token and key/value head, on one device."""

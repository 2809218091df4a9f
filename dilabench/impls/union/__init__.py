"""Dilated attention as a union of strided segments, each a call of a dense backend."""

"""Workloads: shape, dtype, mode and pattern; named workloads and ranges."""

"""Implementations of attention workloads, one file or folder per algorithm, each with `build`."""

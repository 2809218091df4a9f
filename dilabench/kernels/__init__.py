"""Kernels on plain tensors: Triton and Gluon for GPUs, C++ for CPUs. They know no implementation and no backend."""

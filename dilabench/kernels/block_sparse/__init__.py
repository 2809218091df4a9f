"""Triton and Gluon kernels over the visible blocks of a mask."""

"""Triton and Gluon kernels over all branches of dilated attention in one launch."""

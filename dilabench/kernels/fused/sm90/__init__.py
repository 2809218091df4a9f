"""The kernels of dilated attention for Hopper, written in Gluon."""

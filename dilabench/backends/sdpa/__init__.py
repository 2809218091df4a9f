"""Kernels that torch's scaled_dot_product_attention chooses from, called directly."""

"""Block masks, bounds of columns and selections as lists of tiles, and launches of the `fused` kernels over them."""

"""Suite `block-sparse`: time and memory against density."""

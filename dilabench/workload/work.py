"""The FLOPs of a pair of a query and a key, by the widths D of keys and Dv of values.

The two products of a forward call take 2·D and 2·Dv, the five of a backward one 6·D and 4·Dv.
"""

# Products of a pass with a row of keys or queries, and with one of values or out.
PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}


def flops_per_pair(mode: str, head_dim: int, value_dim: int) -> int:
    """FLOPs of one (query, key) pair of one head in a mode: forward, backward or both."""
    with_keys, with_values = PRODUCTS[mode]
    return 2 * (with_keys * head_dim + with_values * value_dim)

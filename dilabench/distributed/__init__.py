"""Several devices, one problem: the world of ranks, who holds which positions, what crosses the wire."""

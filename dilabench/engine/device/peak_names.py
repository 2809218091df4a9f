"""Names of the measured ceilings in a run record. No torch."""

COPY_KEY = "copy_bytes_per_s"


def matmul_key(dtype: str) -> str:
    """FLOP/s of a matrix product in a dtype."""
    return f"matmul_{dtype}_flops_per_s"

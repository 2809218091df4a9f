"""Kernels that pass over memory: the rows and warps of their programs, from one measured table."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple


class _Measured(NamedTuple):
    """Numbers of a tensor that a program reads, rows at most, and warps."""

    numbers: int
    most_rows: float = inf
    num_warps: int = 4


_MEASURED: Mapping[str, _Measured] = {
    # Short segments have no fewer rows: the last one of a sequence may have any length.
    "merge": _Measured(4096, 32),
    # Twice as many spill registers with four parts.
    "combine": _Measured(2048, 16),
    # GigaPath's five branches at 70001 tokens took 0.150 ms on one H100 when all rows were stored, and 0.185 with 4096.
    "partials": _Measured(2048),
    "bwd_preprocess": _Measured(4096),
    "gates": _Measured(4096, 16),
    "wider_rows": _Measured(4096, 64),
    "convert": _Measured(4096, 64),
}


class RowProgram(NamedTuple):
    """The rows and warps of a program."""

    rows: int
    num_warps: int


def row_program(kernel: str, columns: int) -> RowProgram:
    """The program of a kernel of the table for rows of this many columns."""
    numbers, most_rows, num_warps = _MEASURED[kernel]
    return RowProgram(max(1, int(min(most_rows, numbers // columns))), num_warps)

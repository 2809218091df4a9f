"""Merging of results (`kernels.lse`), by the name that rings import."""

from dilabench.kernels.lse import merge_rows_ as merge_rows_

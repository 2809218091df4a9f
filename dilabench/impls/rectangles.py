"""`rectangles`: each pair that nested branches share once, and little above the diagonal, over any dense backend.

Made for CPUs: torch's kernel there packs the same keys anew for every tile of queries, and tokens that lie thousands
of bytes apart fall into the same few sets of a cache. So q, k and v are copied to heads first, once for all calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.null_mass import log_zero_keys
from dilabench.impls.packed import Packed, build_packed
from dilabench.impls.union.branches import branches_of, covers_every_row
from dilabench.impls.union.rectangles import Rectangle, rectangles
from dilabench.impls.union.union import Rows, Union
from dilabench.workload.spec import UNBOUNDED, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RectangleUnion(Union):
    """A union whose calls see all of their keys, but for those along the diagonal of a causal mask."""

    def _laid_out(self, x: Tensor) -> Tensor:
        """With the tokens of a head next to each other in memory."""
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def _mask(self, rows: Rows) -> dict[str, Any]:
        assert isinstance(rows, Rectangle)
        return {"causal": rows.diagonal, "window": UNBOUNDED, "scale": self.scale}


def build(workload: Workload, context: BuildContext) -> RectangleUnion | Packed:
    """Rectangles of rows, read in place. Packed sequences go one by one."""
    return build_packed(_padded, workload, context) if workload.layout == "packed" else _padded(workload, context)


def _padded(workload: Workload, context: BuildContext) -> RectangleUnion:
    def rows(_device: torch.device) -> tuple[Rectangle, ...]:
        return context.patterns.get(("rectangles", workload), lambda: rectangles(workload))

    return RectangleUnion(
        backend=context.require_backend(),
        rows=rows,
        covered=covers_every_row(branches_of(workload)),
        causal=workload.causal,
        window=workload.window,
        scale=workload.softmax_scale,
        detached=workload.pattern.is_detached,
        zero_keys=log_zero_keys(workload, context.device, apart=workload.pattern.is_detached),
    )


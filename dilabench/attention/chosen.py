"""Implementation `library`: `dilated_attention` as a caller gets it, with its choice in the row's notes.

The choice is made when it is built, so that measuring at the first use is set-up and not part of a timed call.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dilabench.attention.dilated import IN_PATTERN, dilated_attention
from dilabench.choice.computation import automatic
from dilabench.choice.ways import way_name
from dilabench.contracts import BuildContext
from dilabench.metadata import CHOSEN, Note
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class Chosen:
    """The library's function for one workload. `notes`: its choice, and the time of choosing."""

    options: Mapping[str, Any]
    notes: tuple[Note, ...]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out [B, N, H, D] of q [B, N, H, D] and k, v [B, N, K, D]; packed: [T, H, D]."""
        return dilated_attention(q, k, v, **self.options)


def build(workload: Workload, context: BuildContext) -> Chosen:
    """Choose like the first call of this configuration; later calls reuse the result."""
    began = time.perf_counter_ns()
    choice, _ = automatic(workload, context.device)
    took_ns = time.perf_counter_ns() - began
    pattern = DilatedPattern.of(workload)
    options = {
        **{name: getattr(pattern, name) for name in IN_PATTERN},
        "causal": workload.causal,
        "window": workload.window,
        "scale": workload.scale,
        "cu_seqlens": workload.cu_seqlens,
    }
    why = f"{choice.source}: {choice.times}" if choice.times else choice.source
    return Chosen(options, (CHOSEN.note(f"{way_name(choice)} ({why})", observed=took_ns),))

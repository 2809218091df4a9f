"""Suite `tiles`: other tile shapes of an implementation's kernels beside its own, on one workload."""

from collections.abc import Callable
from typing import Any

from dilabench.choice.descriptors import load_target
from dilabench.errors import ConfigError
from dilabench.metadata import VARIANT
from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.optimization.variants import NONE
from dilabench.suites.planner import Planner
from dilabench.workload.spec import DTYPE_BYTES, Workload

# Where the shapes that `fused` ships were chosen.
SHAPE: dict[str, Any] = {"batch_size": 1, "seq_len": 131072, "num_heads": 16, "head_dim": 64}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Each implementation as it is, and with each tile shape that it is worth trying with, or that is named.

    All are verified, and timed in the same rounds. A shape that does not compile or fit is a row that says so.
    """
    named = request.options.get("tiles")
    cases: list[PlannedCase] = []
    for asked in planner.workload_requests([SHAPE]):
        workload = asked.resolve(planner.machine.auto_dtype)
        for implementation in planner.implementations(planner.where(_is_tried_unasked)):
            if implementation.tiles is None:
                raise ConfigError(f"{implementation.name} has no tile shapes to try; leave -i out for those that have")
            tried = _named(named) if named else _worth_trying(implementation.tiles, workload)
            cases += planner.plan(implementation, asked, VARIANT.entry(NONE))
            for tiles in tried:
                cases += planner.plan(implementation, asked, VARIANT.entry(tiles), tiles=tiles)
    return tuple(cases)


def _is_tried_unasked(implementation: Implementation) -> bool:
    return implementation.tiles is not None and not implementation.compiles


def _named(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def _worth_trying(target: str, workload: Workload) -> tuple[str, ...]:
    candidates: Callable[[int, int, bool], tuple[str, ...]] = load_target(target)
    return candidates(workload.head_dim, DTYPE_BYTES[workload.dtype], workload.mode != "forward")

"""Names of Triton's experimental Gluon that the Hopper kernels use. Any version may lack one or change it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

_GLUON: Mapping[str, tuple[str, ...]] = {
    "": (
        "constexpr_function",
        "jit",
    ),
    "language": (
        "BlockedLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "SliceLayout",
        "SwizzledSharedLayout",
        "allocate_shared_memory",
        "arange",
        "bfloat16",
        "constexpr",
        "convert_layout",
        "exp",
        "exp2",
        "float16",
        "float32",
        "full",
        "int32",
        "int64",
        "load",
        "log",
        "log2",
        "max",
        "maximum",
        "minimum",
        "num_programs",
        "program_id",
        "static_range",
        "store",
        "sum",
        "thread_barrier",
        "warp_specialize",
        "where",
    ),
    "language.NVMMASharedLayout": ("get_default_for",),
    "language._core": ("builtin",),
    "language.extra.libdevice": ("fast_log2f",),
    "language.nvidia.hopper": (
        "fence_async_shared",
        "warpgroup_mma",
        "warpgroup_mma_wait",
    ),
    "language.nvidia.hopper.mbarrier": (
        "MBarrierLayout",
        "arrive",
        "expect",
        "init",
        "wait",
    ),
    "language.nvidia.hopper.tma": (
        "async_copy_global_to_shared",
        "store_wait",
    ),
    "nvidia.hopper": ("TensorDescriptor",),
}
# The Hopper kernels; without them the plain ones serve.
GLUON = tuple(
    f"triton.experimental.gluon.{module}.{name}".replace("..", ".")
    for module, names in _GLUON.items()
    for name in names
)


def gone(names: Iterable[str]) -> list[str]:
    """The missing names; their modules are imported."""
    return [name for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    parts = name.split(".")
    found: Any = None
    for end in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:end]))
        # A module may fail at what it imports itself.
        except Exception:  # noqa: BLE001
            continue
        break
    else:
        return False
    for part in parts[end:]:
        try:
            found = getattr(found, part)
        # Operators that a build lacks are RuntimeErrors, too.
        except Exception:  # noqa: BLE001
            return False
    return True

"""How the kernels over a selection see tensors, and how they are launched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor

from dilabench.kernels.fused.row_layout import LOG2E, product_precision
from dilabench.kernels.launch_cache import Launch, LaunchCache, stride_unit
from dilabench.kernels.selected.selection import PER_SELECTION
from dilabench.kernels.tuning import TileConfig, padded_dim

_OPERANDS = ("q", "k", "v", "dout")

PER_LENGTH = (
    *PER_SELECTION,
    *(f"{name}_{axis}" for name in _OPERANDS for axis in ("token", "head")),
    "key_rows",
    "n_heads",
    "share_entries",
    "part",
)


def in_rows(x: Tensor) -> Tensor:
    """x [B, N, H, D], or [T, H, D] of documents, as [T, H, D] whose columns are dense; a copy only where it must be."""
    x = x.flatten(0, -3)
    return x if x.stride(-1) == 1 else x.contiguous()


def operand_arguments(operands: Mapping[str, Tensor], scale: float) -> dict[str, Any]:
    """The arguments of every kernel besides a selection; ``operands``: q, k, v and, of a backward pass, dout, each [T,
    H, D] of `in_rows`.
    """
    q, k = operands["q"], operands["k"]
    unit = stride_unit(*operands.values())
    strides = {
        f"{name}_{axis}": operands[name].stride(place) // unit if name in operands else 0
        for name in _OPERANDS
        for place, axis in enumerate(("token", "head"))
    }
    return {
        **strides,
        "scale": scale,
        "scale_log2": scale * LOG2E,
        "n_heads": q.shape[1],
        "key_rows": len(k),
        "GROUP": q.shape[1] // k.shape[1],
        "UNIT": unit,
        "HEAD_DIM": q.shape[2],
        "DIM": padded_dim(q.shape[2]),
        "WIDE": any(_extent(x) >= 2**31 for x in operands.values()),
        "PRECISION": product_precision(q),
    }


def _extent(x: Tensor) -> int:
    """Elements from the first to behind the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def launch(
    kernel: Any,
    programs: int,
    tensors: Mapping[str, Tensor],
    arguments: Callable[[], Mapping[str, Any]],
    tiles: TileConfig,
    cache: LaunchCache,
    name: Hashable,
) -> None:
    """Launch a kernel, which has a name in its cache, on ``tensors``: x is x_ptr, None without an x.

    It gets the ``arguments`` that it takes, and the warps and stages of ``tiles``; a repeated launch requests neither.
    """

    def prepare() -> list[Launch]:
        pointers = {f"{x}_ptr": tensor for x, tensor in tensors.items()}
        own: dict[str, Any] = {**pointers, **arguments(), "STAGES": tiles.num_stages}
        given = {
            argument: own.get(argument) if argument.endswith("_ptr") else own[argument] for argument in kernel.arg_names
        }
        given |= {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        if tiles.max_registers is not None:
            given["maxnreg"] = tiles.max_registers
        return [Launch(kernel, lambda _: ((programs,), given))]

    cache.launch(name, [tensors], prepare)

"""How the fused kernels see tensors: descriptors of the residue-class view, and what every launch is given."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from packaging.version import Version
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.residue_plan import ResiduePlan
from dilabench.kernels.gluon_names import GLUON, gone
from dilabench.kernels.launch_cache import COPY_BYTES, Arguments
from dilabench.kernels.lse import LEAST_TRITON
from dilabench.kernels.tuning import L2_RESIDENT_BYTES, TileConfig, tile_columns

LARGEST_HEAD_DIM = 256

logger = logging.getLogger(__name__)

# Values that change with the length of a sequence must not be compiled in: Triton makes another kernel for each set of
# integers that are 1 or divisible by 16.
PER_LENGTH = (
    "n_supers",
    "full_supers",
    "n_items",
    "n_tiles",
    "n_blocks",
    "n_work",
    "n_slots",
    "n_shared",
    "length",
    "whole_rows",
    "longer_classes",
    "left_over",
    "super_rows",
    "super_tokens",
    "window_left",
    "window_right",
    "stats_blocks",
    "stats_rows",
    "first_kv_head",
    "some_kv_heads",
    "item_major",
    "rows",
    "key_rows",
    "R",
)


def is_row_addressable(x: Tensor) -> bool:
    """Return True if the tokens and heads of ``x`` have constant, 16-byte aligned strides through the batch."""
    batch, length, _, dim = x.shape
    aligned = COPY_BYTES // x.element_size()
    token, head = x.stride(1), x.stride(2)
    regular = x.stride(3) == 1 and token >= head >= dim and (batch == 1 or x.stride(0) == length * token)
    return regular and token % aligned == 0 and head % aligned == 0 and x.data_ptr() % COPY_BYTES == 0


def is_whole(x: Tensor, groups: Sequence[BranchGroup]) -> bool:
    """Whether kernels read ``x [B, N, H, D]`` as it is; `whole_classes` makes of another one that they do."""
    return is_row_addressable(x) and all(_fits_a_box(x, group) for group in groups)


def whole_classes(x: Tensor, groups: Sequence[BranchGroup]) -> Tensor:
    """``x [B, N, H, D]`` so that `is_whole`: itself, else a copy, with zeros behind where R does not divide N."""
    if not all(_fits_a_box(x, group) for group in groups):
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % common_modulus(groups)))
    return x if is_row_addressable(x) else x.contiguous()


def common_modulus(groups: Iterable[BranchGroup]) -> int:
    """The number that must divide a length for the rows of every group to be whole."""
    return math.lcm(*(group.modulus for group in groups))


def _fits_a_box(x: Tensor, group: BranchGroup) -> bool:
    """Whether descriptors, which are boxes, show all tokens of ``x [B, N, H, D]``.

    If R does not divide N, a box over N / R rows would exceed the tensor. So the box has only whole rows, and its width
    is R tokens plus the remainder. A tile with a class's last, partial row is found one row earlier, R tokens to the
    right (`tile_walk.box_place`), unless it is the first.
    """
    rows, left_over = divmod(x.shape[1], group.modulus)
    return left_over == 0 or rows >= group.largest_tile


@lru_cache(maxsize=16)
def on_hopper(device: torch.device) -> bool:
    """Whether ``device`` runs sm_90 code and this Triton has the Gluon of its kernels."""
    on_sm90 = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return on_sm90 and _has_gluon()


def _has_gluon() -> bool:
    """Whether this Triton is one that they were seen with, or a later one with every name that they use."""
    missing = gone(GLUON)
    if missing:
        logger.warning("Triton %s lacks %s: the plain kernels serve", triton.__version__, ", ".join(missing))
    return not missing and Version(triton.__version__) >= Version(LEAST_TRITON)


def product_precision(x: Tensor) -> str:
    """Triton's ``input_precision`` for matrix products of ``x``: float32 stays float32, other dtypes do not ask."""
    return _float32_products(x.device) if x.dtype == torch.float32 else "tf32"


@lru_cache(maxsize=16)
def _float32_products(device: torch.device) -> str:
    """Six products of three bfloat16 parts each, on tensor cores, if the device and Triton support them (seen with
    3.6); else FMA. A float32 is the sum of its parts, and the omitted products are below its last bit: on an H200
    results were nearer to float64 than by FMA (2.6e-7 against 1.0e-6), in a sixth to a twentieth of the time.
    """
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return "ieee"
    from triton.backends.nvidia.compiler import CUDAOptions

    known = "bf16x6" in getattr(CUDAOptions, "allowed_dot_input_precisions", ())
    return "bf16x6" if known and torch.cuda.get_device_capability(device) >= (8, 0) else "ieee"


def residue_view(x: Tensor, modulus: int) -> tuple[list[int], list[int]]:
    """(shape, strides) of ``x [B, N, H, D]`` as [N / R, columns] in whole rows, of several batch elements [B, N / R,
    columns]: head h of the token at place c of a row starts at column ``c * stride(1) + h * stride(2)``; behind R
    tokens stand as many as are left over (`_fits_a_box`).
    """
    batch, length, heads, dim = x.shape
    rows, left_over = divmod(length, modulus)
    token, head = x.stride(1), x.stride(2)
    shape = [batch, rows, (modulus + left_over - 1) * token + (heads - 1) * head + dim]
    some = int(batch == 1)
    return shape[some:], [length * token, modulus * token, 1][some:]


def residue_box(x: Tensor, modulus: int) -> tuple[list[int], list[int]]:
    """(shape, strides) of ``x [B, N, H, D]`` as [B, R, H, N / R, D] in whole rows; behind R tokens stand as many as are
    left over (`_fits_a_box`).

    Rows and columns come last: Triton multiplies tiles in place only where the axes of one element lie before them.
    """
    batch, length, heads, dim = x.shape
    token, head = x.stride(1), x.stride(2)
    shape = [batch, modulus + length % modulus, heads, length // modulus, dim]
    item = x.stride(0) if batch > 1 else length * token
    return shape, [item, token, head, modulus * token, 1]


def residue_rows(x: Tensor, modulus: int, rows: int, columns: int) -> TensorDescriptor:
    """`residue_box` in tiles of [1, 1, 1, rows, columns]; reads past an end give 0."""
    return TensorDescriptor(x, *residue_box(x, modulus), [1, 1, 1, rows, columns])


LOG2E = 1.4426950408889634


class Results(NamedTuple):
    """``out`` [B, N, H, D] and ``lse`` [B, H, N], whose rows outside the group stay unchanged.

    mass: [1, H, N], the logarithm of a null mass that counts as a key of value 0. merge: with the present contents.
    follows: directly after the launch of another group, overlapping its end. compact: out [B, n, H, D] and lse [B, H,
    n] hold the `BranchGroup.stored_rows` of one class of each head, the only one that a single branch covers.
    """

    out: Tensor
    lse: Tensor
    mass: Tensor | None = None
    merge: bool = False
    follows: bool = False
    compact: bool = False

    @property
    def compiled_for(self) -> tuple[Hashable, ...]:
        """The properties that kernels are compiled for, besides the shape of out."""
        return self.out.dtype, self.mass is None, self.merge, self.follows, self.compact


def launch_arguments(
    tiles: dict[str, tuple[Tensor, int]],
    n_items: int,
    group: BranchGroup,
    heads_per_batch: int,
    causal: bool,
    scale: float,
    config: TileConfig,
) -> Arguments:
    """The common arguments of the fused Triton kernels. ``tiles`` names each operand with its rows per tile; others as
    for `shared_arguments`.
    """
    q, k = tiles["q"][0], tiles["k"][0]
    grid, arguments = shared_arguments(q, k, n_items, group, heads_per_batch, causal, scale, config)
    arguments["cap"] = None
    if group.softcap:
        # Kernels multiply the tanh of products times `cap` by `scale_log2`.
        arguments |= {"cap": scale / group.softcap, "scale_log2": group.softcap * LOG2E}
        # Limits of registers are tuned for kernels without the cap, whose scores are needed longer.
        arguments.pop("maxnreg", None)
    head, tail = arguments["HEAD"], arguments["TAIL"]
    for name, (x, rows) in tiles.items():
        arguments[f"{name}_desc"] = residue_rows(x, group.modulus, rows, head)
        arguments[f"{name}_tail_desc"] = residue_rows(x, group.modulus, rows, tail) if tail else None
    return grid, arguments


def shared_arguments(
    q: Tensor,
    k: Tensor,
    n_items: int,
    group: BranchGroup,
    heads_per_batch: int,
    causal: bool,
    scale: float,
    config: TileConfig,
) -> Arguments:
    """Grid and arguments without descriptors; each of ``n_items`` is visited once per super-segment, batch element and
    one of ``heads_per_batch`` heads.
    """
    n_blocks = q.shape[0] * heads_per_batch * group.n_supers
    dim = q.shape[-1]
    head, tail = tile_columns(dim, q.element_size())
    arguments: dict[str, Any] = {
        "scale_log2": scale * LOG2E,
        "n_supers": group.n_supers,
        "full_supers": group.full_supers,
        "n_kinds": len(group.kinds),
        "n_items": n_items,
        "n_heads": q.shape[2],
        "left_over": q.shape[1] % group.modulus,
        **segment_arguments(group),
        "n_blocks": n_blocks,
        "item_major": int(2 * k.numel() * k.element_size() <= L2_RESIDENT_BYTES),
        "R": group.modulus,
        "HEAD_DIM": q.shape[-1],
        "HEAD": head,
        "TAIL": tail,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": causal,
        "PRECISION": product_precision(q),
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.max_registers is not None:
        arguments["maxnreg"] = config.max_registers
    return (n_items * n_blocks,), arguments


def segment_arguments(group: BranchGroup) -> dict[str, Any]:
    """The lengths and places of super-segments and the sequence, and the tokens before and after it that a query sees.
    For documents, `packing` gives further arguments.
    """
    window_left, window_right = group.window or (0, 0)
    return {
        "visits_ptr": None,
        "super_rows": group.super_rows,
        "super_tokens": group.super_tokens,
        "whole_rows": group.length // group.modulus,
        "longer_classes": group.length % group.modulus,
        "length": group.length,
        "window_left": window_left,
        "window_right": window_right,
        "SHIFTED": group.is_shifted,
        "WINDOWED": group.is_windowed,
    }


def check_head_dim(q: Tensor) -> None:
    """Raises ValueError when kernels have no tiles for the head dim of q [B, N, H, D]."""
    dim = q.shape[-1]
    if not 0 < dim <= LARGEST_HEAD_DIM or dim * q.element_size() % COPY_BYTES:
        raise ValueError(
            f"head dimension {dim} of {q.dtype} is above {LARGEST_HEAD_DIM} or no multiple of {COPY_BYTES} bytes: use "
            "the strided implementation"
        )


def checked_scale(q: Tensor, k: Tensor, v: Tensor, plan: ResiduePlan, scale: float | None) -> float:
    """``scale`` or its default 1 / sqrt(D).

    Raises ValueError when shapes disagree with each other or with ``plan``, the head dimension has no kernel, or the
    scale is not positive: the running maximum is taken before scaling.
    """
    _, length, num_heads, dim = q.shape
    check_head_dim(q)
    if k.shape != v.shape or k.shape != (q.shape[0], length, plan.num_kv_heads, dim):
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)} and {plan.num_kv_heads} K/V heads"
        )
    if (length, num_heads) != (plan.sequence_length, plan.num_heads):
        raise ValueError(f"q {tuple(q.shape)} does not fit a plan for N={plan.sequence_length}, H={plan.num_heads}")
    scale = dim**-0.5 if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale {scale} must be positive: fold the sign into q")
    return scale

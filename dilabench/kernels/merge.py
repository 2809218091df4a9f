# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Merge of a partial attention result into strided rows of an output, in place, by log-sum-exp weights (`lse`)."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from dilabench.kernels.launch_cache import Launch, LaunchCache, layout, stride_unit
from dilabench.kernels.row_programs import row_program
from dilabench.kernels.softmax import weights_of_two

# Integers are not specialised.
_NUMBERS = (
    *(f"{side}_{axis}" for side in ("out", "lse", "part", "part_lse") for axis in "sgal"),
    *(f"n_{axis}" for axis in "gla"),
)
# Rows of lse begin at any position, whose address is a multiple of 16 bytes for some lengths only.
_ANYWHERE = ("lse_ptr", "part_lse_ptr")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def _merge_rows_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    out_s,
    out_g,
    out_l,
    out_a,
    lse_s,
    lse_g,
    lse_a,
    lse_l,
    part_s,
    part_g,
    part_l,
    part_a,
    part_lse_s,
    part_lse_g,
    part_lse_a,
    part_lse_l,
    n_g,
    n_l,
    n_a,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Heads vary fastest over programs, so that programs in flight touch neighbouring memory.
    pid = tl.program_id(0)
    a = (pid % n_a).to(tl.int64)
    rest = pid // n_a
    n_blocks = tl.cdiv(n_l, ROWS)
    block = rest % n_blocks
    group = rest // n_blocks
    g = (group % n_g).to(tl.int64)
    s = (group // n_g).to(tl.int64)
    rows = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    valid = rows < n_l

    lse_at = lse_ptr + s * lse_s + g * lse_g + a * lse_a + rows * lse_l
    lse = tl.load(lse_at, mask=valid, other=float("-inf")).to(tl.float32)
    part_lse_at = part_lse_ptr + s * part_lse_s + g * part_lse_g + a * part_lse_a + rows * part_lse_l
    part_lse = tl.load(part_lse_at, mask=valid, other=float("-inf")).to(tl.float32)
    top, mine, theirs = weights_of_two(lse, part_lse)
    total = mine + theirs
    share = 1.0 / tl.where(total == 0.0, 1.0, total)

    # An empty side is not read: its memory may be uninitialised.
    inside = columns[None, :] < DIM
    out_row = (s * out_s + g * out_g + a * out_a + rows[:, None] * out_l) * UNIT
    part_row = (s * part_s + g * part_g + a * part_a + rows[:, None] * part_l) * UNIT
    out_at = out_ptr + out_row + columns[None, :]
    part_at = part_ptr + part_row + columns[None, :]
    out = tl.load(out_at, mask=inside & (mine > 0.0)[:, None], other=0.0).to(tl.float32)
    part = tl.load(part_at, mask=inside & (theirs > 0.0)[:, None], other=0.0).to(tl.float32)
    merged = out * (mine * share)[:, None] + part * (theirs * share)[:, None]
    # lse is read twice, by the programs that weigh a row and by the one that writes it, which must come last.
    tl.debug_barrier()
    tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=inside & valid[:, None])
    tl.store(lse_at, (top + tl.log(total)).to(lse_ptr.dtype.element_ty), mask=valid)


def merge_rows_(out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
    """Merge ``(branch_out, branch_lse)`` into ``(out, lse)`` in place, as if both were one softmax over both key sets.

    ``out``, ``branch_out``: ``[G, L, A, D]`` views of any strides; ``lse``, ``branch_lse``: ``[G, A, L]`` views
    (natural log). A leading fifth dimension ``[S, G, L, A, D]`` / ``[S, G, A, L]`` merges several groups of a branch in
    one launch. The rows of ``out`` must not overlap. A side with lse -inf counts as empty for any ``out``; rows empty
    on both sides become 0. Raises ValueError when shapes disagree.
    """
    _check_shapes(out, lse, branch_out, branch_lse)
    if out.numel():
        _merge_rows_triton_(out, lse, branch_out, branch_lse)


@lru_cache(maxsize=256)
def _cache(*_layouts: Hashable) -> LaunchCache:
    """The merge of tensors of these layouts, which holds no table."""
    return LaunchCache()


def _merge_rows_triton_(out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
    if branch_out.stride(-1) != 1:
        branch_out = branch_out.contiguous()
    tensors = {"out": out, "lse": lse, "part": branch_out, "part_lse": branch_lse}
    cache = _cache(*map(layout, tensors.values()))
    cache.launch("merge", [tensors], lambda: [_launch(out, lse, branch_out, branch_lse)])


def _launch(out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> Launch:
    if out.dim() == 4:
        out, lse, branch_out, branch_lse = (x.unsqueeze(0) for x in (out, lse, branch_out, branch_lse))
    n_s, n_g, n_l, n_a, dim = out.shape
    columns = triton.next_power_of_2(dim)
    rows, num_warps = row_program("merge", columns)
    programs = n_s * n_g * n_a * triton.cdiv(n_l, rows)
    if programs >= 2**31:
        raise ValueError(
            f"{programs} row blocks pass the 2^31 - 1 of one launch: merge in slices of the first dimension"
        )
    unit = stride_unit(out, branch_out)
    sides = {
        "out": ("sgla", out, unit),
        "lse": ("sgal", lse, 1),
        "part": ("sgla", branch_out, unit),
        "part_lse": ("sgal", branch_lse, 1),
    }
    arguments = {
        **{f"{name}_ptr": x for name, (_, x, _) in sides.items()},
        **{
            f"{name}_{axis}": x.stride(i) // size
            for name, (axes, x, size) in sides.items()
            for i, axis in enumerate(axes)
        },
        "n_g": n_g,
        "n_l": n_l,
        "n_a": n_a,
        "UNIT": unit,
        "DIM": dim,
        "ROWS": rows,
        "COLUMNS": columns,
        "num_warps": num_warps,
    }
    return Launch(_merge_rows_kernel, lambda _: ((programs,), arguments))


def _check_shapes(out: Tensor, lse: Tensor, branch_out: Tensor, branch_lse: Tensor) -> None:
    if out.dim() not in (4, 5) or out.shape != branch_out.shape:
        raise ValueError(
            f"out {tuple(out.shape)} and branch_out {tuple(branch_out.shape)} must be equal"
            " and [G, L, A, D] or [S, G, L, A, D]"
        )
    rows = (*out.shape[:-3], out.shape[-2], out.shape[-3])
    if lse.shape != rows or branch_lse.shape != rows:
        raise ValueError(
            f"lse {tuple(lse.shape)} and branch_lse {tuple(branch_lse.shape)} must be {rows} for out {tuple(out.shape)}"
        )
    if out.stride(-1) != 1:
        raise ValueError(f"out has stride {out.stride(-1)} in the head dimension: it must be contiguous there")

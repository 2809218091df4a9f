# Triton types kernel arguments itself and reads annotations as its own.
# mypy: disable-error-code="no-untyped-def"
"""Forward of block-sparse attention: one program per query tile walks the list of its key tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dilabench.kernels.block_sparse.forward_sm90 import block_sparse_forward_sm90, can_run
from dilabench.kernels.block_sparse.plan import Plan
from dilabench.kernels.fused.row_layout import PER_LENGTH, check_head_dim, product_precision
from dilabench.kernels.launch_cache import COPY_BYTES, Launch
from dilabench.kernels.tuning import TileConfig, padded_dim

_LOG2E = 1.4426950408889634


@triton.jit
def key_bounds(bounds_ptr, key_row, key_rows, RANGES: tl.constexpr):
    """(start, stop) of each range of rows that these keys are hidden from, one after the other."""
    bounds = ()
    for index in tl.static_range(RANGES):
        at = bounds_ptr + 2 * index * key_rows + key_row
        # Triton has no unpacking.
        bounds = bounds + (tl.load(at, key_row < key_rows, 0), tl.load(at + key_rows, key_row < key_rows, 0))  # type: ignore[assignment]  # noqa: RUF005
    return bounds


@triton.jit
def visible_pairs(
    query_row, key_row, left, right, bounds, LEFT: tl.constexpr, RIGHT: tl.constexpr, RANGES: tl.constexpr
):
    """Which pairs of a partly visible tile lie inside (left, right) and in no range of rows that hides the key."""
    seen = query_row == query_row
    if LEFT:
        seen = seen & (key_row >= query_row - left)
    if RIGHT:
        seen = seen & (key_row <= query_row + right)
    for index in tl.static_range(RANGES):
        seen = seen & ((query_row < bounds[2 * index]) | (query_row >= bounds[2 * index + 1]))
    return seen


@triton.jit(do_not_specialize=PER_LENGTH)
def _block_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    spans_ptr,
    entries_ptr,
    order_ptr,
    bounds_ptr,
    scale_log2,
    n_heads,
    heads_per_kv,
    heads_per_mask,
    n_tiles,
    rows,
    key_rows,
    left,
    right,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Head by head, so that one head's keys stay in the L2 cache; inside a head the longest lists first.
    pid = tl.program_id(0)
    batch = pid // n_tiles // n_heads
    head = pid // n_tiles % n_heads
    mask_head = head // heads_per_mask
    tile = tl.load(order_ptr + mask_head * n_tiles + pid % n_tiles)
    span_ptr = spans_ptr + (mask_head * n_tiles + tile) * 3
    entry_ptr = entries_ptr + tl.load(span_ptr)
    n_full = tl.load(span_ptr + 1)
    n_partly = tl.load(span_ptr + 2)
    kv_head = head // heads_per_kv

    q = q_desc.load([batch, head, tile * BLOCK_M, 0]).reshape([BLOCK_M, DIM])
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for _ in tl.range(0, n_full, num_stages=STAGES):
        key = tl.load(entry_ptr) * BLOCK_N
        entry_ptr += 1
        k = k_desc.load([batch, kv_head, key, 0]).reshape([BLOCK_N, DIM])
        logits = tl.dot(q, k.T, input_precision=PRECISION)
        new_top = tl.maximum(top, tl.max(logits, 1) * scale_log2)
        p = tl.math.exp2(logits * scale_log2 - new_top[:, None])
        decay = tl.math.exp2(top - new_top)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        v = v_desc.load([batch, kv_head, key, 0]).reshape([BLOCK_N, DIM])
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top

    query_row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    for _ in tl.range(0, n_partly, num_stages=STAGES):
        key = tl.load(entry_ptr) * BLOCK_N
        entry_ptr += 1
        k = k_desc.load([batch, kv_head, key, 0]).reshape([BLOCK_N, DIM])
        logits = tl.dot(q, k.T, input_precision=PRECISION)
        key_row = (key + tl.arange(0, BLOCK_N))[None, :]
        bounds = key_bounds(bounds_ptr, key_row, key_rows, RANGES)
        seen = (key_row < key_rows) & visible_pairs(
            query_row[:, None], key_row, left, right, bounds, LEFT, RIGHT, RANGES
        )
        logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1) * scale_log2)
        # A row may see nothing yet; -inf - (-inf) must not reach exp2.
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.math.exp2(logits * scale_log2 - safe_top[:, None])
        decay = tl.math.exp2(top - safe_top)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        v = v_desc.load([batch, kv_head, key, 0]).reshape([BLOCK_N, DIM])
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top

    # A row that sees no key has total 0: its out is 0 and its lse -inf.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = (top + tl.log2(total)) * 0.6931471805599453
    lse = tl.where(total == 0.0, float("-inf"), lse)
    out_desc.store([batch, head, tile * BLOCK_M, 0], acc.to(out_desc.dtype).reshape([1, 1, BLOCK_M, DIM]))
    tl.store(lse_ptr + (batch * n_heads + head).to(tl.int64) * rows + query_row, lse, query_row < rows)


def block_sparse_forward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, scale: float, config: TileConfig | None = None
) -> tuple[Tensor, Tensor]:
    """``(out [B, N, H, D], lse [B, H, N] float32)`` over the blocks of ``plan``.

    q [B, N, H, D]; k, v [B, N, K, D] (or as many rows as the plan has keys) with H a multiple of K. ``config`` asks for
    this kernel with that tile shape; without it the Hopper kernel runs where it can. Raises ValueError on shapes that
    do not fit the plan.
    """
    cache = plan.launch_cache("forward", q, k, v, scale, config)
    cache.once("checked", lambda: check(q, k, v, plan))
    if config is None and cache.once("hopper", lambda: can_run(q, k, v, plan)):
        return block_sparse_forward_sm90(q, k, v, plan, scale=scale, cache=cache)
    batch, rows, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, num_heads, rows), dtype=torch.float32, device=q.device)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    cache.launch("forward", [tensors], lambda: [_launch(tensors, plan, scale, config)])
    return out, lse


def _launch(tensors: dict[str, Tensor], plan: Plan, scale: float, config: TileConfig | None) -> Launch:
    q, k, v, out, lse = tensors.values()
    batch, rows, num_heads, dim = q.shape
    config = plan.config(padded_dim(dim), "forward", q.element_size(), config)
    tiles = -(-rows // config.block_m)
    arguments = launch_arguments(q, plan, config, by_key=False) | {
        "q_desc": head_rows(q, config.block_m),
        "k_desc": head_rows(k, config.block_n),
        "v_desc": head_rows(v, config.block_n),
        "out_desc": head_rows(out, config.block_m),
        "lse_ptr": lse,
        "scale_log2": scale * _LOG2E,
        "heads_per_kv": num_heads // k.shape[2],
        "n_tiles": tiles,
        "rows": rows,
    }
    return Launch(_block_forward_kernel, lambda _: ((batch * num_heads * tiles,), arguments))


def launch_arguments(q: Tensor, plan: Plan, config: TileConfig, by_key: bool) -> dict[str, Any]:
    """What every kernel over the tiles of a plan is given, but for its tensors; one by key has no order."""
    spans, entries, order = plan.tables(config, by_key, q.device)
    bounds = plan.bounds(q.device)
    return {
        **({} if by_key else {"order_ptr": order}),
        "spans_ptr": spans,
        "entries_ptr": entries,
        "bounds_ptr": bounds,
        "n_heads": q.shape[2],
        "heads_per_mask": q.shape[2] // plan.mask_heads,
        "key_rows": plan.keys,
        "left": plan.left,
        "right": plan.right,
        "DIM": padded_dim(q.shape[3]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "LEFT": plan.left >= 0,
        "RIGHT": plan.right >= 0,
        "RANGES": len(bounds),
        "PRECISION": product_precision(q),
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def check(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Raises ValueError on shapes that do not fit the plan or the kernels."""
    plan.check(q, k, v)
    check_head_dim(q)


def is_read_in_place(x: Tensor) -> bool:
    """Whether bulk copies can step over x [B, N, H, D] as it lies."""
    steps = all(stride * x.element_size() % COPY_BYTES == 0 for stride in x.stride()[:3])
    return x.stride(3) == 1 and steps and x.data_ptr() % COPY_BYTES == 0


def head_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """``x [B, N, H, D]`` as [B, H, N, D] in tiles of [1, 1, rows, `padded_dim`].

    Reads past an end give 0, writes go nowhere.
    """
    view = (x if is_read_in_place(x) else x.contiguous()).transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, rows, padded_dim(x.shape[3])])

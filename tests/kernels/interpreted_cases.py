"""Runs the kernels in Triton's interpreter on the CPU and prints one JSON object of relative errors against float64.

A script of its own, because TRITON_INTERPRET is read when a kernel is decorated: `test_fused.py` starts it in a fresh
process.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from dilabench.kernels.fused.backward import fused_backward
from dilabench.kernels.fused.forward import fused_forward
from dilabench.kernels.fused.residue_plan import capped_plan, residue_plan
from dilabench.kernels.lse import merge_rows_
from dilabench.kernels.merge import _merge_rows_triton_
from dilabench.kernels.tuning import TileConfig

# name: batch, length, heads, kv heads, dim, segments, rates, causal, offset, offset by, (query, key) tile, cut, dtype
CASES = {
    "plain": (2, 128, 3, 3, 16, (32, 64, 128), (1, 2, 4), False, "modulo", "head", (16, 16), None, torch.float32),
    "causal": (
        1,
        256,
        3,
        3,
        16,
        (64, 128, 256),
        (1, 2, 4),
        True,
        "modulo",
        "head",
        (16, 16),
        ((0, 1, 2),),
        torch.float32,
    ),
    "causal groups": (
        1,
        256,
        3,
        3,
        16,
        (64, 128, 256),
        (1, 2, 4),
        True,
        "modulo",
        "head",
        (32, 16),
        ((0,), (1, 2)),
        torch.float32,
    ),
    "wide query tile": (
        1,
        192,
        2,
        2,
        16,
        (64, 128),
        (1, 2),
        True,
        "modulo",
        "head",
        (32, 16),
        ((0, 1),),
        torch.float32,
    ),
    "wide key tile": (1, 192, 2, 2, 16, (64, 128), (1, 2), True, "modulo", "head", (16, 32), ((0, 1),), torch.float32),
    "short last segment": (
        1,
        320,
        5,
        5,
        16,
        (128, 256),
        (1, 2),
        True,
        "modulo",
        "head",
        (32, 32),
        ((0, 1),),
        torch.float32,
    ),
    "segment beyond N": (
        1,
        192,
        4,
        2,
        16,
        (64, 1000),
        (1, 4),
        False,
        "modulo",
        "kv_head",
        (16, 16),
        None,
        torch.float32,
    ),
    "uncovered rows": (1, 192, 5, 5, 16, (64, 192), (2, 4), False, "modulo", "head", (16, 16), None, torch.float32),
    "gqa head": (1, 128, 6, 2, 16, (64, 128), (1, 2), True, "modulo", "head", (16, 16), ((0, 1),), torch.float32),
    "gqa blocked": (
        2,
        128,
        4,
        2,
        16,
        (64, 128),
        (2, 4),
        True,
        "blocked",
        "head",
        (16, 16),
        ((0,), (1,)),
        torch.float32,
    ),
    "gqa blocked kv": (1, 128, 4, 2, 16, (64, 128), (1, 2), False, "blocked", "kv_head", (16, 16), None, torch.float32),
    "equal segments": (
        1,
        128,
        3,
        3,
        16,
        (64, 64, 128),
        (1, 2, 2),
        False,
        "modulo",
        "head",
        (16, 16),
        ((0, 1, 2),),
        torch.float32,
    ),
    "two tiles of columns": (
        1,
        192,
        2,
        1,
        72,
        (64, 192),
        (1, 2),
        True,
        "modulo",
        "head",
        (16, 16),
        ((0,), (1,)),
        torch.float16,
    ),
    "half": (1, 128, 2, 2, 32, (64, 128), (1, 2), True, "modulo", "head", (32, 32), ((0, 1),), torch.float16),
}


# The only branch of each head.
GROUPED = {
    "grouped heads": (
        (1, 107, 6, 2, 16, (64, 128, 400), (1, 2, 4), False, "modulo", "head", (16, 16), ((0, 1, 2),), torch.float32),
        (0, 0, 1, 1, 2, 2),
    ),
    "grouped heads, causal, apart": (
        (2, 128, 3, 3, 16, (48, 64), (1, 2), True, "blocked", "head", (16, 16), None, torch.float32),
        (0, 0, 1),
    ),
}


# How far queries see: one side, both, within a tile, beyond some segments.
WINDOWED = {
    "window": (
        (1, 107, 4, 2, 16, (20, 54, 300), (1, 2, 4), False, "modulo", "head", (16, 16), None, torch.float32),
        None,
        (5, 40),
    ),
    "window, causal": (
        (2, 171, 3, 3, 16, (64, 95), (1, 2), True, "modulo", "head", (32, 16), None, torch.float32),
        None,
        (33, 0),
    ),
    "window of branches together": (
        (1, 171, 4, 2, 16, (64, 128), (1, 4), False, "modulo", "kv_head", (16, 32), ((0, 1),), torch.float32),
        None,
        (30, 3),
    ),
    "window of branches together, causal": (
        (1, 171, 3, 3, 16, (64, 128), (1, 2), True, "modulo", "head", (16, 16), ((0, 1),), torch.float32),
        None,
        (21, -1),
    ),
    "window, rates beside segments": (
        (1, 171, 4, 2, 16, (50, 95), (4, 7), False, "modulo", "head", (16, 16), None, torch.float32),
        None,
        (-1, 20),
    ),
    "window, grouped heads": (
        (1, 107, 6, 2, 16, (64, 400), (1, 2), False, "modulo", "head", (16, 16), None, torch.float32),
        (0, 0, 0, 1, 1, 1),
        (40, 0),
    ),
}


# The softcap comes last.
CAPPED = {
    "softcap": (CASES["plain"], None, (-1, -1), 0.8),
    "softcap, causal": (CASES["causal"], None, (-1, -1), 1.5),
    "softcap, window": (*WINDOWED["window, causal"], 0.7),
    "softcap, grouped heads": (*GROUPED["grouped heads"], (-1, -1), 2.0),
    "softcap, half": (CASES["half"], None, (-1, -1), 1.0),
}


def multiplicity(
    n: int,
    heads: int,
    kv_heads: int,
    segments,
    rates,
    causal: bool,
    offset: str,
    offset_by: str,
    branch_of_head=None,
    window=(-1, -1),
) -> Tensor:
    """C[h, i, j] straight from the definition."""
    t = torch.arange(n)
    count = torch.zeros(heads, n, n, dtype=torch.float64)
    for h in range(heads):
        index, of = (h, heads) if offset_by == "head" else (h // (heads // kv_heads), kv_heads)
        for branch, (w, r) in enumerate(zip(segments, rates, strict=True)):
            if branch_of_head is not None and branch_of_head[h] != branch:
                continue
            w = min(w, n)
            on = t % w % r == (index % r if offset == "modulo" else index // -(-of // r))
            count[h] += (t[:, None] // w == t // w) & on[:, None] & on
    before, behind = (n if tokens < 0 else tokens for tokens in window)
    ahead = t - t[:, None]
    return count * ((-before <= ahead) & (ahead <= (0 if causal else behind)))


def union_softmax(
    q: Tensor, k: Tensor, v: Tensor, count: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) by one softmax over the multiset; rows that see nothing get 0 and -inf, and pass no gradient."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    seen = count.sum(-1, keepdim=True) > 0
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + torch.where(seen, count, 1.0).log()
    p = torch.softmax(logits, -1) * seen
    lse = torch.logsumexp(logits, -1).masked_fill(~seen[..., 0], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def fused(case, branch_of_head=None, window=(-1, -1), softcap=None) -> dict[str, float]:
    batch, n, heads, kv_heads, dim, segments, rates, causal, offset, offset_by, tiles, cut, dtype = case
    generator = torch.Generator().manual_seed(n + heads)
    packed = torch.randn(batch, n, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    q, k, v = packed.split((heads, kv_heads, kv_heads), 2)
    dout = torch.randn(batch, n, heads, dim, generator=generator).to(dtype)
    where = (offset, offset_by, min(tiles), cut)
    more = {"branch_of_head": branch_of_head, "window": window}
    plan = capped_plan(residue_plan(segments, rates, n, heads, kv_heads, causal, *where, **more), softcap)
    config = TileConfig(*tiles, 4, 2)
    out, lse = fused_forward(q, k, v, plan, config=config)
    got = (out, *fused_backward(dout, q, k, v, out, lse, plan, query_config=config, key_config=config))

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    count = multiplicity(n, heads, kv_heads, segments, rates, causal, offset, offset_by, branch_of_head, window)
    exact, exact_lse = union_softmax(*leaves, count, softcap)
    want = (exact.detach(), *torch.autograd.grad(exact, leaves, dout.double()))
    errors = {name: relative(g, w) for name, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=True)}
    empty = exact_lse == float("-inf")
    errors["lse"] = (lse.double() - exact_lse.detach())[~empty].abs().max().item()
    errors["empty rows"] = (
        float(not torch.equal(lse == float("-inf"), empty)) + out.transpose(1, 2)[empty].abs().sum().item()
    )
    # None, far below and far above the keys' own, and in between.
    log_mass = torch.randn(1, heads, n, generator=generator) * 3
    log_mass[..., ::5], log_mass[..., 1::5], log_mass[..., 2::5] = float("-inf"), -200.0, 200.0
    heavier, heavier_lse = fused_forward(q, k, v, plan, log_mass=log_mass, config=config)
    exact_heavier_lse = torch.logaddexp(exact_lse.detach(), log_mass.double())
    share = torch.exp(exact_lse.detach() - exact_heavier_lse).nan_to_num(0.0)
    errors["out with a null mass"] = relative(heavier, want[0] * share.transpose(1, 2)[..., None])
    there = exact_heavier_lse.isfinite()
    errors["lse with a null mass"] = (heavier_lse.double() - exact_heavier_lse)[there].abs().max().item()
    return errors


def merge(groups: bool) -> dict[str, float]:
    """The kernel against the plain PyTorch merge, on a diagonal view (``groups``: five dimensions) with empty rows on
    both sides.
    """
    generator = torch.Generator().manual_seed(5)
    n, heads, dim, r = 37, 6, 24, 3
    out, lse = torch.randn(n, heads, dim, generator=generator), torch.randn(heads, n, generator=generator) * 40
    rows, a = n // r, heads // r
    shape = (r if groups else 1, 1, rows, a, dim)
    view = (shape, (heads * dim + dim, n * heads * dim, r * heads * dim, r * dim, 1))
    lse_view = ((shape[0], 1, a, rows), (n + 1, heads * n, r * n, r))
    part, part_lse = torch.randn(shape, generator=generator), torch.randn(lse_view[0], generator=generator) * 40
    part_lse[..., ::3], part[:, :, ::3] = float("-inf"), 0.0
    torch.as_strided(lse, *lse_view)[..., ::2] = float("-inf")
    torch.as_strided(out, *view)[:, :, ::2] = 0.0
    want, want_lse = out.clone(), lse.clone()
    pick = (lambda x: x) if groups else (lambda x: x[0])
    operands = (pick(part), pick(part_lse))
    merge_rows_(pick(torch.as_strided(want, *view)), pick(torch.as_strided(want_lse, *lse_view)), *operands)
    # The kernel does not read what is empty.
    part[:, :, ::3] = torch.as_strided(out, *view)[:, :, ::2] = float("nan")
    _merge_rows_triton_(pick(torch.as_strided(out, *view)), pick(torch.as_strided(lse, *lse_view)), *operands)
    same = torch.equal(lse == float("-inf"), want_lse == float("-inf"))
    finite = want_lse.isfinite()
    return {
        "out": relative(out, want.double()),
        "lse": relative(lse[finite], want_lse[finite].double()) + float(not same),
        "empty": float((want_lse == float("-inf")).sum()),
    }


if __name__ == "__main__":
    results = {name: fused(case) for name, case in CASES.items()}
    results |= {name: fused(*case) for name, case in (GROUPED | WINDOWED | CAPPED).items()}
    results["merge one group"], results["merge all groups"] = merge(groups=False), merge(groups=True)
    sys.stdout.write(json.dumps(results))

"""Run by test_hopper.py under TRITON_INTERPRET=1; prints errors of the cases that it names, each with the mask behind
it, as one line of JSON.

The Hopper kernels run as they stand (`gluon_on_cpu`), from the launches that both kinds of attention make.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gluon_on_cpu
import numpy as np
import torch
from interpreted_block_cases import any_bounds, expected
from interpreted_cases import multiplicity, relative, union_softmax
from interpreted_packings import expected as expected_of_documents
from torch import Tensor

from dilabench.kernels import tuning
from dilabench.kernels.block_sparse import backward as blocks_backward
from dilabench.kernels.block_sparse import forward as blocks_forward
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.kernels.fused import backward, backward_at_once, forward, row_layout
from dilabench.kernels.fused import residue_plan as residue_plan_module
from dilabench.kernels.fused.packing import Packing
from dilabench.kernels.fused.residue_plan import ResiduePlan, document_plan, residue_plan
from dilabench.kernels.tuning import RULES, Rule, TileConfig

with gluon_on_cpu.in_its_place():
    # Imported by those who launch them, later.
    for name in ("forward", "narrow_forward", "backward"):
        import_module(f"dilabench.kernels.fused.sm90.{name}")

# B, N, H, K, D, segments, rates, groups
DILATED = {
    "one group": (2, 128, 4, 2, 32, (64, 128), (1, 2), ((0, 1),)),
    "two groups, one in two passes": (1, 128, 4, 4, 32, (16, 128), (1, 2), ((0,), (1,))),
    "uncovered rows": (1, 128, 4, 4, 128, (64, 128), (2, 4), ((0,), (1,))),
    "odd length": (1, 107, 4, 2, 32, (32, 64), (1, 1), ((0, 1),)),
    "tokens left over": (1, 107, 3, 1, 32, (64, 400), (1, 2), ((0, 1),)),
    "rates beside segments, left over": (1, 171, 4, 2, 32, (70, 95), (4, 3), None),
    "rates beside segments, boxes, left over": (2, 277, 2, 1, 48, (130,), (4,), None),
    "rates beside segments, boxes, padded": (2, 171, 2, 1, 48, (130,), (4,), None),
    "batch, padded": (2, 107, 2, 1, 32, (150,), (4,), None),
    "batch, left over": (2, 107, 2, 1, 32, (64, 400), (1, 2), ((0, 1),)),
    "batch, rates beside segments, left over": (2, 171, 2, 1, 32, (70, 95), (4, 3), None),
    "batch, window, left over": (2, 171, 2, 1, 80, (70, 95), (4, 3), None),
    "window": (1, 192, 2, 1, 32, (64, 192), (1, 2), ((0, 1),)),
    "window, left over": (1, 171, 2, 1, 80, (70, 95), (4, 3), None),
    "window, causal, boxes, padded": (2, 171, 2, 1, 48, (130, 171), (4, 1), None),
    "growing logits": (1, 256, 2, 1, 32, (128, 256), (1, 2), ((0,), (1,))),
    "two tiles of columns": (1, 128, 2, 1, 80, (64, 128), (1, 2), ((0,), (1,))),
    "columns of zeros": (2, 128, 2, 1, 48, (64, 128), (1, 2), ((0,), (1,))),
    "grouped heads": (1, 128, 4, 2, 32, (64, 128), (1, 2), ((0,), (1,))),
    "half tiles": (1, 192, 2, 1, 128, (64, 192), (1, 2), ((0, 1),)),
    "half tiles, tokens left over": (1, 107, 3, 1, 128, (32, 400), (1, 2), ((0,), (1,))),
}
# Through the kernel for narrow heads.
NARROW = {
    "narrow, several steps": (1, 192, 2, 1, 16, (64, 192), (1, 2), ((0, 1),)),
    "narrow, merged": (1, 128, 2, 2, 16, (32, 128), (1, 2), ((0,), (1,))),
    "narrow, tokens left over": (1, 107, 3, 1, 16, (64, 400), (1, 2), ((0, 1),)),
    "narrow, growing logits": (1, 256, 2, 1, 16, (128, 256), (1, 2), ((0,), (1,))),
    "narrow, columns added": (1, 128, 2, 1, 8, (64, 128), (1, 2), ((0, 1),)),
    "narrow, rates beside segments, left over": (1, 171, 2, 1, 16, (70, 130), (4, 3), None),
    "narrow, window": (1, 192, 2, 1, 16, (64, 192), (1, 2), ((0, 1),)),
    "narrow, window, left over": (1, 171, 2, 1, 16, (70, 130), (4, 3), None),
    "narrow, summed apart": (1, 160, 2, 1, 48, (32, 160), (1, 2), ((0,), (1,))),
    "narrow, columns added, tokens left over": (1, 107, 2, 1, 40, (64, 400), (1, 2), ((0, 1),)),
    "narrow, padded": (1, 107, 1, 1, 16, (150,), (4,), None),
    "narrow, batch, left over": (2, 107, 1, 1, 16, (64, 400), (1, 2), ((0, 1),)),
    "narrow, grouped heads, tokens left over": (1, 107, 3, 1, 16, (64, 400), (1, 2), ((0, 1),)),
}
# Documents in one launch of each pass: their lengths, H, K, D, segments, rates, window.
DOCUMENTS = {
    "documents": ((70, 1, 130, 33), 4, 2, 32, (64, 128), (1, 2), (-1, -1)),
    "documents, window": ((33, 97, 64), 2, 1, 80, (70, 95), (4, 3), (40, 7)),
    "documents, boxes": ((130, 2, 75), 2, 1, 48, (64, 400), (1, 2), (-1, -1)),
    "narrow, documents": ((70, 1, 130, 33), 2, 1, 16, (64, 128), (1, 2), (-1, -1)),
}
# The only branch of each head.
BRANCH_OF_HEAD = {DILATED["grouped heads"]: (0, 0, 1, 1), NARROW["narrow, grouped heads, tokens left over"]: (0, 1, 1)}
# How many tokens before and behind it a query sees, causal masks aside.
WINDOWS = {
    DILATED["window"]: (40, 7),
    DILATED["window, left over"]: (20, 50),
    DILATED["window, causal, boxes, padded"]: (61, 3),
    DILATED["batch, window, left over"]: (20, 50),
    NARROW["narrow, window"]: (70, 20),
    NARROW["narrow, window, left over"]: (9, 45),
}
# Their logits grow by 16 at two tokens: in both branches weights by the maximum of the first two tiles overflow.
GROWING = (DILATED["growing logits"], NARROW["narrow, growing logits"])
# N, H, K, D, block, mask heads, ranges of rows that hide each key
BLOCKS = {
    "one mask": (128, 4, 2, 32, 32, 1, 0),
    "mask per head": (96, 4, 2, 32, 32, 4, 0),
    "shared tiles": (192, 2, 1, 128, 32, 1, 0),
    "one range": (128, 2, 1, 32, 32, 1, 1),
    "two ranges": (128, 2, 2, 32, 32, 2, 2),
}
FORWARD, NARROW_FORWARD, BACKWARD = TileConfig(32, 32, 4, 2), TileConfig(16, 32, 4, 2), TileConfig(16, 32, 4, 2)


def forward_rules(smallest: int) -> list[Rule]:
    """The specialised kernel from a head dim on, the narrow one below."""
    own = Rule((smallest, 128), "specialized", FORWARD, hopper=True, least_tile=32, exact=True)
    below = Rule((1, smallest - 1), "narrow", NARROW_FORWARD, hopper=True, least_tile=32)
    return [own, below, *(rule for rule in RULES["forward"] if not rule.hopper)]


HOPPER_RULES = {
    "forward": forward_rules(32),
    "backward_key": [
        Rule((32, 128), "at_once", BACKWARD, hopper=True, least_tile=32),
        *(rule for rule in RULES["backward_key"] if not rule.hopper),
    ],
}


def operands_of(case: tuple) -> tuple[Tensor, ...]:
    batch, n, heads, kv_heads, dim, *_ = case
    generator = torch.Generator().manual_seed(n + heads)
    shapes = [(batch, n, one, dim) for one in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator).half() for shape in shapes)
    if case in GROWING:
        token = torch.arange(n)[:, None]
        q[..., 0], k[..., 0] = 16 * dim**0.5, (token >= 64).half() + (token >= 128).half() - 1
    return q, k, v, dout


def plan_of(case: tuple, causal: bool) -> ResiduePlan:
    _, n, heads, kv_heads, _, segments, rates, cut = case
    more = {"cut": cut, "branch_of_head": BRANCH_OF_HEAD.get(case), "window": WINDOWS.get(case, (-1, -1))}
    return residue_plan(segments, rates, n, heads, kv_heads, causal, tile=16, **more)


def own_kernel(case: tuple) -> Any:
    """Within it the forward kernel is that for narrow heads or the other one."""
    narrow = case in NARROW.values() or case == DOCUMENTS["narrow, documents"]
    return mock.patch.dict(RULES, {"forward": forward_rules(65 if narrow else 32)})


def dilated(case: tuple, causal: bool) -> dict[str, float]:
    _, n, heads, kv_heads, _, segments, rates, _ = case
    q, k, v, dout = operands_of(case)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    only, window = BRANCH_OF_HEAD.get(case), WINDOWS.get(case, (-1, -1))
    counts = multiplicity(n, heads, kv_heads, segments, rates, causal, "modulo", "head", only, window)
    exact, exact_lse = union_softmax(*leaves, counts)
    want = torch.autograd.grad(exact, leaves, dout.double())
    with own_kernel(case):
        return dilated_errors(plan_of(case, causal), (q, k, v, dout), (exact, exact_lse), want)


def dilated_errors(
    plan: ResiduePlan, operands: tuple[Tensor, ...], right: tuple[Tensor, Tensor], want: tuple[Tensor, ...]
) -> dict[str, float]:
    q, k, v, dout = operands
    out, lse = forward.fused_forward(q, k, v, plan)
    got = backward.fused_backward(dout, q, k, v, out, lse, plan)
    return forward_errors((out, lse), right) | errors(got, want)


def apart(case: tuple, causal: bool) -> dict[str, float]:
    """Every branch by itself, merged with weights that are constants."""
    _, n, heads, kv_heads, _, segments, rates, _ = case
    q, k, v, dout = operands_of(case)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    window = WINDOWS.get(case, (-1, -1))
    branches = [
        union_softmax(*leaves, multiplicity(n, heads, kv_heads, (w,), (r,), causal, "modulo", "head", None, window))
        for w, r in zip(segments, rates, strict=True)
    ]
    exact_lse = torch.stack([lse for _, lse in branches]).logsumexp(0)
    shares = [(lse - exact_lse).exp().nan_to_num().detach() for _, lse in branches]
    exact = sum(share.transpose(1, 2)[..., None] * out for share, (out, _) in zip(shares, branches, strict=True))
    want = torch.autograd.grad(exact, leaves, dout.double())
    plan = residue_plan(segments, rates, n, heads, kv_heads, causal, tile=16, separate=True, window=window)
    with own_kernel(case):
        out, lse, own = forward.fused_forward_partials(q, k, v, plan)
        got = backward.fused_backward(dout, q, k, v, out, lse, plan, partials=own)
    return forward_errors((out, lse), (exact, exact_lse)) | errors(got, want)


def documents(case: tuple, causal: bool, detached: bool = False) -> dict[str, float]:
    lengths, heads, kv_heads, dim, segments, rates, window = case
    bounds = tuple(accumulate(lengths, initial=0))
    operands = operands_of((1, bounds[-1], heads, kv_heads, dim))
    q, k, v, dout = operands
    about = (heads, kv_heads, causal, "modulo", "head", 16)
    packing, own = Packing(bounds), None
    with mock.patch.object(residue_plan_module, "_SHORTEST_DOCUMENTS", 1):
        plan = document_plan(segments, rates, packing, *about, separate=detached, window=window)
    with own_kernel(case):
        if detached:
            out, lse, own = forward.fused_forward_partials(q, k, v, plan, packing=packing)
        else:
            out, lse = forward.fused_forward(q, k, v, plan, packing=packing)
        got = backward.fused_backward(dout, q, k, v, out, lse, plan, partials=own, packing=packing)
    about = (causal, "modulo", "head", None, window)
    exact, exact_lse, *want = expected_of_documents(operands, bounds, segments, rates, detached, *about)
    return forward_errors((out, lse), (exact, exact_lse.transpose(1, 2))) | errors(got, want)


def documents_apart(case: tuple, causal: bool) -> dict[str, float]:
    """Every branch by itself, merged with weights that are constants."""
    return documents(case, causal, detached=True)


def poisoned(case: tuple, causal: bool) -> dict[str, float]:
    """What NaN in one batch item does to the item before it, whose last tile reaches beyond its end."""
    operands, plan = operands_of(case), plan_of(case, causal)

    def first_item() -> list[Tensor]:
        q, k, v, dout = operands
        out, lse = forward.fused_forward(q, k, v, plan)
        return [x[0] for x in (out, lse, *backward.fused_backward(dout, q, k, v, out, lse, plan))]

    with own_kernel(case):
        clean = first_item()
        for x in operands:
            x[1] = torch.nan
        names = ("out", "lse", "dq", "dk", "dv")
        return {name: float(not torch.equal(a, b)) for name, a, b in zip(names, clean, first_item(), strict=True)}


def with_null_mass() -> dict[str, float]:
    """A key of value 0 for each row, which the kernel adds where it writes its result."""
    n, heads, segments, rates = 128, 2, (64, 128), (1, 2)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, heads, 32, generator=generator).half() for _ in range(3))
    mass = torch.randn(1, heads, n, generator=generator).masked_fill(torch.arange(n) % 3 == 0, -torch.inf)
    plan = residue_plan(segments, rates, n, heads, heads, False, tile=16, cut=((0, 1),))
    counts = multiplicity(n, heads, heads, segments, rates, False, "modulo", "head")
    exact, lse = union_softmax(*(x.double() for x in (q, k, v)), counts)
    total = torch.logaddexp(lse, mass.double())
    exact = exact * torch.exp(lse - total).transpose(1, 2)[..., None]
    return forward_errors(forward.fused_forward(q, k, v, plan, log_mass=mass), (exact, total))


def blocks(case: tuple, causal: bool) -> dict[str, float]:
    n, heads, kv_heads, dim, block, mask_heads, ranges = case
    mask = np.random.default_rng(1).random((mask_heads, n // block, n // block)) < 0.6
    mask[:, :, 0] = True
    plan = BlockPlan(mask, block, n, causal, hidden=any_bounds(n, ranges) if ranges else None)
    generator = torch.Generator().manual_seed(n)
    q, k, v, dout = (
        torch.randn(1, n, one, dim, generator=generator).half() for one in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact, exact_lse = expected(*leaves, plan)
    want = torch.autograd.grad(exact, leaves, dout.double())
    out, lse = blocks_forward.block_sparse_forward(q, k, v, plan, scale=dim**-0.5)
    got = blocks_backward.block_sparse_backward(dout, q, k, v, out, lse, plan, scale=dim**-0.5)
    return forward_errors((out, lse), (exact, exact_lse)) | errors(got, want)


def forward_errors(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], what: str = "") -> dict[str, float]:
    (out, lse), (right, right_lse) = got, want
    seen = torch.isfinite(right_lse)
    same_rows = bool((torch.isfinite(lse) == seen).all()) and not out.transpose(1, 2)[~seen].any()
    worst = (lse - right_lse)[seen].abs().max().item() if same_rows else torch.inf
    return {f"{what}out": relative(out, right), f"{what}lse": worst}


def errors(got: Any, want: Any, what: str = "") -> dict[str, float]:
    return {what + name: relative(g, w) for name, g, w in zip(("dq", "dk", "dv"), got, want, strict=True)}


def counted(case: Any, *arguments: Any) -> dict[str, float]:
    """The errors of a case, and how often it launched each kernel."""
    launched = gluon_on_cpu.Kernel.launched
    launched.clear()
    found = case(*arguments)
    kernels = ("forward", "narrow_forward", "backward")
    return found | {f"{kernel} launches": launched[f"dilabench.kernels.fused.sm90.{kernel}"] for kernel in kernels}


def of_name(name: str, causal: bool) -> dict[str, float]:
    if name == "null mass":
        return counted(with_null_mass)
    if name in BLOCKS:
        return counted(blocks, BLOCKS[name], causal)
    cases = DILATED | NARROW | DOCUMENTS
    name, _, kind = (name, "", "") if name in cases else name.rpartition(", ")
    if name in DOCUMENTS:
        return counted({"": documents, "apart": documents_apart}[kind], cases[name], causal)
    return counted({"": dilated, "poisoned": poisoned, "apart": apart}[kind], cases[name], causal)


def stay_on_one_core() -> None:
    """Partitions are threads that take turns: it takes half as long again where they wake each other on two cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


if __name__ == "__main__":
    stay_on_one_core()
    hopper = mock.Mock(return_value=True)
    with (
        mock.patch.object(forward, "on_hopper", hopper),
        mock.patch.object(row_layout, "on_hopper", hopper),
        mock.patch.object(backward_at_once, "on_hopper", hopper),
        mock.patch.object(blocks_forward, "on_hopper", hopper),
        # Fewer than there is work for, so that programs that stay walk over several tiles.
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(multi_processor_count=3)),
        mock.patch.dict(RULES, HOPPER_RULES),
        mock.patch.object(backward_at_once, "_is_faster", mock.Mock(return_value=True)),
        mock.patch.object(blocks_backward, "blocks_at_once_are_faster", mock.Mock(return_value=True)),
        # So that heads follow each other, two K/V heads at a time in what is shorter.
        mock.patch.object(tuning, "_PROGRAMS_OF_128_COLUMNS", 1.25),
        # So that branches that nest are merged class by class.
        mock.patch.object(tuning, "MANY_TOKENS", 16),
        # So that lists of a few tiles are shared.
        mock.patch.multiple(tuning, LEAST_SHARED_STEPS=2, SHARING_PROGRAMS=64),
    ):
        results = {case: of_name(*json.loads(case)) for case in sys.argv[2:]}
    sys.stdout.write(json.dumps(results))

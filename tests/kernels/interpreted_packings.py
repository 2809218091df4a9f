"""Run by test_packing.py under TRITON_INTERPRET=1: random packings of documents through the fused kernels in one launch
per pass, against each document by itself in float64. Prints the largest error of each random packing, as JSON.

The arguments are numbers of packings, from the first to before the last.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import accumulate, pairwise
from typing import Any

import torch
from interpreted_cases import multiplicity, relative, union_softmax
from torch import Tensor

from dilabench.kernels import tuning
from dilabench.kernels.fused.backward import fused_backward
from dilabench.kernels.fused.forward import fused_forward, fused_forward_partials
from dilabench.kernels.fused.packing import Packing
from dilabench.kernels.fused.partials import partial_places
from dilabench.kernels.fused.residue_plan import document_plan
from dilabench.kernels.tuning import TileConfig

DIM = 16
BRANCHES = (
    ((32, 64), (1, 2)),
    ((16, 64, 128), (1, 2, 4)),
    ((50, 95), (4, 7)),
    ((64,), (1,)),
    ((20, 54, 300), (1, 2, 4)),
    ((64, 128), (2, 4)),
)


def of_number(number: int) -> dict[str, float]:
    choose = random.Random(number)
    # The longest are beyond the largest tile and all segments but one.
    lengths = [choose.choice((1, 2, 15, 16, 17, 33, 64, choose.randint(1, 140))) for _ in range(choose.randint(1, 5))]
    segments, rates = BRANCHES[number % len(BRANCHES)]
    causal, detached = choose.random() < 0.5, choose.random() < 0.3 and len(segments) > 1
    kv_heads = choose.choice((1, 2))
    heads = kv_heads * choose.choice((1, 2))
    window = choose.choice(((-1, -1), (-1, -1), (choose.randint(0, 80), 0 if causal else choose.randint(0, 40))))
    offset, offset_by = choose.choice(("modulo", "blocked")), choose.choice(("head", "kv_head"))
    branch_of_head = None
    if not detached and choose.random() < 0.25:
        branch_of_head = tuple(sorted(choose.randrange(len(segments)) for _ in range(heads)))
    tiles = choose.choice(((16, 16), (32, 16), (16, 32)))
    bounds = tuple(accumulate(lengths, initial=0))
    generator = torch.Generator().manual_seed(number)
    q, dout = torch.randn(2, 1, bounds[-1], heads, DIM, generator=generator)
    k, v = torch.randn(2, 1, bounds[-1], kv_heads, DIM, generator=generator)
    about = (heads, kv_heads, causal, offset, offset_by)
    packing, config = Packing(bounds), TileConfig(*tiles, 4, 2)
    if choose.random() < 0.5:
        # On the device, with empty documents, the last one perhaps behind the last bound.
        among = [*sorted((*bounds[:-1], *choose.choices(bounds, k=2))), *bounds[-1:] * choose.randint(0, 1)]
        packing = Packing(torch.tensor(among, dtype=torch.int32), bounds[-1], max(lengths) + choose.randint(0, 40))
    plan = document_plan(
        segments, rates, packing, *about, 16, None, separate=detached, branch_of_head=branch_of_head, window=window
    )
    # Branches of long documents are merged class by class.
    partial_places.cache_clear()
    tuning.MANY_TOKENS, tuning.MANY_TOKENS_OF_A_DOCUMENT = choose.choice(((0, 0), (128, 32)))
    if detached:
        out, lse, own = fused_forward_partials(q, k, v, plan, config=config, packing=packing)
    else:
        (out, lse), own = fused_forward(q, k, v, plan, config=config, packing=packing), None
    tiles_of_backward = {"query_config": config, "key_config": config}
    got = fused_backward(dout, q, k, v, out, lse, plan, **tiles_of_backward, partials=own, packing=packing)
    about = (causal, offset, offset_by, branch_of_head, window)
    want = expected((q, k, v, dout), bounds, segments, rates, detached, *about)
    return errors((out, lse.transpose(1, 2), *got), want, dout)


def expected(
    operands: tuple[Tensor, ...],
    bounds: tuple[int, ...],
    segments: tuple[int, ...],
    rates: tuple[int, ...],
    detached: bool,
    *about: Any,
) -> list[Tensor]:
    """out, lse [1, T, H], dq, dk and dv of each document by itself, one after another; about: as for `multiplicity`."""
    q, k, v, dout = operands
    parts = []
    for start, stop in pairwise(bounds):
        leaves = [x[:, start:stop].double().requires_grad_() for x in (q, k, v)]
        branches = [((w,), (r,)) for w, r in zip(segments, rates, strict=True)] if detached else [(segments, rates)]
        heads = q.shape[2], k.shape[2]
        each = [union_softmax(*leaves, multiplicity(stop - start, *heads, *of, *about)) for of in branches]
        exact_lse = torch.stack([lse for _, lse in each]).logsumexp(0)
        shares = [(lse - exact_lse).exp().nan_to_num().detach() for _, lse in each]
        weighed = (share.transpose(1, 2)[..., None] * out for share, (out, _) in zip(shares, each, strict=True))
        exact = sum(weighed) if detached else each[0][0]
        gradients = torch.autograd.grad(exact, leaves, dout[:, start:stop].double())
        parts.append((exact.detach(), exact_lse.detach().transpose(1, 2), *gradients))
    return [torch.cat(one, 1) for one in zip(*parts, strict=True)]


def errors(got: tuple[Tensor, ...], want: list[Tensor], dout: Tensor) -> dict[str, float]:
    (out, lse, *gradients), (right, right_lse, *right_gradients) = got, want
    empty = right_lse.isinf()
    found = {"empty rows": float(not torch.equal(lse.isinf(), empty)) + out[empty].abs().sum().item()}
    found["lse"] = (lse - right_lse)[~empty].abs().max().item() if not empty.all() else 0.0
    found["out"] = relative(out, right) if right.any() else out.abs().max().item()
    for name, one, right_one in zip(("dq", "dk", "dv"), gradients, right_gradients, strict=True):
        # Where a row sees one key alone, gradients of scores are 0 but for rounding.
        found[name] = ((one.double() - right_one).norm() / (right_one.norm() + 0.1 * dout.norm())).item()
    return found


def poisoned(make: Any) -> Any:
    """The function, with NaN in the memory that it leaves uninitialised."""

    def filled(*arguments: Any, **options: Any) -> Tensor:
        x: Tensor = make(*arguments, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    return filled


if __name__ == "__main__":
    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    Tensor.new_empty = poisoned(Tensor.new_empty)  # type: ignore[method-assign]
    first, last = map(int, sys.argv[-2:])
    sys.stdout.write(json.dumps({number: of_number(number) for number in range(first, last)}))

"""Runs the kernels of split keys in Triton's interpreter on random cases, and prints what differs from the formula.

A script of its own, because TRITON_INTERPRET is read when a kernel is decorated: `test_split_keys.py` starts it in a
fresh process. The first argument is a dtype, the second the number of cases of each kind.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, NamedTuple
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from dilabench.attention import attention, call, operands
from dilabench.choice.rules import Choice
from dilabench.contracts import BuildContext
from dilabench.impls.split_keys import SplitKeys, build
from dilabench.kernels import split_keys
from dilabench.kernels.key_segments import Split, SplitTile
from dilabench.patterns import DilatedPattern
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.workload.spec import Window, Workload

KINDS = ("dense", "causal", "window", "band", "dilated", "dilated causal", "dilated window")
HELD = ("batch", "lengths", "spans", "packed")
# Channels of keys and of values: of one width, of two, and of multi-head latent attention.
WIDTHS = ((64, 64), (128, 128), (24, 24), (80, 80), (48, 32), (72, 64), (16, 80), (192, 128), (576, 512))


class Case(NamedTuple):
    """A call over `rows` last rows of up to `keys` keys; `held`: whether all are there, or as many as tensors say."""

    pattern: Pattern
    window: Window
    held: str
    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype


def drawn(draw: random.Random, kind: str, held: str, widths: tuple[int, int], dtype: torch.dtype) -> Case:
    kv_heads, group = draw.choice((1, 2, 3)), draw.choice((1, 2, 4, 5))
    rows = draw.choice((1, 1, 2, 5, 17))
    keys = draw.randint(rows, 300)
    window = {
        "dense": (-1, -1),
        "dilated": (-1, -1),
        "window": (draw.randint(0, keys), 0),
        "band": (draw.randint(0, keys), draw.randint(0, 5)),
        "dilated window": (draw.randint(0, keys), draw.choice((0, 3))),
    }.get(kind, (-1, 0))
    pattern: Pattern = DENSE
    if kind.startswith("dilated"):
        count = draw.randint(1, 4)
        pattern = DilatedPattern(
            segment_lengths=tuple(sorted(draw.sample((7, 12, 32, 50, 64, 128, 5000), count))),
            dilation_rates=tuple(draw.choice((1, 1, 2, 3, 4, 8)) for _ in range(count)),
            heads=draw.choice(("all", "grouped")) if kv_heads * group >= count else "all",
            offset=draw.choice(("modulo", "blocked")),
            offset_by=draw.choice(("head", "kv_head")),
        )
    heads = kv_heads * group, kv_heads
    return Case(pattern, window, held, draw.randint(1, 3), rows, keys, *heads, *widths, dtype)


def formula(q: Tensor, k: Tensor, v: Tensor, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out [M, H, Dv], lse [H, M], in this dtype, of q [M, H, D], the last rows of k [N, K, D], v [N, K, Dv]."""
    rows, keys = len(q), len(k)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    shape = SequenceShape(keys, case.heads, case.kv_heads, causal=False, window=(-1, -1))
    i, j = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)[None]
    left, right = case.window
    seen = (j >= i - (left if left >= 0 else keys)) & (j <= i + (right if right >= 0 else keys))
    outs, lses = [], []
    for head in range(case.heads):
        counts = torch.zeros(rows, keys, dtype=dtype)
        for length, rate, offset in case.pattern.strided_segments(shape, head) or ():
            on_residue = (i % length % rate == offset) & (j % length % rate == offset)
            counts += (i // length == j // length) & on_residue & seen
        kv_head = head * case.kv_heads // case.heads
        scores = q[:, head] @ k[:, kv_head].T * case.head_dim**-0.5 + counts.log()
        lse = scores.logsumexp(-1)
        outs.append(torch.exp(scores - lse.nan_to_num(neginf=0.0)[:, None]) @ v[:, kv_head])
        lses.append(lse)
    return torch.stack(outs, 1), torch.stack(lses)


def numbers(draw: random.Random, values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=draw.choice((torch.int32, torch.int64)))


def difference(case: Case, draw: random.Random) -> float:
    """The largest error of out and lse, as a share of what is allowed: four times that of the formula in float32, eight
    last places at least. NaN lies behind the keys.
    """
    heads, kv_heads, dim, value_dim = case.heads, case.kv_heads, case.head_dim, case.value_dim

    def absent(batch: int, keys: int) -> list[Tensor]:
        return [torch.full((batch, keys, kv_heads, width), torch.nan, dtype=case.dtype) for width in (dim, value_dim)]

    shape = SequenceShape(1, heads, kv_heads, causal=False, window=(-1, -1))
    computation: Any = SplitKeys(case.pattern, shape, case.window, dim**-0.5)
    if case.held == "packed":
        keys = [draw.randint(0, case.keys) for _ in range(case.batch)] + [case.rows]
        rows = [*(min(there, draw.randint(0, case.rows)) for there in keys[:-1]), case.rows]
        ends, behind = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in (rows, keys)), draw.choice((0, 2))
        of_queries, of_keys = ends
        computation = computation.of_bounds(numbers(draw, of_queries), numbers(draw, of_keys))
        q = torch.randn(1, of_queries[-1] + behind, heads, dim).to(case.dtype)
        k, v = absent(1, of_keys[-1] + behind)
        spans = [*zip([0] * len(keys), pairwise(of_queries), pairwise(of_keys), strict=True)]
    else:
        count = case.batch
        keys = [case.keys if case.held == "batch" else draw.randint(case.rows, case.keys) for _ in range(count)]
        q = torch.randn(count, case.rows, heads, dim).to(case.dtype)
        # A cache has room behind its keys.
        k, v = absent(count, case.keys + draw.choice((0, 7)))
        firsts = [0] * count
        if case.held == "batch":
            k, v = k[:, : case.keys], v[:, : case.keys]
        elif case.held == "lengths":
            computation = computation.of_lengths(numbers(draw, keys))
        else:
            # Each has padding before its keys.
            firsts = [draw.randint(0, there - case.rows) for there in keys]
            computation = computation.of_lengths(numbers(draw, [*zip(firsts, keys, strict=True)]))
        spans = [(item, (0, case.rows), place) for item, place in enumerate(zip(firsts, keys, strict=True))]
    wanted, plain = (
        (torch.zeros(*q.shape[:3], value_dim, dtype=of), torch.full((len(q), heads, q.shape[1]), -torch.inf, dtype=of))
        for of in (torch.float64, torch.float32)
    )
    for item, (query, stop), (key, end) in spans:
        if query < stop and key < end:
            for x in (k, v):
                x[item, key:end] = torch.randn(end - key, *x.shape[2:]).to(case.dtype)
            here = q[item, query:stop], k[item, key:end], v[item, key:end], case
            for out, lse in (wanted, plain):
                out[item, query:stop], lse[item, :, query:stop] = formula(*here, out.dtype)
    out, lse = computation.forward(q, k, v)
    assert torch.equal(lse == -torch.inf, wanted[1] == -torch.inf), case
    shares = []
    for found, in_float32, exact, eps in zip(
        (out, lse), plain, wanted, (torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps), strict=True
    ):
        error, allowed = (
            ((x - exact).nan_to_num(0.0) / exact.abs().clamp(min=1)).abs().max() for x in (found, in_float32)
        )
        shares.append((error / max(4 * allowed, 8 * eps)).item())
    return max(shares)


def through_attention(dtype: torch.dtype) -> float:
    """The largest error, in last places, of calls of `attention` with numbers in tensors or on the host, as if on a
    GPU.
    """
    made: list[object] = []

    def automatic(workload: Workload, _device: torch.device) -> tuple[Choice, SplitKeys]:
        made.append(workload)
        return Choice("split-keys", None, "rule"), build(workload, BuildContext(device=torch.device("cpu")))

    rows, keys, worst = (2, 2, 2), (40, 9, 25), 0.0
    shapes = (2, 4, 64), (41, 2, 64), (41, 2, 48)
    q, k, v = (torch.randn(3, *shape).to(dtype) for shape in shapes)
    items = [(q[at : at + 1], k[at : at + 1, :there], v[at : at + 1, :there]) for at, there in enumerate(keys)]
    wanted = [attention(*(x.double() for x in item), causal=True) for item in items]
    packed = [torch.cat([item[at][0] for item in items]) for at in range(3)]
    ends = [[0, *torch.tensor(x).cumsum(0).tolist()] for x in (rows, keys)]
    with (
        mock.patch.object(call, "automatic", automatic),
        mock.patch.object(operands, "may_stay", lambda x: isinstance(x, Tensor)),
        # To read a number is an error.
        mock.patch.object(operands, "_numbers", mock.Mock(side_effect=AssertionError)),
    ):
        for given in (list, torch.tensor):
            caches = attention(q, k, v, causal=True, key_lengths=given(keys))
            # The same keys behind padding of unequal length.
            shifted = [
                torch.stack([x.roll(41 - there, 0) for x, there in zip(kind, keys, strict=True)]) for kind in (k, v)
            ]
            spans = given([[41 - there, 41] for there in keys])
            padded = attention(q, *shifted, causal=True, key_lengths=spans)
            of_packed = {"cu_seqlens": given(ends[0]), "cu_seqlens_k": given(ends[1])}
            together = attention(*packed, causal=True, **of_packed).unflatten(0, (3, 2))
            for at, exact in enumerate(wanted):
                for found in (caches, padded, together):
                    worst = max(worst, (found[at] - exact[0]).abs().max().item())
    # Once for a batch and once for packed sequences: what is made serves tensors and numbers.
    assert len(made) == 2, made
    return worst / torch.finfo(dtype).eps


def cut(draw: random.Random) -> Callable[..., Split]:
    """Small tiles and several parts, instead of those of a GPU."""

    def split_for(_programs: int, rows: int, _keys: int, *_: int) -> Split:
        tile = SplitTile(draw.choice((16, 32)), draw.choice((16, 32)), 4, 2)
        return Split(tile, draw.choice((1, 2, 3, 7)), draw.choice((1, -(-rows // tile.rows))))

    return split_for


if __name__ == "__main__":
    torch.manual_seed(0)
    dtype, count = getattr(torch, sys.argv[2]), int(sys.argv[3])
    draw = random.Random(f"{dtype} 0")
    usual = split_keys.split_for
    errors: dict[str, list[float]] = {"attention": [through_attention(dtype)]}
    for number, (kind, held) in enumerate(product(KINDS, HELD)):
        for at in range(count):
            case = drawn(draw, kind, held, WIDTHS[(number + at) % len(WIDTHS)], dtype)
            split_keys.split_for = usual if (number + at) % 2 else cut(draw)
            errors.setdefault(f"{kind}, {held}", []).append(difference(case, draw))
    sys.stdout.write(json.dumps(errors))

"""The results and gradients of a call beside the formula in float64, on any device and by any kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilabench.patterns import DilatedPattern
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pattern, SequenceShape
from tests.attention.every_pattern import Case

# Of norms, relative.
BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
Window = tuple[int, int]


def counts_of(pattern: Pattern, keys: int, heads: int, kv_heads: int) -> Tensor:
    """C [H, N, N] of a sequence, before masks."""
    shape = SequenceShape(keys, heads, kv_heads, causal=False, window=(-1, -1))
    counts = torch.zeros(heads, keys, keys, dtype=torch.float64)
    for head in range(heads):
        for group in pattern.counts(shape, head, np.arange(keys)):
            for part in group.parts:
                counts[head, torch.from_numpy(group.rows)[:, None], torch.from_numpy(np.asarray(part, np.int64))] += 1
    return counts


def by_counts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern = DENSE,
    causal: bool = False,
    window: Window = (-1, -1),
    softcap: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, M, H, D] and lse [B, H, M] of the last M rows; packed [T, H, D] and [H, T]. A detached merge is one."""
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "sink": sink}
    if cu_seqlens is not None:
        parts = [
            by_counts(*(x[None, start:stop] for x in (query, key, value)), pattern=pattern, **options)
            for start, stop in pairwise(cu_seqlens.tolist())
        ]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)
    if isinstance(pattern, DilatedPattern) and pattern.is_detached:
        fields = {**pattern.model_dump(), "merge_grad": "exact"}
        branches = zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
        alone = [
            DilatedPattern(**{**fields, "segment_lengths": (length,), "dilation_rates": (rate,)})
            for length, rate in branches
        ]
        results = [by_counts(query, key, value, pattern=branch, **options) for branch in alone]
        lse = torch.stack([part for _, part in results]).logsumexp(0)
        shares = [(part - lse).exp().nan_to_num().detach() for _, part in results]
        outs = (share.transpose(1, 2)[..., None] * out for share, (out, _) in zip(shares, results, strict=True))
        return torch.stack([*outs]).sum(0), lse.detach()
    rows, keys, heads, kv_heads = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(heads // kv_heads, 2) for x in (key, value))
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(keys) - torch.arange(keys - rows, keys)[:, None]
    left, right = window[0], 0 if causal else window[1]
    seen = ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))
    counts = counts_of(pattern, keys, heads, kv_heads)[:, keys - rows :] * seen
    scores = scores.masked_fill(counts == 0, -torch.inf) + counts.where(counts > 0, 1.0).log()
    lse = scores.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink[:, None])
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", weights, value), lse


def results(call: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse and the gradient of each floating tensor, for gradients of both that are drawn alike for all devices."""
    learned = {name: x.requires_grad_() for name, x in tensors.items() if x.is_floating_point()}
    found = call(tensors)
    out, lse = found if isinstance(found, tuple) else (found, None)
    named = {"out": out} | ({} if lse is None else {"lse": lse.masked_fill(lse.isinf(), 0.0)})
    generator = torch.Generator("cpu").manual_seed(7)
    wanted = {name: x for name, x in named.items() if x.requires_grad}
    given = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in wanted.values()]
    gradients = torch.autograd.grad([*wanted.values()], [*learned.values()], given)
    return {name: x.detach() for name, x in named.items()} | dict(zip(learned, gradients, strict=True))


def errors(
    case: Case, dtype: torch.dtype, device: str, exact: Any = None, changes: Any = None, **options: Any
) -> dict[str, float]:
    """Relative errors by name, for the case in this dtype on this device, beside `exact` of its numbers in float64 on
    the CPU: by default the case itself. changes: of the tensors before the call.
    """
    tensors = case.tensors(dtype)
    tensors = tensors if changes is None else changes(tensors)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    here = {name: x.to(device) for name, x in tensors.items()}
    right = results(exact or (lambda given: case(given, **options)), wide)
    found = results(lambda given: case(given, **options), here)
    return {name: relative(found[name], expected) for name, expected in right.items()}


def relative(found: Tensor, right: Tensor) -> float:
    """The norm of the difference by that of the right tensor, in float64."""
    return ((found.double().cpu() - right).norm() / right.norm().clamp(min=1e-30)).item()

"""Check a backend: one trial of forward, lse and backward against float64, on a union of two sets of keys.

The first set is masked (causal, window), the second is seen by every query, so that out and lse given to the backward
pass belong to a larger softmax: the case that merging branches and ring steps needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dilabench.backends import math
from dilabench.backends.band import Band
from dilabench.contracts import Attend, AttendBackward
from dilabench.workload.spec import UNBOUNDED, Window

Layout = Literal["contiguous", "diagonal", "every_other"]
Parts = tuple[tuple[Tensor, Tensor, bool, Window], ...]
"""(k, v, causal, window) per set of keys."""

# Largest |lse - exact| of a kernel that multiplies in this dtype and sums in float32, per unit of max(1, |lse|).
LSE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
ULPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Shapes and options of one check: `length` queries and masked keys, `more_keys` keys that all queries see."""

    batch: int = 2
    length: int = 37
    more_keys: int = 19
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    causal: bool = True
    window: Window = UNBOUNDED
    layout: Layout = "contiguous"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Finding:
    """The largest error of one result, and its tolerance.

    The tolerance is twice the error of the plain same-dtype computation, plus 4 ulp of the result (in its dtype) and of
    the largest term that is summed (in float32).
    """

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Return True within the tolerance; NaN is not."""
        return self.error <= self.tolerance


def findings(
    attend: Attend, attend_backward: AttendBackward, trial: Trial, device: torch.device, seed: int = 0
) -> tuple[Finding, ...]:
    """Run the trial and compare out, lse, dq and both sets' dk and dv with float64 on the same rounded inputs."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(length: int, heads: int) -> Tensor:
        values = torch.randn(
            trial.batch, length, heads, trial.head_dim, generator=generator, device=device, dtype=torch.float32
        )
        return laid_out(values.to(trial.dtype), trial.layout)

    q, dout = draw(trial.length, trial.heads), draw(trial.length, trial.heads)
    masked = draw(trial.length, trial.kv_heads), draw(trial.length, trial.kv_heads), trial.causal, trial.window
    parts: Parts = (masked,)
    if trial.more_keys:
        parts += ((draw(trial.more_keys, trial.kv_heads), draw(trial.more_keys, trial.kv_heads), False, UNBOUNDED),)
    exact_parts = tuple((k.double(), v.double(), causal, window) for k, v, causal, window in parts)
    exact = _union(math.attend, math.attend_backward, q.double(), dout.double(), exact_parts, "contiguous")
    computed = _union(attend, attend_backward, q, dout, parts, trial.layout)
    plain, terms = _plain(q, dout, parts), _largest_terms(q, dout, parts)
    return tuple(
        _finding(name, computed[name], plain[name], exact[name], terms.get(name, 0.0), trial.dtype) for name in exact
    )


def laid_out(x: Tensor, layout: Layout) -> Tensor:
    """The same values as a view into a larger buffer of NaN, with the strides that dilated branches have."""
    B, N, H, D = x.shape
    if layout == "contiguous":
        return x.contiguous()
    if layout == "diagonal":
        # Residue s of head s: the head stride is one row of D plus one token (kernels.md §3 A).
        view = x.new_full((B, N * H, H, D), float("nan"))
        view = view.as_strided((B, N, H, D), (N * H * H * D, H * H * D, (H + 1) * D, 1))
    else:
        view = x.new_full((B, 2 * N, 2 * H, D), float("nan"))[:, 1::2, ::2]
    return view.copy_(x)


def _union(
    attend: Attend, attend_backward: AttendBackward, q: Tensor, dout: Tensor, parts: Parts, layout: Layout
) -> dict[str, Tensor]:
    """out and lse of the merged sets, and the gradients that each set's backward gives from them."""
    scale = q.shape[-1] ** -0.5
    results = [attend(q, k, v, causal=causal, window=window, scale=scale) for k, v, causal, window in parts]
    lses = torch.stack([lse for _, lse in results])
    lse = lses.logsumexp(0)
    weights = torch.exp(lses - lse).transpose(2, 3).unsqueeze(-1)
    merged = sum(weight * out for weight, (out, _) in zip(weights, results, strict=True))
    assert isinstance(merged, Tensor)
    out = laid_out(merged.to(q.dtype), layout)
    union = {"out": out, "lse": lse}
    dq = torch.zeros_like(merged)
    for number, (k, v, causal, window) in enumerate(parts, 1):
        dq_part, dk, dv = attend_backward(dout, q, k, v, out, lse, causal=causal, window=window, scale=scale)
        dq += dq_part
        union |= {f"dk{number}": dk, f"dv{number}": dv}
    return union | {"dq": dq}


def _plain(q: Tensor, dout: Tensor, parts: Parts) -> dict[str, Tensor]:
    """The formula with every step in q's dtype, by autograd: the precision that this dtype can reach."""
    group = q.shape[2] // parts[0][0].shape[2]
    leaves = [x.detach().clone().requires_grad_() for x in (q, *(x for k, v, *_ in parts for x in (k, v)))]
    queries, keys, values = leaves[0].transpose(1, 2), leaves[1::2], leaves[2::2]
    scores = []
    for k, (_, _, causal, window) in zip(keys, parts, strict=True):
        part = queries @ k.repeat_interleave(group, 2).permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
        hidden = Band.of(causal, window, q.shape[1], k.shape[1]).hidden(0, q.shape[1], 0, k.shape[1], q.device)
        scores.append(part if hidden is None else part.masked_fill(hidden, float("-inf")))
    joined = torch.cat(scores, -1)
    stacked = torch.cat([v.repeat_interleave(group, 2) for v in values], 1).transpose(1, 2)
    out = (joined.softmax(-1) @ stacked).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, dout)
    plain = {"out": out.detach(), "lse": joined.detach().logsumexp(-1), "dq": gradients[0]}
    for number in range(1, len(parts) + 1):
        plain |= {f"dk{number}": gradients[2 * number - 1], f"dv{number}": gradients[2 * number]}
    return plain


def _largest_terms(q: Tensor, dout: Tensor, parts: Parts) -> dict[str, float]:
    """The largest term of the sums behind dq and dk.

    The score gradient is a difference, dout·v - rowsum(dout·out). Where the two cancel, an ulp of either stays, while
    the plain computation may give exactly 0 (a row with one key).
    """
    scale = q.shape[-1] ** -0.5
    terms = {"dq": 0.0}
    for number, (k, v, *_) in enumerate(parts, 1):
        score_gradient = scale * float(torch.einsum("bihd,bjgd->bhigj", dout.float(), v.float()).abs().max())
        terms["dq"] = max(terms["dq"], score_gradient * float(k.abs().max()))
        terms[f"dk{number}"] = score_gradient * float(q.abs().max())
    return terms


def _finding(name: str, computed: Tensor, plain: Tensor, exact: Tensor, term: float, dtype: torch.dtype) -> Finding:
    def error(x: Tensor) -> float:
        return float((x.double() - exact).abs().max())

    size = max(1.0, float(exact.abs().max()))
    if name == "lse" or dtype == torch.float64:
        # The exact values are float64 too, so no more precise reference exists.
        return Finding(name, error(computed), LSE_TOLERANCE[dtype] * size)
    floor = ULPS * (torch.finfo(dtype).eps * size + torch.finfo(torch.float32).eps * term)
    return Finding(name, error(computed), 2 * error(plain) + floor)

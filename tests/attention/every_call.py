"""Calls of `attention` with options of models, each a function of a dtype and a device that gives relative errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilabench.attention import attention
from dilabench.patterns import DilatedPattern
from tests.attention.compared import by_counts, errors
from tests.attention.every_pattern import CASES, Case, N

Errors = Callable[[torch.dtype, str], dict[str, float]]
BRANCHES: dict[str, Any] = {"segment_lengths": (16, 48), "dilation_rates": (1, 2)}


def _of(case: Case, changes: Any = None, exact: Any = None, **options: Any) -> Errors:
    if "gates" not in case.takes:
        options["return_lse"] = True
    return lambda dtype, device: errors(case, dtype, device, exact, changes, **options)


def _rows(rows: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the last rows alone."""
    return {**tensors, "query": tensors["query"][:, -rows:].clone()}


def _narrower(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of values, or of queries and keys, of half as many numbers."""
    halved = ("value",) if name == "value" else ("query", "key")
    return {key: x[..., : x.shape[-1] // 2].clone() if key in halved else x for key, x in tensors.items()}


def _capped(softcap: float = 1.5, changes: Any = None, packed: bool = False, **fields: Any) -> Errors:
    """A dilated call with a softcap, which the formula computes: on a CPU there is no other way."""
    fields = BRANCHES | fields
    options = {name: fields.pop(name) for name in ("causal", "window") if name in fields}
    options |= {"pattern": DilatedPattern(**fields), "softcap": softcap}
    case = Case(attention, {"causal": True, **options}, () if "merge_grad" in fields else ("sink",), packed)
    return _of(case, changes, lambda given: by_counts(**given, **case.options))


def _padded(name: str, first: int, last: int, **options: Any) -> Errors:
    """Of `attention` over the tokens of a batch that are there, two items with padding on either side."""

    def two(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: x if x.ndim == 1 else torch.cat([x, x.flip(1)]) for key, x in tensors.items()}

    case = CASES[name]
    there = torch.arange(N)[None] >= torch.tensor([[first], [0]])
    there &= torch.arange(N)[None] < torch.tensor([[N], [N - last]])
    given = {**case.options, **options}
    formula = {key: value for key, value in given.items() if key != "backend"}

    def exact(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for item, span in enumerate((slice(first, N), slice(0, N - last))):
            alone = {key: x if x.ndim == 1 else x[item : item + 1, span] for key, x in tensors.items()}
            out, lse = by_counts(**alone, **formula)
            ends = span.start, N - span.stop
            outs.append(torch.nn.functional.pad(out, (0, 0, 0, 0, *ends)))
            lses.append(torch.nn.functional.pad(lse, ends, value=-torch.inf))
        return torch.cat(outs), torch.cat(lses)

    def padded(**given: Any) -> Any:
        here = there.to(given["query"].device)
        return attention(**given, key_padding=here, query_padding=here)

    return _of(case._replace(function=padded, options=given), two, exact)


CALLS: dict[str, Errors] = {name: _of(case) for name, case in CASES.items()}
CALLS |= {
    f"{rows} rows, {name}": _of(case, partial(_rows, rows))
    for name, case in CASES.items()
    if not (case.packed or {"indices", "gates"} & {*case.takes})
    for rows in (1, 17)
}
CALLS |= {
    "capped": _capped(),
    "capped, not causal": _capped(causal=False),
    "capped window": _capped(causal=False, window=(9, 4)),
    "capped packed": _capped(packed=True),
    "capped rows": _capped(changes=partial(_rows, 17)),
    "capped grouped": _capped(heads="grouped"),
    "capped by key head": _capped(offset_by="kv_head"),
    "capped detached": _capped(merge_grad="detached"),
    "capped detached packed": _capped(merge_grad="detached", packed=True),
    "capped unnested": _capped(segment_lengths=(15, 40), dilation_rates=(2, 3)),
    **{
        f"narrower {name}, {of}{' capped' if softcap else ''}": _of(
            CASES[of], partial(_narrower, name), backend="math", softcap=softcap
        )
        for name, of, softcap in (
            ("value", "dense packed", None),
            ("key", "whole packed", 1.5),
            ("value", "window packed", 1.5),
        )
    },
    "padded dense": _padded("dense", 13, 7, backend="math"),
    "padded whole": _padded("whole", 13, 7, backend="math"),
    "padded window": _padded("window", 13, 7, backend="math"),
    "padded dilated": _padded("dilated", 13, 7),
    "padded dilated window": _padded("dilated window", 0, 20),
    "padded capped": _padded("dense", 13, 7, backend="math", softcap=1.5),
    "padded capped dilated": _padded("dilated", 13, 7, softcap=1.5),
}

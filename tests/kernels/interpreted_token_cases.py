"""Run by test_selected_tokens.py under TRITON_INTERPRET=1; prints errors of every case named as one line of JSON.

Arguments: names of cases, and numbers, each the seed of a random one.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dilabench.engine.verify.oracle.reference import Reference
from dilabench.impls.selected.selection import over_sequences
from dilabench.impls.selected.stand_ins import selection_of
from dilabench.impls.selected.tiles import Tiled
from dilabench.kernels.launch_cache import LaunchCache
from dilabench.kernels.selected import lists, tiles
from dilabench.kernels.selected.attention import selected_backward, selected_forward
from dilabench.kernels.selected.selection import TokenSelection
from dilabench.kernels.tuning import TileConfig
from dilabench.workload.spec import Workload


@dataclass(frozen=True)
class Case:
    """Tensors of ``lengths`` (one number: of each of ``batch`` items) and how they are computed.

    ``rows``, ``keys``: of every tile. ``tuned``: constants that replace those in `tiles`. ``mass``: the logarithm of a
    mass that the softmax has besides, None for none. ``packed``: q, k, v are views of one tensor.
    ``united``: rows of a tile of neighbours, if there are such tiles. ``kept``: both passes share their lists.
    """

    form: str
    block: int
    slots: int
    heads: int
    kv_heads: int
    causal: bool
    lengths: tuple[int, ...] = (75,)
    batch: int = 1
    dim: int = 16
    rows: int = 16
    keys: int = 16
    dtype: torch.dtype = torch.float32
    tuned: dict[str, float] = field(default_factory=dict)
    mass: float | None = None
    packed: bool = False
    window: tuple[int, int] = (-1, -1)
    united: int | None = None
    kept: bool = False

    @property
    def documents(self) -> bool:
        return len(self.lengths) > 1


UNITED = {"UNION_SHARE": 0.25}
SHARED = {"LEAST_SHARED_STEPS": 1, "SHARING_PROGRAMS": 2**20}
CASES = {
    "by query, one token": Case("query", 16, 3, 16, 1, True, (40,)),
    "by query, neighbours": Case("query", 16, 3, 4, 2, True),
    "by query, window": Case("query", 16, 3, 4, 2, True, window=(21, -1)),
    "by query, window both ways": Case("query", 64, 3, 16, 1, False, (150,), keys=32, window=(30, 7)),
    "by query, window ahead": Case("query", 16, 3, 2, 2, False, keys=32, window=(-1, 9)),
    "gathered, window": Case("gathered", 16, 3, 6, 2, True, (75,), batch=2, window=(11, 0)),
    "gathered, window over long blocks": Case("gathered", 64, 3, 4, 2, False, (150,), rows=32, window=(40, 5)),
    "documents gathered, window": Case("gathered", 32, 3, 4, 2, False, (20, 0, 45, 33), window=(18, 3)),
    "documents by query, window": Case("query", 16, 3, 4, 2, True, (20, 0, 45, 33), window=(18, -1)),
    "single tokens, window": Case("query", 1, 9, 4, 1, True, (50,), window=(12, 0)),
    "by query, some united": Case("query", 16, 3, 16, 1, True, (75,), united=64, tuned={"UNION_SHARE": 0.25}),
    "by query, few united, so none": Case(
        "query", 16, 3, 16, 1, True, (75,), united=64, tuned=UNITED | {"LEAST_READ": 19, "ALIKE": 0.9}, kept=True
    ),
    "by query, enough united": Case(
        "query", 16, 3, 16, 1, True, (75,), united=64, tuned=UNITED | {"LEAST_READ": 19, "ALIKE": 0.5}, kept=True
    ),
    "by query, some of a sample united": Case(
        "query", 16, 3, 32, 2, True, (75,), united=64, tuned=UNITED | {"LEAST_READ": 9, "ALIKE": 0.5}, kept=True
    ),
    "by query, some united, two heads": Case(
        "query", 32, 4, 36, 2, False, (101,), batch=2, united=64, tuned={"UNION_SHARE": 0.4}
    ),
    "documents by query, some united": Case(
        "query", 16, 3, 32, 2, True, (20, 0, 45, 33), united=32, window=(30, 0), tuned={"UNION_SHARE": 0.3}
    ),
    "by query, many neighbours": Case("query", 16, 2, 1, 1, True, (70,), rows=64),
    "by query, several parts of a group": Case("query", 16, 4, 24, 1, False, (33,), tuned={"MOST_QUERY_ROWS": 16}),
    "by query, stretches of a block": Case("query", 64, 3, 4, 1, True, (150,), rows=32),
    "by query, blocks that tiles do not divide": Case("query", 48, 2, 8, 2, False, (101,), keys=32),
    "by query, short blocks in a tile": Case("query", 16, 7, 2, 1, True, (70,), batch=2, keys=64),
    "gathered": Case("gathered", 16, 3, 6, 2, True, (75,), batch=2),
    "gathered, everything visible": Case("gathered", 32, 2, 3, 3, False, keys=32),
    "gathered, wide group": Case("gathered", 16, 3, 24, 1, True, (37,)),
    "gathered, long blocks": Case("gathered", 64, 3, 4, 2, True, (150,), rows=32),
    "gathered, long blocks, everything visible": Case("gathered", 64, 2, 2, 1, False, (100,), keys=32),
    "gathered, blocks that are no power of two": Case("gathered", 48, 2, 4, 2, True, (100,), keys=64),
    "gathered, long blocks that tiles do not divide": Case("gathered", 80, 2, 2, 2, True, (170,), keys=32),
    "gathered, parts of the tokens": Case("gathered", 16, 3, 4, 2, True, tuned={"PARTIAL_BYTES": 30000}),
    "gathered, parts that share lists": Case(
        "gathered", 32, 3, 6, 3, True, (50,), 2, tuned={"PARTIAL_BYTES": 20000} | SHARED, kept=True
    ),
    "gathered, shared lists": Case("gathered", 32, 3, 4, 2, True, (120,), keys=16, tuned=SHARED),
    "documents by query": Case("query", 16, 3, 4, 2, True, (5, 38, 0, 17)),
    "documents by query, everything visible": Case("query", 32, 2, 4, 1, False, (5, 38, 33), keys=16),
    "documents gathered": Case("gathered", 16, 3, 4, 2, True, (21, 0, 38, 3), tuned={"PARTIAL_BYTES": 20000}),
    "documents gathered, everything visible": Case("gathered", 32, 2, 4, 1, False, (38, 33, 1), tuned=SHARED),
    "single tokens": Case("query", 1, 20, 4, 2, True, (41,), batch=2, keys=32),
    "single tokens, parts": Case(
        "query", 1, 9, 24, 1, False, (30,), tuned={"MOST_QUERY_ROWS": 16, "PARTIAL_BYTES": 30000}
    ),
    "single tokens of documents": Case("query", 1, 6, 2, 1, True, (17, 0, 20)),
    "more places than blocks": Case("query", 16, 9, 2, 2, True, (40,)),
    "one place": Case("gathered", 16, 1, 2, 1, True, (40,)),
    "padded head dim, views of one tensor": Case("gathered", 16, 3, 4, 2, True, dim=24, packed=True),
    "by query, views of one tensor": Case("query", 16, 3, 4, 2, True, dim=24, packed=True),
    "by query, part of a larger softmax": Case("query", 16, 3, 4, 2, True, mass=0.7),
    "gathered, part of a larger softmax": Case("gathered", 16, 3, 4, 2, True, mass=0.7),
    "half by query": Case("query", 16, 3, 16, 1, True, (40,), dtype=torch.float16),
    "half gathered": Case("gathered", 16, 3, 4, 2, True, dtype=torch.float16),
    "half of single tokens": Case("query", 1, 20, 4, 2, True, (41,), keys=32, dtype=torch.float16),
    "bfloat16 gathered": Case("gathered", 32, 3, 4, 2, True, dtype=torch.bfloat16),
}


def random_case(seed: int) -> Case:
    """Any of the class."""
    random = np.random.default_rng(seed)
    block = int(random.choice([1, 16, 32, 48, 64]))
    kv_heads = int(random.choice([1, 2, 3]))
    documents = bool(random.integers(2))
    lengths = tuple(int(n) for n in random.integers(0, 60, 3)) if documents else (int(random.integers(1, 130)),)
    return Case(
        form="query" if block == 1 else str(random.choice(["query", "gathered"])),
        block=block,
        slots=int(random.integers(1, 6)),
        heads=kv_heads * int(random.choice([1, 2, 3, 5, 16])),
        kv_heads=kv_heads,
        causal=bool(random.integers(2)),
        lengths=lengths,
        batch=1 if documents else int(random.integers(1, 3)),
        dim=int(random.choice([16, 24, 32])),
        rows=int(random.choice([16, 32])),
        keys=int(random.choice([16, 32, 64])),
        window=(-1, -1) if random.integers(2) else (int(random.integers(0, 60)), 0),
        tuned={"PARTIAL_BYTES": int(random.choice([10_000, 1 << 20]))} | (SHARED if random.integers(2) else {}),
    )


def indices_of(case: Case, random: np.random.Generator) -> Tensor:
    """int32 [rows, K, S] in any order, repeated, absent and outside of the sequence; rows of none."""
    rows = []
    for length in case.lengths * case.batch:
        blocks = -(-length // case.block)
        chosen = random.integers(-1, blocks + 1, (length, case.kv_heads, case.slots))
        # Causal queries would mostly see nothing.
        own = np.arange(length)[:, None] // case.block
        chosen[..., 0] = np.where(random.random((length, case.kv_heads)) < 0.7, own, chosen[..., 0])
        chosen[random.random(length) < 0.1] = -1
        chosen[random.random(length) < 0.05] = 2**31 - 1
        rows.append(random.permuted(chosen, axis=-1))
    return torch.from_numpy(np.concatenate(rows)).int()


def expected(case: Case, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [rows, H, D], sequence by sequence, and lse [rows, H] without the mass."""
    group = case.heads // case.kv_heads
    outs, lses = [], []
    first = 0
    for length in case.lengths * case.batch:
        rows = slice(first, first + length)
        first += length
        at = torch.arange(length)
        seen = (indices[rows][:, :, None] == (at // case.block)[None, None, :, None]).any(-1)
        if case.causal:
            seen = seen & (at[None, :] <= at[:, None])[:, None]
        left, right = (length if side < 0 else side for side in case.window)
        ahead = at[None, :] - at[:, None]
        seen = seen & ((ahead >= -left) & (ahead <= right))[:, None]
        keys, values = (x[rows].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->ihj", q[rows], keys) * scale
        scores = scores.masked_fill(~seen.repeat_interleave(group, 1), -torch.inf)
        lses.append(scores.logsumexp(-1))
        if case.mass is not None:
            scores = torch.cat((scores, torch.full_like(scores[..., :1], case.mass)), -1)
            values = torch.cat((values, torch.zeros_like(values[:1])), 0) if length else values
        lse = scores.logsumexp(-1, keepdim=True)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
        outs.append(torch.einsum("ihj,jhd->ihd", weights, values))
    return torch.cat(outs), torch.cat(lses)


def errors(case: Case, seed: int = 0) -> dict[str, float]:
    """Largest differences from float64; in half precision relative ones in the norm."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(case.lengths) * case.batch
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    x = torch.randn(rows, sum(heads), case.dim, generator=generator).to(case.dtype)
    q, k, v, dout = (part if case.packed else part.contiguous() for part in x.split(heads, 1))
    indices, scale = indices_of(case, np.random.default_rng(seed)), case.dim**-0.5
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out, own_lse = expected(case, *wide, indices, scale)
    gradients = torch.autograd.grad(out, wide, dout.double())
    cu_seqlens = None
    if case.documents:
        cu_seqlens = torch.tensor((0, *case.lengths)).cumsum(0).int()
    else:
        q, k, v, dout, indices = (x.unflatten(0, (case.batch, -1)) for x in (q, k, v, dout, indices))
    given = (indices, case.block, case.causal, scale)
    shape = TileConfig(case.rows, case.keys, 4, 1)
    options = {
        "window": case.window,
        "cu_seqlens": cu_seqlens,
        "form": case.form,
        "kept": lists.KeptLists() if case.kept else None,
        "tiles": dict.fromkeys(tiles.RULES, shape),
    }
    if case.united:
        neighbours = TileConfig(case.united, case.keys, 4, 1)
        options["tiles"] |= {"union_forward": neighbours, "union_gradient": neighbours}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(vars(tiles), case.tuned))
        # A program of the interpreter scans element by element.
        stack.enter_context(mock.patch.object(lists, "_ELEMENTS", 128))
        got_out, got_lse = selected_forward(q, k, v, *given, **options)
        found_out, found_lse = got_out, got_lse
        if case.mass is not None:
            found_lse = torch.logaddexp(got_lse, torch.tensor(case.mass))
            found_out = got_out * torch.exp(got_lse - found_lse).transpose(-1, -2)[..., None]
        got = selected_backward(dout, q, k, v, found_out, found_lse, *given, **options)
    in_order = got_lse.transpose(-1, -2).reshape(rows, case.heads)
    seen = torch.isfinite(own_lse)
    found = {
        "lse": (in_order - own_lse)[seen].abs().max(),
        "empty rows": got_out.reshape(out.shape)[~seen].abs().sum() + (torch.isfinite(in_order) != seen).sum(),
        "number of empty rows": (~seen).sum(),
    }
    results = zip(("out", "dq", "dk", "dv"), (found_out, *got), (out, *gradients), strict=True)
    for name, result, wanted in results:
        difference = result.reshape(wanted.shape) - wanted
        # Rounding to 16 bits is relative to each number.
        half = case.dtype != torch.float32
        found[name] = difference.norm() / wanted.norm() if half else difference.abs().max()
    return {name: float(value.detach()) for name, value in found.items()}


def sorted_by_many_blocks() -> dict[str, float]:
    """Lists by key of more blocks than 16 bits can number, and of as few, against numpy."""
    found = {}
    for name, rows, kv_heads in (("many", 33_000, 1), ("few", 500, 2)):
        indices = np.random.default_rng(0).integers(-1, rows, (rows, kv_heads, 2))
        selection = TokenSelection.of_batch(torch.from_numpy(indices).int()[None], 1, True)
        with mock.patch.object(lists, "_ELEMENTS", 4096):
            made = lists.key_lists(selection, LaunchCache(), "lists")
        seen = [np.unique(row[(row >= 0) & (row <= at)]) for at, of_row in enumerate(indices) for row in of_row]
        keys = np.concatenate([row + rows * (number % kv_heads) for number, row in enumerate(seen)])
        tokens = np.repeat(np.arange(len(seen)) // kv_heads, [*map(len, seen)])
        order = np.lexsort((tokens, keys))
        places = made.places[: len(keys)].numpy()
        starts = np.searchsorted(keys[order], np.arange(rows * kv_heads + 1))
        wrong = (places // 2 % rows != tokens[order]).sum() + (made.starts.numpy() != starts).sum()
        counts = [*map(len, seen)]
        found[name] = float(wrong + (made.counts.numpy().flatten() != counts).sum())
    return found


def shares_of_parts() -> dict[str, float]:
    """Shares of up to four entries of lists by key, for parts of the tokens: how many differ from numpy's."""
    found = {}
    for name, rows, size in (("eight parts", 50, 7), ("one part", 50, 50)):
        indices = np.random.default_rng(1).integers(-1, 5, (rows, 2, 3))
        selection = TokenSelection.of_batch(torch.from_numpy(indices).int()[None], 16, False)
        with mock.patch.object(lists, "_ELEMENTS", 128):
            by_key = lists.key_lists(selection, LaunchCache(), "lists")
        made = lists.shares_of(by_key, selection, 4, LaunchCache(), size)
        part_of_place, starts, wrong = by_key.places.numpy() // 3 % rows // size, by_key.starts.tolist(), 0
        for part, shares in enumerate(made.lists.tolist()):
            wanted = []
            for number, (start, end) in enumerate(pairwise(starts)):
                entries = start + np.flatnonzero(part_of_place[start:end] == part)
                wrong += entries.tolist() != [*range(*made.edges[part : part + 2, number].tolist())]
                wrong += made.first[part, number] != len(wanted)
                wanted += [number] * -(-len(entries) // 4)
            wrong += shares != wanted + [len(starts) - 1] * (len(shares) - len(wanted))
        found[name] = float(wrong)
    return found


WORKLOADS: dict[str, dict[str, object]] = {
    "implementation": {"batch_size": 2, "seq_len": 50},
    "implementation, packed": {"layout": "packed", "cu_seqlens": (0, 1, 30, 49), "seq_len": 49, "causal": False},
    "implementation, single tokens": {
        "pattern": {"kind": "selected_blocks", "block_size": 1, "top_k": 5, "selector": "indexer"},
        "seq_len": 40,
    },
}


def against_the_oracle(fields: dict[str, object]) -> dict[str, float]:
    """`impls.selected.tiles` of a workload, called twice."""
    pattern = {"kind": "selected_blocks", "block_size": 16, "top_k": 2}
    shape = {"batch_size": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mode": "both", "dtype": "float32"}
    workload = Workload.model_validate({"pattern": pattern, **shape, **fields})
    selection = selection_of(workload, torch.device("cpu"))
    mine = over_sequences(Tiled, selection, workload.softmax_scale, workload.cu_seqlens or ())
    lead = () if workload.layout == "packed" else (workload.batch_size,)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(*lead, workload.seq_len, n, 16, generator=generator) for n in (4, 2, 2, 4))
    found = {}
    for function in (Reference(workload), mine, mine):
        operands = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = function.with_lse(*operands)
        results = out, lse, *torch.autograd.grad(out, operands, dout)
        wanted = found.setdefault("wanted", results)
        errors = [float((a - b).detach().abs().max()) for a, b in zip(results, wanted, strict=True)]
        found["errors"] = [max(pair) for pair in zip(errors, found.get("errors", errors), strict=True)]
    return dict(zip(("out", "lse", "dq", "dk", "dv"), found["errors"], strict=True))


if __name__ == "__main__":
    results = {}
    for name in sys.argv[2:]:
        if name == "many blocks":
            results[name] = sorted_by_many_blocks()
        elif name == "shares":
            results[name] = shares_of_parts()
        elif name in WORKLOADS:
            results[name] = against_the_oracle(WORKLOADS[name])
        else:
            results[name] = errors(random_case(int(name)), int(name)) if name.isdigit() else errors(CASES[name])
    print(json.dumps(results))  # noqa: T201 - the parent process reads it

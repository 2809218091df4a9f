"""Run by test_hopper_backward.py under TRITON_INTERPRET=1; prints errors of every case as one line of JSON.

Gluon has no interpreter: `Walk` does in torch what the Hopper kernel does with the arguments of a launch, so that
descriptors, tables, statistics and sums are held to the definition. The kernel's own code runs on a GPU only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from interpreted_block_cases import expected
from interpreted_cases import multiplicity, relative, union_softmax
from torch import Tensor

from dilabench.kernels import query_sums, tuning
from dilabench.kernels.block_sparse import forward_sm90 as block_sparse_forward_sm90
from dilabench.kernels.block_sparse import key_items
from dilabench.kernels.block_sparse.backward import block_sparse_backward
from dilabench.kernels.block_sparse.forward import block_sparse_forward
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.kernels.fused import backward, backward_at_once, backward_sm90, forward, row_layout
from dilabench.kernels.fused.branch_group import CLASS_BITS, TILE_BITS
from dilabench.kernels.fused.residue_plan import residue_plan
from dilabench.kernels.launches import launches
from dilabench.kernels.tuning import TileConfig

# B, N, H, K, D, segments, rates, groups
DILATED = {
    "one group": (2, 128, 4, 2, 16, (64, 128), (1, 2), ((0, 1),)),
    "two groups, one in two passes": (1, 128, 4, 4, 16, (16, 128), (1, 2), ((0,), (1,))),
    "uncovered rows": (1, 128, 4, 4, 16, (64, 128), (2, 4), ((0,), (1,))),
    "odd length": (1, 107, 4, 2, 16, (32, 64), (1, 1), ((0, 1),)),
    "tokens left over": (1, 107, 3, 1, 16, (64, 400), (1, 2), ((0, 1),)),
}
# N, H, K, D, block, mask heads
BLOCKS = {
    "one mask": (128, 4, 2, 16, 32, 1),
    "mask per head": (96, 4, 2, 16, 32, 4),
    "shared tiles": (192, 2, 1, 16, 32, 1),
}
TILES = TileConfig(16, 32, 4, 2, specialized=True)


class Walk:
    """In the place of the kernel: programs one after the other, exact products."""

    launched = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(**arguments: Any) -> None:
            Walk.launched += 1
            for program in range(grid[0]):
                _Program(arguments, program).run()

        return run

    def warmup(self, **_arguments: Any) -> None:
        """Nothing is compiled."""


class _Program:
    def __init__(self, arguments: dict[str, Any], program: int) -> None:
        self.given = arguments
        a = self.given
        item = program // a["n_blocks"] if a["item_major"] else program % a["n_items"]
        block = program % a["n_blocks"] if a["item_major"] else program // a["n_items"]
        self.super_index = block % a["n_supers"]
        self.kv_head = a["first_kv_head"] + block // a["n_supers"] % a["some_kv_heads"]
        self.batch = block // a["n_supers"] // a["some_kv_heads"]
        self.variant = int(self.super_index >= a["full_supers"])
        if a["SHARED"]:
            item_set = self.kv_head if a["PER_HEAD"] else 0
            self.tile, self.low, self.high, self.slot = (
                a["items_ptr"].view(-1, a["n_items"], 4)[item_set, item].tolist()
            )
            self.residue = 0
        else:
            u, self.tile = a["items_ptr"].view(-1, a["n_items"], 2)[self.variant, item].tolist()
            self.tile = u if u < 0 else self.tile
            self.low, self.high, self.slot = 0, 1 << 30, -1
            first = a["heads_ptr"][self.kv_head * a["heads_per_kv"], 1].item()
            self.residue = (u + first) % a["R"]

    def entries(self) -> Iterator[tuple[int, int, int, int, bool]]:
        """Head, class, query tile, how often it counts, and whether it is masked."""
        a = self.given
        for head in range(self.kv_head * a["heads_per_kv"], (self.kv_head + 1) * a["heads_per_kv"]):
            kind, shift = a["heads_ptr"][head].tolist()
            lists = a["lookup_ptr"].view(-1, a["n_kinds"], a["R"], a["n_tiles"], 3)
            own = (self.residue - shift) % a["R"]
            first, n_full, n_masked = lists[self.variant, kind, own, self.tile].tolist()
            for place in range(self.low, min(self.high, n_full + n_masked)):
                entry = a["entries_ptr"][first + place].item()
                partner = ((entry >> TILE_BITS & (1 << CLASS_BITS) - 1) + shift) % a["R"]
                yield head, partner, entry & (1 << TILE_BITS) - 1, entry >> TILE_BITS + CLASS_BITS, place >= n_full

    def run(self) -> None:
        if self.tile < 0:
            return
        a = self.given
        rows, keys, dim = a["BLOCK_M"], a["BLOCK_N"], a["DIM"]
        first_key = self.tile * keys
        end = min(
            a["super_rows"],
            a["whole_rows"] - self.super_index * a["super_rows"] + int(self.residue < a["longer_classes"]),
        )
        key_row = self.batch * a["key_rows"] + self.super_index * a["super_rows"] + first_key
        k, v = (self.tile_of(name, key_row, self.residue, self.kv_head) for name in "kv")
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        own_rows = first_key + torch.arange(keys)
        for head, partner, tile, count, masked in self.entries():
            row = self.batch * a["sequence_rows"] + self.super_index * a["super_rows"] + tile * rows
            q, dout = (self.tile_of(name, row, partner, head) for name in ("q", "dout"))
            segment = ((self.batch * a["n_heads"] + head) * a["R"] + partner) * a["n_supers"] + self.super_index
            stats = _read(a["stats_desc"], [2 * (segment * a["stats_rows"] + tile * rows)])
            p = torch.exp2(k @ q.T * a["scale_log2"] - stats[:rows])
            if a["COUNTED"]:
                p = p * count
            if a["RAGGED"]:
                p = p * (own_rows < end)[:, None]
            if masked and a["CAUSAL"]:
                last = tile * rows + torch.arange(rows) - int(self.residue > partner)
                p = p * (own_rows[:, None] <= last)
            ds = p * (v @ dout.T - stats[rows:])
            dv += p @ dout
            dk += ds @ q
            sums = a["sums_desc"]
            for half in range(2):
                place = (partner * a["some_kv_heads"] - a["first_kv_head"]) * a["heads_per_kv"] + head
                column = place * dim + half * dim // 2
                share = ds.T @ k[:, half * dim // 2 : (half + 1) * dim // 2]
                _add(sums, [row, column], share)
        if self.slot >= 0:
            places = a["slots_ptr"].view(-1, a["n_slots"], 2, keys, dim)
            places[self.batch * a["n_kv_heads"] + self.kv_head, self.slot] = torch.stack((dk, dv)).float()
            return
        there = own_rows[own_rows < end]
        tokens = (self.super_index * a["super_rows"] + there) * a["R"] + self.residue
        for name, found in (("dk_ptr", dk * a["scale"]), ("dv_ptr", dv)):
            result = a[name].view(-1, a["length"], a["n_kv_heads"], dim)
            before = result[self.batch, tokens, self.kv_head].double() if a["ADD"] else 0.0
            result[self.batch, tokens, self.kv_head] = (before + found[: len(there)]).to(result.dtype)

    def tile_of(self, name: str, row: int, residue: int, head: int) -> Tensor:
        a = self.given
        descriptor = a[f"{name}_desc"]
        moved = int(residue < a["left_over"] and row + descriptor.block_shape[0] > a["whole_rows"])
        column = (residue + moved * a["R"]) * a[f"{name}_token"] + head * a[f"{name}_head"]
        return _read(descriptor, [row - moved, column])


def _read(descriptor: Any, at: list[int]) -> Tensor:
    """A box in float64; zeros beyond the ends, as the copy engine gives."""
    whole = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides)
    box = torch.zeros(descriptor.block_shape, dtype=torch.float64)
    there = whole[tuple(slice(start, start + size) for start, size in zip(at, box.shape, strict=True))]
    box[tuple(slice(0, size) for size in there.shape)] = there.double()
    return box


def _add(descriptor: Any, at: list[int], share: Tensor) -> None:
    whole = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides)
    there = whole[tuple(slice(start, start + size) for start, size in zip(at, share.shape, strict=True))]
    there += share[tuple(slice(0, size) for size in there.shape)].float()


def dilated(case: tuple, causal: bool) -> dict[str, float]:
    batch, n, heads, kv_heads, dim, segments, rates, cut = case
    generator = torch.Generator().manual_seed(n + heads)
    shapes = [(batch, n, one, dim) for one in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator).half() for shape in shapes)
    plan = residue_plan(segments, rates, n, heads, kv_heads, causal, tile=16, cut=cut)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact, _ = union_softmax(*leaves, multiplicity(n, heads, kv_heads, segments, rates, causal, "modulo", "head"))
    want = torch.autograd.grad(exact, leaves, dout.double())
    with mock.patch.object(forward, "on_hopper", return_value=False):
        out, lse = forward.fused_forward(q, k, v, plan)
    got = backward.fused_backward(dout, q, k, v, out, lse, plan)
    as_it_is = {}
    if n % plan.modulus and batch == 1:
        launches.cache_clear()
        with mock.patch.object(row_layout, "_LONGEST_TILE", TILES.longest):
            as_it_is = errors(backward.fused_backward(dout, q, k, v, out, lse, plan), want, "unpadded ")
        launches.cache_clear()
    base = tuple(torch.ones_like(x) for x in (q, k, v))
    more = backward.fused_backward(dout, q, k, v, out, lse, plan, onto=base)
    return errors(got, want) | as_it_is | errors((x.double() - 1 for x in more), want, "added ")


def blocks(case: tuple, causal: bool) -> dict[str, float]:
    n, heads, kv_heads, dim, block, mask_heads = case
    mask = np.random.default_rng(1).random((mask_heads, n // block, n // block)) < 0.6
    mask[:, :, 0] = True
    plan = BlockPlan(mask, block, n, causal)
    generator = torch.Generator().manual_seed(n)
    q, k, v, dout = (
        torch.randn(1, n, one, dim, generator=generator).half() for one in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact, _ = expected(*leaves, plan)
    want = torch.autograd.grad(exact, leaves, dout.double())
    with mock.patch.object(block_sparse_forward_sm90, "on_hopper", return_value=False):
        out, lse = block_sparse_forward(q, k, v, plan, scale=dim**-0.5)
    return errors(block_sparse_backward(dout, q, k, v, out, lse, plan, scale=dim**-0.5), want)


def errors(got: Any, want: Any, what: str = "") -> dict[str, float]:
    return {what + name: relative(g, w) for name, g, w in zip(("dq", "dk", "dv"), got, want, strict=True)}


if __name__ == "__main__":
    both = (False, True)
    with (
        mock.patch.object(backward_sm90, "_backward_kernel", Walk()),
        mock.patch.object(backward_at_once, "on_hopper", return_value=True),
        mock.patch.object(block_sparse_forward_sm90, "on_hopper", return_value=True),
        mock.patch.object(tuning, "_LEAST_PROGRAMS", 1),
        mock.patch.dict(tuning._LEAST_STEPS, branches=0, blocks=0),
        # So that heads follow each other, two K/V heads at a time in what is shorter.
        mock.patch.object(query_sums, "_PROGRAMS", 5),
        mock.patch.object(tuning, "_SPECIALIZED_BACKWARD", {(16, causal): TILES for causal in both}),
        # So that lists of a few tiles are shared.
        mock.patch.object(key_items, "_LEAST_STEPS", 2),
        mock.patch.object(key_items, "_PROGRAMS", 64),
    ):
        results = {}
        for gradients, cases in ((dilated, DILATED), (blocks, BLOCKS)):
            for name, case in cases.items():
                for causal in both:
                    Walk.launched = 0
                    results[f"{name}, {causal}"] = gradients(case, causal) | {"launches": Walk.launched}
    sys.stdout.write(json.dumps(results))

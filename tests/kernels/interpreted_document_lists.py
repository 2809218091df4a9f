"""Run by test_packing.py under TRITON_INTERPRET=1: the lists of random packings, which one launch writes, against their
definition. Prints, as JSON, the packings that differ and how many shapes the lists have.
"""

from __future__ import annotations

import json
import os
import random
import sys
from bisect import bisect_right
from itertools import accumulate, pairwise

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dilabench.kernels import tuning
from dilabench.kernels.fused import tile_tables
from dilabench.kernels.fused.document_lists import BLOCK_TOKENS
from dilabench.kernels.fused.packing import ListRequest, Packing, PassRequests
from dilabench.kernels.fused.residue_plan import document_plan, residue_plan
from dilabench.kernels.fused.tile_tables import DocumentTables, TileTables

NEVER = 2**31 - 1
BRANCHES = (((32, 64), (1, 2)), ((50, 95), (4, 7)), ((64,), (1,)), ((20, 54, 300), (1, 2, 4)))


def defined(
    request: ListRequest, tables: DocumentTables, bounds: list[int], n_spans: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Spans and visits of documents."""
    group, tile, stats = request.group, min(request.own, request.other), request.stats_tile
    counts = (tables.by_key if request.by_key else tables.by_query).tolist()
    listed = (tables.tables.order if request.by_key else tables.tables.items).shape[-2]
    spans: list[list[int]] = []
    variants: list[int] = []
    of_stats = stored = 0
    for start, stop in pairwise(bounds):
        for first in range(start, stop, group.super_tokens):
            tokens = min(group.super_tokens, stop - first)
            rows, variant = -(-tokens // group.modulus), 0
            if tokens < group.super_tokens:
                in_tiles = -(-rows // tile) * tile
                tail = min(group.modulus * in_tiles - (tokens // group.modulus < in_tiles), group.super_tokens - 1)
                variant = 1 + tables.tails.tolist().index(tail)
            spans.append([first, tokens, of_stats, stored])
            variants.append(variant)
            of_stats, stored = of_stats + -(-rows // stats) * stats, stored + rows
    order = sorted(range(len(spans)), key=lambda at: -spans[at][1])
    visits = [
        [*spans[at], variants[at], item, listed, group.stored_rows]
        for at in order
        for item in range(counts[variants[at]])
    ]
    visits += [[0, 0, 0, 0, 0, listed - 1, listed, group.stored_rows]] * (request.most_visits - len(visits))
    return spans + [[NEVER] * 4] * (n_spans - len(spans)), visits


def differ(number: int) -> bool:
    choose = random.Random(number)
    segments, rates = BRANCHES[number % len(BRANCHES)]
    lengths = [choose.choice((0, 1, 2, 15, 16, 17, 64, choose.randint(1, 700))) for _ in range(choose.randint(1, 9))]
    bounds = [*accumulate((*lengths, choose.randint(1, 300)), initial=0)]
    # Lists that are made for the tails of one packing, too.
    tuning.DOCUMENT_ENTRIES = 1 if number % 3 == 2 else 1 << 23
    tile_tables._made_together.cache_clear()
    by_tensor = choose.random() < 0.5
    if by_tensor:
        packing = Packing(torch.tensor(bounds[: choose.randint(2, len(bounds))], dtype=torch.int32), bounds[-1], 1000)
        bounds = [*packing.bounds(torch.empty(0)).tolist(), bounds[-1]]
    else:
        packing = Packing([*dict.fromkeys(bounds)])
    about = (4, 2, choose.random() < 0.5, "modulo", "head", 16, None)
    plan = document_plan(segments, rates, packing, *about, separate=choose.random() < 0.4)
    requests = [
        ListRequest(group, own, 16, by_key, stats)
        for group in plan.groups
        for by_key in (False, True)
        for own, stats in ((16, 1), (min(32, group.largest_tile), 32))
    ]
    lists = packing.lists(PassRequests(*requests), plan.causal, torch.empty(0))
    documents = lists.documents.tolist()
    for index, (request, each) in enumerate(zip(requests, lists.of_groups, strict=True)):
        right, visits = defined(request, each.tables, bounds, len(each.spans))
        if each.spans.tolist() != right or each.visits.tolist() != visits:
            return True
        first_rows = {span[0]: span[3] for span in right}
        if any(first_rows[line[0]] != line[1 + index] for line in documents if line[0] in first_rows):
            return True
    starts = [line[0] for line in documents]
    there = bounds if by_tensor else [*dict.fromkeys(bounds)]
    if starts != there + [bounds[-1]] * (len(starts) - len(there)):
        return True
    begun = [bisect_right(there, token) - 1 for token in range(0, bounds[-1], BLOCK_TOKENS)]
    return lists.blocks[: len(begun)].tolist() != begun


def shapes(causal: bool) -> int:
    """Of the launches of several packings of as many tokens and documents: what is compiled hangs on them."""
    found = set()
    for seed in range(4):
        choose = random.Random(seed)
        packing = Packing((0, 1200, *sorted(choose.sample(range(1201, 4000), 9)), 4000))
        plan = document_plan((256, 1024), (1, 2), packing, 4, 2, causal)
        requests = PassRequests(*(ListRequest(group, 64, 64, key) for group in plan.groups for key in (False, True)))
        lists = packing.lists(requests, causal, torch.empty(0))
        found.add((id(plan), lists.documents.shape, *(each.visits.shape for each in lists.of_groups)))
    return len(found)


def kept_apart() -> bool:
    """Lists of the same tails of a single sequence, and of documents."""
    branches, about, x = ((64,), (1,)), (1, 1, True), torch.empty(0)
    (alone,) = residue_plan(*branches, 200, *about).groups
    (group,) = document_plan(*branches, Packing((0, 150, 200)), *about).groups
    for _ in range(2):
        if not isinstance(tile_tables.tile_tables(alone, 16, 16, True, False, x.device), TileTables):
            return False
        requests = PassRequests(ListRequest(group, 16, 16))
        (lists,) = Packing((0, 150, 200)).lists(requests, True, x).of_groups
        if lists.spans[:4, :2].tolist() != [[0, 64], [64, 64], [128, 22], [150, 50]]:
            return False
    return True


if __name__ == "__main__":
    first, last = map(int, sys.argv[-2:])
    found = {
        "different": [number for number in range(first, last) if differ(number)],
        "shapes": [shapes(causal) for causal in (False, True)],
        "kept apart": kept_apart(),
    }
    sys.stdout.write(json.dumps(found))

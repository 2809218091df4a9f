"""Calls of many shapes one after the other, and what a process holds meanwhile."""

import gc
import os
import random
import threading
import time

import torch
from torch.distributed import distributed_c10d

from dilabench.attention import over_ranks, ring_attention, sequence_shards
from dilabench.distributed import calls as calls_module


def held():
    """(process groups, file descriptors, threads, tensors, KiB in memory) of this process."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    with open("/proc/self/statm", encoding="ascii") as pages:
        kib = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return len(distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd")), threading.active_count(), tensors, kib


def one_call(draw):
    """Forward and backward of a random kind and shape, the same on every rank."""
    heads, dim = draw.choice([(2, 1), (2, 2), (4, 2)]), draw.choice([4, 8])
    options = {"causal": draw.random() < 0.7}
    kind = draw.choice(["dense", "dilated", "packed", "packed dilated"])
    if kind.startswith("packed"):
        bounds = [0]
        for _ in range(draw.randrange(1, 7)):
            bounds.append(bounds[-1] + draw.randrange(1, 40))
        options["causal"] = True
        orders = ["zigzag"] if kind == "packed dilated" else ["balanced", "zigzag"]
        if kind == "packed dilated":
            options |= {"segment_lengths": (8, 16), "dilation_rates": (1, 2)}
        shards = sequence_shards(cu_seqlens=bounds, order=draw.choice(orders))
    elif kind == "dilated":
        segment = draw.choice([4, 8])
        options |= {"segment_lengths": (segment, 4 * segment), "dilation_rates": (1, 2)}
        shards = sequence_shards(draw.randrange(8, 90), order="contiguous")
    else:
        shards = sequence_shards(draw.randrange(4, 90))
    lead = () if kind.startswith("packed") else (draw.choice([1, 2]),)
    q, k, v = (torch.randn(*lead, shards.rows, count, dim, requires_grad=True) for count in (heads[0], *heads[1:] * 2))
    ring_attention(q, k, v, shards, backend="math", **options).sum().backward()


def many(_world, calls, warm):
    """What is held after `warm` calls and after all of them."""
    draw = random.Random(3)
    for _ in range(warm):
        one_call(draw)
    before = held()
    for _ in range(calls - warm):
        one_call(draw)
    return before, held()


def in_one_cut(world, calls, most):
    """The numbers of functions and of entries in the store after each call of another shape, of which few are kept."""
    over_ranks.MOST_FUNCTIONS, calls_module.PERIOD_S = most, 0.01
    shards = sequence_shards(24)
    numbers = []
    for batch in [*range(1, calls + 1), 1]:
        q = torch.randn(batch, shards.rows, 2, 4, requires_grad=True)
        out = ring_attention(q, q, q, shards, backend="math")
        out.sum().backward()
        time.sleep(0.02)
        numbers.append((len(shards._functions), world.calls._group_store.num_keys()))
    return numbers

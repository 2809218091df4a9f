"""What ranks do with the copy engines of real GPUs."""

import time
from functools import partial

import torch

from dilabench.attention import ring_attention, sequence_shards


def swapped(world, lengths):
    """Strided messages of each length to and from every other rank: what carried them, and which arrived wrong."""
    others = [rank for rank in range(world.size) if rank != world.rank]
    wrong = []
    for length in lengths:
        mine = torch.arange(2 * length, device=world.device).mul_(world.size).add_(world.rank).view(length, 2)
        kept = {rank: torch.full((length,), -1, device=world.device) for rank in others}
        pending = world.send_recv(
            {rank: [mine[:, 1]] for rank in others}, {rank: [kept[rank]] for rank in others}, "test"
        )
        if world.copies is not None:
            # What was sent may be overwritten at once, in the stream's order.
            mine.zero_()
        pending.wait()
        wanted = torch.arange(1, 2 * length, 2, device=world.device).mul_(world.size)
        wrong += [(length, rank) for rank in others if not torch.equal(kept[rank], wanted + rank)]
    return world.transport, wrong


def late(world, timeout_s):
    """Rank 1 sends long after rank 0 has stopped waiting."""
    world.copies.timeout_s = timeout_s
    inbox = torch.empty(8, device=world.device)
    if world.rank == 1:
        time.sleep(3 * timeout_s)
    world.send_recv({1 - world.rank: [torch.ones_like(inbox)]}, {1 - world.rank: [inbox]}, "test").wait()
    if world.rank == 0:
        # The wait above is the stream's: this one is for the device, and tells what was too slow.
        world.barrier()
    # What ends a world in order waits for all ranks; this is what a rank says that another one has left.
    raise RuntimeError("connection closed by peer")


def captured(world, lengths, rounds):
    """An exchange of each length in a graph of its own, replayed between eager exchanges: which arrive wrong."""
    peer = 1 - world.rank
    exchanges = []
    for length in lengths:
        mine, inbox = torch.zeros(length, device=world.device), torch.empty(length, device=world.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            world.send_recv({peer: [mine]}, {peer: [inbox]}, "test").wait()
        exchanges.append((mine, inbox, graph.replay))
    mine, inbox = (torch.empty(1000, device=world.device) for _ in range(2))

    def eager():
        world.send_recv({peer: [mine]}, {peer: [inbox]}, "test").wait()

    wrong = []
    for number in range(rounds):
        for at, (sent, arrived, exchange) in enumerate([*exchanges, (mine, inbox, eager), *exchanges]):
            value = 100 * number + 10 * at
            sent.fill_(value + world.rank)
            if world.rank == number % 2:
                time.sleep(0.02)
            exchange()
            wrong += [(number, at)] * (not bool((arrived == value + peer).all()))
    world.barrier()
    world.confirm_counts()
    return wrong


def stuck(world, timeout_s):
    """Rank 0 replays an exchange, rank 1 does not."""
    peer = 1 - world.rank
    mine, inbox = torch.zeros(8, device=world.device), torch.empty(8, device=world.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.send_recv({peer: [mine]}, {peer: [inbox]}, "test").wait()
    world.copies.timeout_s = timeout_s
    if world.rank == 0:
        graph.replay()
        torch.cuda.synchronize()
    time.sleep(10 * timeout_s)


def graphed(world):
    """`ring_attention` with gradients in graphs: what carries its messages, and which results differ from a call's."""
    wrong = []
    for algorithm, order in (("zigzag-ring", "zigzag"), ("zigzag-allgather", "zigzag"), ("ulysses", "contiguous")):
        shards = sequence_shards(1030, order=order)
        draw = partial(torch.randn, 2, shards.rows, 4, 64, device=world.device, dtype=torch.bfloat16)
        attend = partial(ring_attention, shards=shards, algorithm=algorithm)
        samples = tuple(draw().requires_grad_() for _ in range(3))
        replay = torch.cuda.make_graphed_callables(lambda q, k, v, attend=attend: attend(q, k, v), samples)
        for number in range(4):
            leaves, dout = [draw().requires_grad_() for _ in range(3)], draw()
            answers = []
            for function in (attend, replay, attend):
                out = function(*leaves)
                answers.append([x.clone() for x in (out, *torch.autograd.grad(out, leaves, dout))])
            # Kernels may add gradients in any order; a message of another replay makes them wrong by their own size.
            for out, *gradients in answers[1:]:
                right = torch.equal(out, answers[0][0])
                for found, wanted in zip(gradients, answers[0][1:], strict=True):
                    right &= bool((found - wanted).abs().max() <= 0.01 * wanted.abs().max())
                wrong += [(algorithm, number)] * (not right)
    return shards.transport(world.device), wrong


def miscounted(world):
    """What a rank says whose counters were set back, as by a graph that is replayed."""
    peer = 1 - world.rank
    inbox = torch.empty(8, device=world.device)
    world.send_recv({peer: [torch.ones_like(inbox)]}, {peer: [inbox]}, "test").wait()
    world.barrier()
    world.confirm_counts()
    answers = []
    if world.rank == 0:
        world.copies._memory[: world.copies._buffers.counters_bytes].zero_()
        torch.cuda.synchronize()
        for use in (world.confirm_counts, world.check, world.barrier):
            try:
                use()
            except RuntimeError as error:
                answers.append(str(error))
        world.copies._trouble = ""
    return answers

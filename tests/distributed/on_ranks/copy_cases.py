"""What ranks do with the copy engines of real GPUs."""

import time

import torch


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


def captured(world, rounds):
    """An exchange in a CUDA graph: what it is answered, and which messages of other exchanges arrive wrong after it."""
    peer = 1 - world.rank
    mine, inbox = torch.zeros(1000, device=world.device), torch.empty(1000, device=world.device)
    answers, wrong = [], []
    for number in range(rounds):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                world.send_recv({peer: [mine]}, {peer: [inbox]}, "test").wait()
            graph.replay()
        except RuntimeError as error:
            answers.append(str(error))
        torch.cuda.synchronize()
        mine.fill_(10 * number + world.rank)
        world.send_recv({peer: [mine]}, {peer: [inbox]}, "test").wait()
        wrong += [number] * (not bool((inbox == 10 * number + peer).all()))
    world.barrier()
    world.confirm_counts()
    return answers, wrong


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

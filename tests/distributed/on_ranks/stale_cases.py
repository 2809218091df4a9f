"""A rank that is handed messages of the call before, and whether the check of timed calls sees it."""

import torch

from dilabench.distributed.world import World
from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.case_spec import case_spec
from dilabench.engine.verify.timed_outputs import TimedOutputs
from dilabench.plugins.manager import discover
from dilabench.record import Case


class Messages:
    """What this rank receives: kept in the first call, and given again, from one sender, in the second."""

    def __init__(self, sender):
        self.sender, self.kept, self.replayed = sender, [], None

    def received(self, tensors):
        """After a message's arrival: `tensors` from the sender hold what the mode of this call says."""
        for tensor in tensors:
            if self.replayed is None:
                self.kept.append(tensor.clone())
            else:
                tensor.copy_(self.replayed.pop(0))

    def __enter__(self):
        self.originals = World.send_recv, World.all_to_all
        send_recv, all_to_all = self.originals

        def late_send_recv(world, sends, receives, kind):
            return Late(send_recv(world, sends, receives, kind), self, list(receives.get(self.sender, ())))

        def late_all_to_all(world, flat, input_split_sizes, output_split_sizes, kind):
            received, pending = all_to_all(world, flat, input_split_sizes, output_split_sizes, kind)
            parts = received.split(list(output_split_sizes))
            return received, Late(pending, self, [] if self.sender is None else [parts[self.sender]])

        World.send_recv, World.all_to_all = late_send_recv, late_all_to_all
        return self

    def __exit__(self, *_):
        World.send_recv, World.all_to_all = self.originals


class Late:
    """Messages on their way, as `World` gives them."""

    def __init__(self, pending, messages, tensors):
        self.pending, self.messages, self.tensors = pending, messages, tensors

    def wait(self):
        self.pending.wait()
        if self.tensors:
            self.messages.received(self.tensors)
            self.tensors = []


def checked(world, name, backend, workload, seeds, pairs):
    """For each (reader, sender) pair and seed, the names of the checks that fail after the second of two timed calls,
    in which the reader is given what the sender sent it in the first; None in place of a pair: all is right."""
    specification = case_spec(
        Case(implementation=name, backend=backend, workload=workload, world_size=world.size), discover().catalogue, 0
    )
    return [_failed(world, specification.model_copy(update={"seed": seed}), pair) for pair in pairs for seed in seeds]


def _failed(world, specification, pair):
    reader, sender = pair or (None, (world.rank + 1) % world.size)
    device = torch.device("cpu")
    call = PreparedCall(specification, device, InputStore(device), world)
    checker = TimedOutputs(call)
    call.timed_calls.begin(last=True)
    with Messages(sender if world.rank == reader or reader is None else None) as messages:
        call.fresh()()
        if world.rank == reader:
            messages.replayed = messages.kept
        call.fresh()()
    verification = checker.check(call.timed_calls.end())
    failed = {check.name for check in verification.checks if not check.passed}
    return sorted({check for several in world.share(failed) for check in several})

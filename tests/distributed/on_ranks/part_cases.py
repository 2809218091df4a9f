"""What ranks run: calls without their communication and without their computation, and bytes of many calls."""

from dataclasses import replace

import ring_cases
import torch

from dilabench.distributed.whole import Whole
from dilabench.engine.worker.overlap_timing import communication_only, computation_only


def ablated(world, calls):
    """For each call (name, workload), `_ablated`."""
    return [_ablated(world, *call) for call in calls]


def _ablated(world, name, one):
    """(kernel calls, bytes received) of the call as it is, without communication, without computation."""
    called = []

    def spy(function):
        return lambda *arguments, **options: called.append(1) or function(*arguments, **options)

    context = ring_cases.context(world)
    backend = context.require_backend()
    calls = {"attend": spy(backend.attend), "attend_backward": spy(backend.attend_backward)}
    if one.layout == "packed":
        kernel = ring_cases.packed_kernel()
        calls["packed"] = kernel._replace(attend=spy(kernel.attend), attend_backward=spy(kernel.attend_backward))
    backend = replace(backend, **calls, aligns_ends=True, places_results=True)
    context = replace(context, backend=backend)
    found = []
    for change in (lambda same: same, computation_only, communication_only):
        function = ring_cases.BUILDS[name](one, change(context))
        tokens = 0 if one.layout == "packed" else 1
        q, k, v, dout = (function.shards.take(x, world.rank, tokens) for x in ring_cases.random_inputs(one))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        world.traffic.clear()
        called.clear()
        gradients = torch.autograd.grad(function(*leaves), leaves, dout)
        assert [x.shape for x in gradients] == [x.shape for x in leaves]
        found.append((len(called), world.traffic.counters()["received_bytes"]))
    return found


def received(world, calls):
    """Bytes received forward, backward and in both, of calls (name, workload)."""
    found = []
    for steps in ring_cases.counted(world, calls):
        forward, backward = (step["received_bytes"] for step in steps)
        found.append({"forward": forward, "backward": backward, "both": forward + backward})
    return found


def joined(world, one):
    """Bytes received forward and backward by a ring of whole tensors, less those of the ring of shards."""
    function = ring_cases.BUILDS["ring"](one, ring_cases.context(world))
    q, k, v, dout = ring_cases.random_inputs(one)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    world.traffic.clear()
    torch.autograd.grad(Whole(function)(*leaves), leaves, dout)
    return world.traffic.counters()["received_whole_bytes"]

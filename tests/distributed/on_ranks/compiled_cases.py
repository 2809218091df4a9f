"""What ranks run for `dilabench.attention.ring_attention` under torch.compile."""

from functools import partial

import ring_cases
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dilabench.attention import ring_attention, sequence_shards
from dilabench.impls import one_operator
from dilabench.impls.call import written

BRANCHES = {"segment_lengths": (6, 12, 24), "dilation_rates": (1, 2, 4)}
# Sequences, their order, options: nothing is kept for the backward pass, or one, two, five tensors.
# "packed" has as many numbers on each rank as "dilated": inductor then builds the same kernels for both, and only once.
CASES = {
    "dense": ({"seq_len": 37}, "zigzag", {}),
    "window, two calls": ({"seq_len": 37}, "zigzag", {"window": (5, 0), "scale": 0.3}),
    "whole heads": ({"seq_len": 37}, "contiguous", {"algorithm": "ulysses"}),
    "packed": ({"cu_seqlens": (0, 1, 3, 30, 48)}, "zigzag", {}),
    "packed in balance": ({"cu_seqlens": (0, 1, 3, 290, 300, 700)}, "balanced", {}),
    "dilated": ({"seq_len": 24}, "contiguous", BRANCHES),
    "nothing to send": ({"seq_len": 48}, "contiguous", BRANCHES),
}


def block(x, shards, options):
    """A function of embeddings [..., 48] as a layer of a model is."""
    q, k, v = (1.5 * x).unflatten(-1, (8, 6)).split((4, 2, 2), -2)
    return ring_attention(q, k, v, shards, **options).sin()


def twice(x, shards, options):
    y = checkpoint(block, x, shards, options, use_reentrant=False)
    return block(torch.cat((y, y), -2).flatten(-2), shards, options)


def embeddings(shards):
    lead = (shards.rows,) if shards.packed else (2, shards.rows)
    return torch.randn(*lead, 48, dtype=torch.float64, requires_grad=True)


def results(function, x, *arguments):
    """out and dx."""
    out = function(x, *arguments)
    return out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out).cumsum(-1))


def unequal(function, compiled, *arguments):
    """The largest difference between a function and what was compiled from it."""
    pairs = zip(results(function, *arguments), results(compiled, *arguments), strict=True)
    return max(ring_cases.difference(actual, expected) for actual, expected in pairs)


def wrong(_world, backend, names):
    """Cases in which a single graph gives other results than a call."""
    found = []
    for name in names:
        torch._dynamo.reset()
        sequences, order, options = CASES[name]
        shards = sequence_shards(**sequences, order=order)
        function = twice if "two calls" in name else block
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        if not unequal(function, compiled, embeddings(shards), shards, options) <= ring_cases.TOLERANCE:
            found.append(name)
    return found


def compiled_anew(world):
    """Documents of other lengths are the same graph once the compiler has seen that lengths change."""
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for index, bounds in enumerate([(0, 5, 40), (0, 17, 40), (0, 20, 60), (0, 33, 70), (0, 10, 20, 90), (0, 7, 100)]):
        shards = sequence_shards(cu_seqlens=bounds, order="balanced")
        with torch.compiler.set_stance("fail_on_recompile" if index > 2 else "default"):
            assert unequal(block, compiled, embeddings(shards), shards, {}) <= ring_cases.TOLERANCE
    return world.size


def transformed(_world):
    """The difference of torch.func.grad, compiled or not, from autograd's gradient."""
    torch._dynamo.reset()
    shards = sequence_shards(24)
    x = embeddings(shards)
    (right,) = torch.autograd.grad(block(x, shards, {}).square().sum(), x)
    function = torch.func.grad(lambda x: block(x, shards, {}).square().sum())
    both = function, torch.compile(function, fullgraph=True, backend="aot_eager")
    return max(ring_cases.difference(one(x.detach()), right) for one in both)


def selected(_world):
    """The difference of gradients where a checkpoint computes all again but the operator, whose results it saves."""

    def policy(_context, operator, *_arguments, **_options):
        saved = operator is torch.ops.dilabench.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(*arguments):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, *arguments, use_reentrant=False, context_fn=contexts)

    shards = sequence_shards(24)
    return unequal(block, checkpointed, embeddings(shards), shards, {})


def checked(_world):
    """torch's own checks of the operators, and whether bytes were kept."""
    shards = sequence_shards(24)
    tensors = [torch.randn(2, 12, 4, 6, requires_grad=True) for _ in range(3)]
    options = ("?kind=dense", [], [], True, [-1, -1], None, [], 0, False, "auto", "auto", [], None)
    torch.library.opcheck(one_operator._attention_op, (*tensors, None, None, None, None, shards._number, *options))
    detached, found_by = [x.detach() for x in tensors], (shards._number, written(*options))
    torch.library.opcheck(one_operator._forward_op, (*detached, None, None, None, None, *found_by))
    out, lse, kept = one_operator._forward_op(*detached, None, None, None, None, *found_by)
    given = (torch.ones_like(out), None, *detached, out, lse, kept, None, None, None, *found_by)
    torch.library.opcheck(one_operator._backward_op, given)
    return len(kept) > 0


def gone(_world):
    """What is said where the shards no longer are."""
    shards = sequence_shards(24)
    out = torch.compile(block, fullgraph=True, backend="aot_eager")(embeddings(shards), shards, {})
    del shards
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def everything(world):
    """All of it, by one start of ranks."""
    differences = transformed(world), selected(world)
    return wrong(world, "aot_eager", CASES), compiled_anew(world), differences, checked(world), gone(world)

"""What ranks run in the tests of `block-sparse-ring`: against one device, in float64, under a random dout."""

import numpy as np
import torch
from ring_cases import by_one_device, difference, off, random_inputs, results

from dilabench.contracts import BuildContext
from dilabench.distributed.whole import Whole
from dilabench.distributed.world import World
from dilabench.impls.block_sparse import block_sparse as one_device
from dilabench.impls.ring import block_sparse, multihead
from dilabench.impls.ring.schedule.row_exchange import Returned, RowGather
from dilabench.workload.spec import Workload

BASE = {
    "batch_size": 2,
    "seq_len": 61,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "dtype": "float64",
    "mode": "both",
}


def workload(pattern=None, **fields):
    """Blocks of 5: the last of 13 holds one row."""
    asked = {"kind": "block_sparse", "mask": "random", "block_size": 5, "sparsity": 0.6, **(pattern or {})}
    return Workload.model_validate({**BASE, **fields, "pattern": asked})


def selected(selector, block_size=5, top_k=3, **fields):
    """The same under a selection for each key/value head."""
    pattern = {"kind": "topk_blocks", "selector": selector, "block_size": block_size, "top_k": top_k}
    return Workload.model_validate({**BASE, **fields, "pattern": pattern})


KINDS = {
    f"{mask}{', full' * (not causal)}": workload({"mask": mask}, causal=causal)
    for mask in ("local_window", "global_local", "dilated_sparse", "strided", "hierarchical", "random")
    for causal in (True, False)
}
SELECTIONS = {
    **{
        f"{selector}{', full' * (not causal)}": selected(selector, causal=causal)
        for selector in ("mean_key", "pooled", "random")
        for causal in (True, False)
    },
    "a selection of one block per head": selected("random", top_k=1, num_heads=6, num_kv_heads=6, causal=False),
    "a selection for three heads each": selected("pooled", num_heads=6, num_kv_heads=2, seq_len=97),
    "one key head selects": selected("random", num_kv_heads=1, causal=False),
    "all blocks are selected": selected("random", top_k=99, causal=False),
    "blocks of a long sequence": selected("mean_key", block_size=16, top_k=4, seq_len=701, batch_size=1),
}
CASES = {
    **KINDS,
    **SELECTIONS,
    "a mask per head": workload({"per_head": True}),
    "a mask per head, full": workload({"per_head": True}, causal=False, num_heads=6, num_kv_heads=3),
    "one key head, N prime": workload(seq_len=97, num_heads=5, num_kv_heads=1, causal=False),
    "whole blocks": workload({"block_size": 8}, seq_len=64, num_kv_heads=4, batch_size=1),
    "fewer blocks than ranks": workload({"block_size": 16}, seq_len=30),
    "fewer blocks than ranks, full": workload({"block_size": 16}, seq_len=30, causal=False),
    "one block": workload({"block_size": 64}, seq_len=7, causal=False),
    "everything": workload({"sparsity": 0.0}, causal=False),
    "almost nothing": workload({"mask": "local_window", "sparsity": 0.98}),
}


def custom(path, mask, block, seq_len, **fields):
    """A workload with a mask from a file."""
    np.save(path, mask)
    return workload(
        {"mask": "custom", "mask_file": str(path), "block_size": block, "sparsity": 0.0}, seq_len=seq_len, **fields
    )


def exact(world, cases):
    """(case, part, error) of everything that is off, after every case."""
    return [(case, *off) for case, (wrong, *_) in exact_and_counted(world, cases).items() for off in wrong]


def exact_and_counted(world, cases):
    """By case: (part, error) of this rank's rows of everything that is off, the positions of every rank, and bytes of
    keys, of gradients and of all that one forward and backward pass brought this rank.
    """
    found, alone = {}, by_one_device(world, cases, one_device.build)
    for case, one in cases.items():
        function = built(one, world)
        world.traffic.clear()
        wrong = off(function, random_inputs(one), alone[case])
        counters = world.traffic.counters()
        kinds = ("received_keys_bytes", "received_gradients_bytes", "received_bytes")
        parts = [[at for span in part for at in range(span.start, span.stop)] for part in function.shards.parts]
        found[case] = wrong, parts, [counters.get(kind, 0) for kind in kinds]
    return found


def without_returned_gradients(world, cases):
    """What `exact` finds when a rank keeps the dK and dV that it has made of others' blocks."""
    Returned.add = lambda self, _dk, _dv: self.work.wait()
    return exact(world, cases)


def without_a_needed_block(world, cases):
    """What `exact` finds when the first gathered block never arrives."""
    gather = RowGather.gather

    def lose(self, k, v):
        keys, values, pending = gather(self, k, v)
        pending.wait()
        keys[:, :1] = values[:, :1] = 0
        return keys, values, pending

    RowGather.gather = lose
    return exact(world, cases)


def half_precision(world):
    """Of bfloat16 against float64: (part, root mean square error over ranks, that on one device, largest error over
    ranks, what it may be: that on one device and a rounding more for each rank's part of a sum).
    """
    one = workload({"block_size": 16}, seq_len=509, dtype="bfloat16")
    inputs = [x.bfloat16() for x in random_inputs(one)]
    exactly = results(
        one_device.build(one.replace(dtype="float64"), BuildContext(device=world.device)), [x.double() for x in inputs]
    )
    alone = results(one_device.build(one, BuildContext(device=world.device)), inputs)
    ours = results(Whole(built(one, world)), inputs)
    found = []
    for part, exact in exactly.items():
        errors = [(x[part] - exact).abs() for x in (ours, alone)]
        spread = [float(error.square().mean().sqrt()) for error in errors]
        rounding = float(exact.abs().max()) * torch.finfo(torch.bfloat16).eps / 2
        found.append((part, *spread, float(errors[0].max()), float(errors[1].max()) + world.size * rounding))
    return found


def projected(world):
    """Largest differences of the sharded module from one device: out, dx, and every parameter's gradient."""
    one = workload(seq_len=61, num_heads=4, num_kv_heads=2)
    generator = torch.Generator().manual_seed(3)
    x, dout = (torch.randn(2, 61, 24, generator=generator, dtype=torch.float64) for _ in range(2))
    shards = built(one, world).shards
    found = []
    for ranks in (world, World.single()):
        module = multihead.build_block_sparse(one, BuildContext(device=world.device, world=ranks))
        own_x, own_dout = (shards.take(t, world.rank) if ranks is world else t for t in (x, dout))
        own_x = own_x.clone().requires_grad_()
        out = module(own_x)
        found.append([out.detach(), *torch.autograd.grad(out, [own_x, *module.parameters()], own_dout)])
    ours, theirs = found
    wanted = [shards.take(t, world.rank) for t in theirs[:2]] + theirs[2:]
    return [difference(a, b) for a, b in zip(ours, wanted, strict=True)]


def built(one, world):
    return block_sparse.build(one, BuildContext(device=world.device, world=world))

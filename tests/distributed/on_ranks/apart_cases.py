"""`fused-sharded` on ranks against the formula: its cuts and shards with another local part, and its own kernels."""

import torch
from ring_cases import context, difference, dilated, random_inputs, results, workload

from dilabench.contracts import BuildContext
from dilabench.distributed.whole import Whole
from dilabench.engine.verify.oracle import reference

CASES = {
    "even parts": workload(pattern=dilated([4, 8], [1, 2]), seq_len=48),
    "parts of three and two segments, a short one at the end": workload(pattern=dilated([4, 8], [1, 2]), seq_len=37),
    "grouped heads, full": workload(pattern=dilated([4, 8], [1, 2], heads="grouped"), seq_len=48, causal=False),
}
PLANNED = workload(
    pattern=dilated([64, 128], [1, 2]), seq_len=512, num_heads=2, num_kv_heads=2, head_dim=16, dtype="float32"
)


class Local:
    """`strided` without what it keeps for detached gradients."""

    def __init__(self, one, build_context):
        from dilabench.impls import strided

        self.union = strided.build(one, build_context)

    def forward(self, q, k, v):
        return self.union.forward(q, k, v)[:2]

    def backward(self, *tensors):
        return self.union.backward(*tensors)


def exact(world):
    """(case, part, error) of every result of every case, and the bytes that were sent."""
    from dilabench.impls.ring.fused_sharded import build_local

    found = []
    for name, one in CASES.items():
        inputs = random_inputs(one)
        wanted = results(reference.build(one, BuildContext(device=world.device)), inputs)
        function = build_local(one, context(world), Local)
        for part, value in results(Whole(function), inputs).items():
            found.append((name, part, difference(value, wanted[part])))
        world.traffic.clear()
        function(*(function.shards.take(x, world.rank) for x in inputs[:3]))
    return found, world.traffic.counters()


def interpret():
    """Kernels that this process imports from now on run in Triton's interpreter."""
    import interpreter

    interpreter.set_up()


def fused(world):
    """The largest error of each result of the kernels, interpreted, in float32."""
    interpret()
    from dilabench.impls.ring import fused_sharded

    inputs = [x.float() for x in random_inputs(PLANNED)]
    wanted = results(reference.build(PLANNED, BuildContext(device=world.device)), inputs)
    function = fused_sharded.build(PLANNED, BuildContext(device=world.device, world=world))
    found = results(Whole(function), inputs)
    return {part: float((value - wanted[part]).abs().max()) for part, value in found.items()} | {
        "local rows": function._algorithm.local.plan.sequence_length
    }


# The first branch lies on a rank, the second crosses, the third is a segment of all; no branch covers every row.
CROSSING = {
    "causal": PLANNED.replace(pattern=dilated([64, 256, 512], [1, 2, 4])),
    "full, grouped keys, rows that no branch covers": PLANNED.replace(
        pattern=dilated([128, 512], [4, 8]), causal=False, num_heads=4
    ),
    "everything crosses": PLANNED.replace(pattern=dilated([512], [1])),
}


def fused_beside_messages(world):
    """By case: the largest error of `fused-allgather`, its kernels interpreted, its notes, and the bytes received."""
    interpret()
    from dilabench.impls.ring import allgather

    found = {}
    for case, one in CROSSING.items():
        inputs = [x.float() for x in random_inputs(one)]
        wanted = results(reference.build(one, BuildContext(device=world.device)), inputs)
        function = allgather.build_fused(one, context(world))
        world.traffic.clear()
        got = results(Whole(function), inputs)
        notes = [note.code for note in function.notes]
        received = world.traffic.received["keys"]
        found[case] = max(float((got[part] - wanted[part]).abs().max()) for part in got), notes, received
    return found


def packed_in_tiles(world):
    """By implementation: the largest error of packed documents whose rows on the same rows dilabench's tiles compute,
    interpreted, and the notes.
    """
    interpret()
    from dilabench.impls import packed
    from dilabench.impls.ring import gathered, ulysses

    packed.has_kernel = lambda *_: True
    fields = {"seq_len": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32", "batch_size": 1}
    one = workload(layout="packed", cu_seqlens=(0, 60, 61, 190, 512), **fields)
    inputs = [x.float() for x in random_inputs(one)]
    wanted = results(reference.build(one, BuildContext(device=world.device)), inputs)
    found = {}
    for name, build in {"balanced-allgather": gathered.build_balanced, "ulysses": ulysses.build}.items():
        function = build(one, context(world))
        got = results(Whole(function, packed=True), inputs)
        notes = [note.code for note in function.notes]
        found[name] = max(float((got[part] - wanted[part]).abs().max()) for part in got), notes
    return found


def sampled(world, one, spoil):
    """Verdicts of a call measured alone over ranks: 'passed', or the check that did not and where."""
    from dilabench.engine.call.inputs import InputStore
    from dilabench.engine.call.specs import BackendSpec, CaseSpec
    from dilabench.engine.worker.isolated_call import PreparedCall, verify_sampled_rows
    from dilabench.record import Case

    case = Case(implementation="ring-allgather", backend="math", workload=one, world_size=world.size)
    backend = BackendSpec(
        name="math", target="dilabench.backends.math:attend", backward_target="dilabench.backends.math:attend_backward"
    )
    spec = CaseSpec(case=case, target="dilabench.impls.ring.allgather:build", backend=backend, seed=5)
    call = PreparedCall(spec, world.device, InputStore(world.device), world)
    right = call.function

    def spoiled(q, k, v):
        out = right(q, k, v)
        rows = torch.zeros_like(out)
        if world.rank == spoil:
            # The last position of all is always among the sampled ones.
            rows[:, -1] = 0.01
        return out + rows

    call.function = spoiled
    verification = verify_sampled_rows(call)
    wrong = next((check for check in verification.checks if not check.passed), None)
    return wrong.name if wrong else "passed", verification.sampled_rows, float(call.inputs(0).q.detach().flatten()[0])

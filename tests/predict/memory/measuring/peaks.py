"""What torch's allocator saw at the fullest moment of a call, on one device, and on one rank of several."""

import functools
import gc

import torch

from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target
from dilabench.contracts import BuildContext
from dilabench.distributed.single_rank import SingleRank
from dilabench.engine.call.chunked_queries import build_in_chunks, checkpointed
from dilabench.engine.call.inputs import make_inputs
from dilabench.engine.call.peak_memory import cpu_allocations
from dilabench.plugins.manager import discover
from dilabench.predict.memory import plan_memory
from dilabench.record import Case
from dilabench.workload.spec import Workload

CPU = torch.device("cpu")
BRANCHES = {"kind": "dilated", "segment_lengths": (64, 128, 256), "dilation_rates": (1, 2, 4)}
LONG_BRANCHES = {"kind": "dilated", "segment_lengths": (512, 1024, 2048), "dilation_rates": (1, 2, 4)}
DENSE = {"kind": "dense"}


def sparse(**fields):
    return {"kind": "block_sparse", "block_size": 64, "sparsity": 0.9, **fields}


def workload_of(pattern=BRANCHES, **fields):
    shape = {"batch_size": 1, "seq_len": 4096, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "dtype": "float32"}
    if "num_heads" in fields:
        shape["num_kv_heads"] = fields["num_heads"]
    return Workload.model_validate({"pattern": pattern, **shape, **fields})


def case_of(implementation, backend=None, pattern=BRANCHES, **fields):
    return Case(implementation=implementation, backend=backend, workload=workload_of(pattern, **fields))


def forget_earlier_tests():
    """What they left must not be freed while memory is measured; what stays need not be looked at the next time."""
    gc.collect()
    gc.freeze()


def peak_of(case):
    """Bytes at the fullest moment of a case on one device, with everything that was there before."""
    implementation = catalogue().implementations.get(case.implementation)
    context = BuildContext(device=CPU, backend=loaded(case))
    inputs = make_inputs(case.workload, implementation.takes, 0, CPU)
    forget_earlier_tests()
    return _peak(lambda: _built(case, implementation, context), list(inputs.distinct), case.workload.mode)


def rank_peak(case, world):
    """The same of one rank of several, on shards of its own."""
    implementation, workload = catalogue().implementations.get(case.implementation), case.workload
    context = BuildContext(device=CPU, backend=loaded(case), world=world)
    function = load_target(implementation.target)(workload, context)
    rows = function.shards.rows[world.rank]
    lead = (rows,) if workload.layout == "packed" else (workload.batch_size, rows)
    heads = (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads)
    shapes = [(*lead, count, workload.head_dim) for count in heads]
    if implementation.takes == "embeddings":
        shapes = [(*lead, workload.num_heads * workload.head_dim)]
    leaves = [torch.randn(shape, dtype=getattr(torch, workload.dtype), requires_grad=True) for shape in shapes]
    del function
    return _peak(lambda: load_target(implementation.target)(workload, context), leaves, workload.mode)


def fullest_rank_peak(case):
    """The largest of all ranks, each of them alone."""
    forget_earlier_tests()
    return max(rank_peak(case, SingleRank.of(rank, case.world_size)) for rank in range(case.world_size))


def real_rank_peaks(world, case, runs):
    """For `launch`: what a rank among real ones allocates, in each of some runs."""
    return [rank_peak(case, world) for _ in range(runs)]


@functools.cache
def catalogue():
    return discover().catalogue


def plan(case, device):
    """What a trace says of a case."""
    return plan_memory(case, device, catalogue())


def loaded(case):
    if case.backend is None:
        return None
    return load_backend(catalogue().backends.get(case.backend))


def _built(case, implementation, context):
    build, switched = load_target(implementation.target), case.optimizations
    if switched.query_chunk:
        return build_in_chunks(build, case.workload, context, switched.query_chunk)
    function = build(case.workload, context)
    return checkpointed(function) if switched.gradient_checkpointing else function


def _peak(build, leaves, mode):
    """Inputs, what building and a first call leave behind, and the peak of a second call above that."""
    made = []
    q, k, v = leaves if len(leaves) == 3 else leaves * 3
    dout = torch.randn(q.shape, dtype=q.dtype) if mode != "forward" else torch.empty(0)

    def call():
        function = made[0]
        if mode == "forward":
            with torch.no_grad():
                return function(q, k, v)
        parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
        return torch.autograd.grad(function(q, k, v), [*leaves, *parameters], dout)

    def first():
        made.append(build())
        call()

    kept, _ = cpu_allocations(first)
    _, peak = cpu_allocations(call)
    return sum(tensor.nbytes for tensor in [*leaves, dout]) + kept + peak

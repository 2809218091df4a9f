"""What ranks run in the tests: each implementation against the formula, in float64, under a random dout."""

from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend, PackedKernel
from dilabench.distributed.sharding import contiguous
from dilabench.distributed.single_rank import SingleRank
from dilabench.distributed.whole import Whole
from dilabench.distributed.world import World
from dilabench.engine.verify.oracle import reference
from dilabench.impls import strided
from dilabench.impls.multihead import ProjectedAttention
from dilabench.impls.ring import allgather, gathered, multihead, rings, ulysses
from dilabench.impls.ring.schedule import sums
from dilabench.impls.ring.schedule.row_exchange import Returned
from dilabench.workload.spec import UNBOUNDED, Workload

BUILDS = {
    "ring": rings.build,
    "ring-overlap": rings.build_overlap,
    "zigzag-ring": rings.build_zigzag,
    "ring-allgather": allgather.build,
    "zigzag-allgather": gathered.build,
    "balanced-allgather": gathered.build_balanced,
    "ring-varlen": rings.build_varlen,
    "ulysses": ulysses.build,
}
GATHERING = {"zigzag-allgather", "balanced-allgather"}
BACKEND = LoadedBackend("math", math.attend, math.attend_backward)
TOLERANCE = 1e-12


def workload(**fields):
    base = {
        "pattern": {"kind": "dense"},
        "batch_size": 2,
        "seq_len": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "dtype": "float64",
        "mode": "both",
    }
    return Workload.model_validate(base | fields)


def dilated(segments, rates, **fields):
    return {"kind": "dilated", "segment_lengths": segments, "dilation_rates": rates, **fields}


def packed(*bounds, **fields):
    return workload(layout="packed", batch_size=1, seq_len=bounds[-1], cu_seqlens=bounds, **fields)


PADDED = {
    "causal": workload(),
    "full": workload(causal=False),
    "one key head, N prime": workload(seq_len=37, num_heads=5, num_kv_heads=1),
    "as many key heads": workload(seq_len=23, num_heads=3, num_kv_heads=3),
    "window": workload(window=(5, 0), seq_len=29),
    "window both ways": workload(window=(3, 2), causal=False),
    "window back": workload(window=(30, -1), causal=False, seq_len=41),
    "window ahead": workload(window=(-1, 2), causal=False, seq_len=41),
    "fewer rows than chunks": workload(seq_len=3),
    "window of two rows": workload(seq_len=2, window=(1, 0)),
    "branches": workload(pattern=dilated([6, 12, 24], [1, 2, 4])),
    "branches, full": workload(pattern=dilated([6, 12, 24], [1, 2, 4]), causal=False),
    "r not dividing w": workload(pattern=dilated([8, 16, 32], [1, 3, 5]), seq_len=29, num_heads=5, num_kv_heads=5),
    "uncovered rows": workload(pattern=dilated([8, 16], [2, 4]), seq_len=48, batch_size=1),
    "offset by key head": workload(pattern=dilated([8, 64], [1, 4], offset_by="kv_head"), seq_len=48, num_heads=8),
    "blocked offsets": workload(pattern=dilated([8, 16, 64], [1, 2, 4], offset="blocked"), seq_len=48, num_heads=8),
    "grouped heads": workload(pattern=dilated([8, 16, 64], [1, 2, 4], heads="grouped"), seq_len=48),
    "zero keys": workload(
        pattern=dilated([8, 12, 40], [1, 4, 3], padding="zero_key", offset="blocked"), seq_len=37, causal=False
    ),
    "zero keys of whole segments": workload(pattern=dilated([4, 99], [2, 5], padding="zero_key"), causal=False),
    "dilated window": workload(pattern=dilated([12, 24], [1, 3]), seq_len=48, window=(7, 4), causal=False),
}
PACKED = {
    "preset": packed(0, 5, 15, 35, 40),
    "odd lengths, full": packed(0, 1, 3, 30, 41, causal=False),
    "odd lengths, window": packed(0, 1, 3, 30, 41, window=(4, 0)),
    "equal lengths": packed(0, 8, 16, 24, 32),
    "single tokens": packed(0, 1, 2, 3, 20, 21, 22),
    "dilated": packed(0, 1, 3, 30, 41, pattern=dilated([8, 16], [1, 2])),
}


def exact(world, names, cases=PADDED | PACKED):
    """(algorithm, case, part, error) of everything that is off, after every algorithm has done every case."""
    wrong = []
    formula = by_one_device(world, cases)
    for case, one in cases.items():
        inputs, wanted = random_inputs(one), formula[case]
        for name in names:
            if one.layout == "packed" and name not in {"ring-varlen", "ulysses", *GATHERING}:
                continue
            if one.pattern.kind != "dense" and name in GATHERING:
                continue
            if one.layout == "padded" and name == "ring-varlen":
                continue
            if one.pattern.has_zero_keys and name != "ring-allgather":
                continue
            function = BUILDS[name](one, context(world))
            wrong += [(name, case, *found) for found in off(function, inputs, wanted)]
    return wrong


def off(function, inputs, wanted):
    """(part, error) of this rank's rows of everything that differs from the wanted whole tensors."""
    world, shards = function.world, function.shards
    tokens = 0 if function.workload.layout == "packed" else 1

    def own(x, dim=tokens):
        return shards.take(x, world.rank, dim)

    errors = {
        part: difference(value, own(wanted[part], -1 if part == "lse" else tokens))
        for part, value in differentiated(function, [own(x) for x in inputs]).items()
    }
    return [(part, error) for part, error in errors.items() if not error <= TOLERANCE]


def random_packings(seed, count):
    """Workloads of packed sequences: any lengths, heads, masks and windows."""
    draw, cases = Random(seed), {}
    for at in range(count):
        lengths = [
            draw.choice([1, 2, draw.randrange(1, 40), draw.randrange(1, 400)]) for _ in range(draw.randrange(1, 9))
        ]
        causal, group = draw.random() < 0.7, draw.choice([1, 2, 3])
        left, right = draw.choice([-1, -1, 0, draw.randrange(60)]), draw.choice([-1, 0, draw.randrange(60)])
        window = (left, 0 if causal and left >= 0 else -1 if causal else right)
        heads = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": draw.choice([3, 8])}
        cases[f"packing {at} of seed {seed}"] = packed(0, *accumulate(lengths), causal=causal, window=window, **heads)
    return cases


def by_one_device(world, cases, build=reference.build):
    """What every case's results must be, by default by the formula; rank 0 computes it for all ranks."""
    told = [None]
    if world.rank == 0:
        context = BuildContext(device=world.device)
        told = [{case: differentiated(build(one, context), random_inputs(one)) for case, one in cases.items()}]
    dist.broadcast_object_list(told, group=world.control)
    return told[0]


def without_returned_gradients(world):
    """What `exact` finds when the ring forgets the dK and dV that other ranks have made."""
    Returned.add = lambda self, _dk, _dv: self.work.wait()
    return exact(world, ["ring"], {"causal": PADDED["causal"]})


def with_deferred_sums(world, names, cases):
    """What `exact` finds when parts wait for each other as they do on CUDA, with the kernels' plain form."""
    sums.defers = lambda dtype, device: True
    return exact(world, names, cases)


def with_aligned_ends(world, names, places):
    """What `exact` finds over a backend that takes a causal mask over fewer queries than keys, and places results."""
    global BACKEND
    BACKEND = replace(BACKEND, aligns_ends=True, places_results=places)
    return exact(world, names)


def looking_ahead(world, names):
    """The algorithms that call their kernel with a window that looks ahead, for a causal window on any rank."""
    found = set()
    for name in names:

        def attend(q, k, v, *, causal, window=UNBOUNDED, scale, name=name):
            left, right = window
            if not causal and (right > 0 or right < 0 <= left):
                found.add(name)
            return math.attend(q, k, v, causal=causal, window=window, scale=scale)

        backend = LoadedBackend("recorded", attend, math.attend_backward)
        one = PACKED["odd lengths, window"] if name == "ring-varlen" else PADDED["window"]
        function = Whole(BUILDS[name](one, replace(context(world), backend=backend)), one.layout == "packed")
        function(*random_inputs(one)[:3])
    return sorted(found)


def packed_kernel():
    """All packed sequences in one call, by `math`."""

    def one_by_one(call, keys):
        def packed(*tensors, cu_seqlens, longest, cu_seqlens_k=None, longest_k=None, **options):
            """Tokens [T, ...] and lse [H, T], as batches of one. keys: which tensors have the rows of k."""
            bounds = list(pairwise(cu_seqlens.tolist()))
            key_bounds = bounds if cu_seqlens_k is None else list(pairwise(cu_seqlens_k.tolist()))
            assert longest == max(b - a for a, b in bounds)
            assert longest_k in {None, max(b - a for a, b in key_bounds)}
            found = []
            for rows, seen in zip(bounds, key_bounds, strict=True):
                cut = [slice(*(seen if at in keys else rows)) for at in range(len(tensors))]
                parts = [x[None, :, one] if x.ndim == 2 else x[None, one] for x, one in zip(tensors, cut, strict=True)]
                found.append(call(*parts, **options))
            return tuple(
                torch.cat([x[0] for x in several], int(several[0].ndim == 3)) for several in zip(*found, strict=True)
            )

        return packed

    attend, attend_backward = one_by_one(math.attend, {1, 2}), one_by_one(math.attend_backward, {2, 3})
    return PackedKernel(attend, attend_backward, frozenset({"cpu"}), aligns_ends=True)


def with_packed_kernel(world, names, more=None):
    """What `exact` finds over a backend that takes all packed sequences in one call."""
    global BACKEND
    BACKEND = replace(BACKEND, packed=packed_kernel())
    one = packed(0, 1, 3, 30, 41, num_heads=6, num_kv_heads=3)
    pieces = packed(0, 1, 3, 290, 300, 700, 701, 1024, num_heads=2, num_kv_heads=1)
    windowed = pieces.replace(window=(40, 0))
    further = {"six heads of three": one, "long documents in pieces": pieces, "windows of pieces": windowed}
    return exact(world, names, PACKED | further | (more or {}))


def with_tiles(world, names, cases=None):
    """What `exact` finds if a stand-in for dilabench's tiles, which are for GPUs, takes rows on the same rows."""
    used = []

    def in_tiles(one, its_context):
        if one.pattern.kind != "dense":
            return None
        used.append(one.cu_seqlens)
        built = strided.build(one, its_context)
        return SimpleNamespace(forward=built.forward, backward=built.backward, notes=())

    gathered.in_tiles = ulysses.in_tiles = in_tiles
    long = packed(0, 1, 3, 290, 300, 700, 701, 1024, num_heads=4, num_kv_heads=2)
    wrong = exact(world, names, cases or PACKED | {"long documents in pieces": long})
    assert used
    return wrong


def projected(world):
    """Largest differences of the sharded module from one device: out, dx, and every parameter's gradient."""
    one = workload(seq_len=23, num_heads=4, num_kv_heads=2)
    generator = torch.Generator().manual_seed(3)
    x, dout = (torch.randn(2, 23, 24, generator=generator, dtype=torch.float64) for _ in range(2))
    found = []
    for size in (world, World.single()):
        module = multihead.build(one, context(size))
        shards = module.shards if size is world else contiguous([(0, 23)], 1)
        local_x, local_dout = (shards.take(t, size.rank).requires_grad_() for t in (x, dout))
        out = module(local_x)
        gradients = torch.autograd.grad(out, [local_x, *module.parameters()], local_dout)
        found.append([out.detach(), *gradients])
    ours, theirs = found
    whole = multihead.build(one, context(world)).shards
    wanted = [whole.take(t, world.rank) for t in theirs[:2]] + theirs[2:]
    assert isinstance(module, ProjectedAttention)
    return [difference(a, b) for a, b in zip(ours, wanted, strict=True)]


def parameters_summed(world, numbers):
    """Whether bfloat16 gradients of parameters are the ranks' sum rounded once, and the bytes that came for it."""
    shares = torch.randn(world.size, numbers, generator=torch.Generator().manual_seed(4)).bfloat16()
    parameter = torch.zeros(numbers, dtype=torch.bfloat16, requires_grad=True)
    (same,) = multihead._SummedGradients.apply(world, parameter)
    (gradient,) = torch.autograd.grad(same, [parameter], shares[world.rank])
    right = torch.equal(gradient, shares.sum(0, dtype=torch.float32).bfloat16())
    return right, world.traffic.counters().get("received_parameters_bytes", 0)


def counted(world, calls):
    """Of each call (name, workload) on shards: bytes received and sent by each kind, in forward and in backward."""
    return [_counted(world, *call) for call in calls]


def _counted(world, name, one):
    function = BUILDS[name](one, context(world))
    q, k, v, dout = (function.shards.take(x, world.rank) for x in random_inputs(one))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    world.traffic.clear()
    out = function(*leaves)
    forward = world.traffic.counters()
    world.traffic.clear()
    torch.autograd.grad(out, leaves, dout)
    return forward, world.traffic.counters()


def twice(world, name, one):
    """The second call's largest difference from the first, with other inputs between them."""
    function = BUILDS[name](one, context(world))
    shards = [function.shards.take(x, world.rank) for x in random_inputs(one)[:3]]
    first = function(*shards)
    function(*(x * 2 for x in shards))
    return difference(function(*shards), first)


def back_twice(world, calls):
    """Of each call (name, workload): the largest difference of a second backward pass on a graph from the first."""
    found = []
    for name, one in calls:
        function = BUILDS[name](one, context(world))
        q, k, v, dout = (function.shards.take(x, world.rank) for x in random_inputs(one))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        second = torch.autograd.grad(out, leaves, dout)
        found.append(max(difference(a, b) for a, b in zip(first, second, strict=True)))
    return found


def steps_back(world, one, monkeypatch):
    """What the backward pass of the zigzag ring on a lone rank does, in order: kernel calls, and kinds of messages."""
    steps = []

    def spy_on_kernel(*arguments, **options):
        steps.append("kernel")
        return math.attend_backward(*arguments, **options)

    def spy_on_send_recv(self, sends, receives, kind):
        if sends or receives:
            steps.append(kind)
        return send_recv(self, sends, receives, kind)

    send_recv = SingleRank.send_recv
    monkeypatch.setattr(SingleRank, "send_recv", spy_on_send_recv)
    backend = LoadedBackend("math", math.attend, spy_on_kernel)
    function = rings.build_zigzag(one, BuildContext(device=world.device, backend=backend, world=world))
    q, k, v, dout = (function.shards.take(x, world.rank) for x in random_inputs(one))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    steps.clear()
    torch.autograd.grad(out, leaves, dout)
    return steps


def given_another(world, rank, how):
    """One rank is given something else than the others."""
    one = workload(head_dim=5) if how == "workload" and world.rank == rank else workload()
    function = rings.build(one, context(world))
    shards = [function.shards.take(x, world.rank) for x in random_inputs(one)[:3]]
    if how == "shapes" and world.rank == rank:
        shards = [x[:, :-1] for x in shards]
    function(*shards)


def context(world):
    return BuildContext(device=world.device, backend=BACKEND, world=world)


def random_inputs(one, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lead = (one.seq_len,) if one.layout == "packed" else (one.batch_size, one.seq_len)
    heads = (one.num_heads, one.num_kv_heads, one.num_kv_heads, one.num_heads)
    return [torch.randn(*lead, h, one.head_dim, generator=generator, dtype=torch.float64) for h in heads]


def differentiated(function, inputs):
    """Results of one call that gives lse with a graph."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, lse = function.with_lse(*leaves)
    gradients = torch.autograd.grad(out, leaves, inputs[3])
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def results(function, inputs):
    """The same of a function whose lse comes without a graph."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = function(*leaves)
    gradients = torch.autograd.grad(out, leaves, inputs[3])
    with torch.no_grad():
        lse = function.with_lse(*inputs[:3])[1]
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def difference(a, b):
    """Largest difference; equal infinities are none."""
    return float((a - b).abs().masked_fill(a == b, 0.0).max()) if a.numel() else 0.0

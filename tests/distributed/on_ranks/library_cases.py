"""What ranks run for `dilabench.attention.ring_attention`."""

import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import ring_cases
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from dilabench.attention import (
    NativeSparseAttention,
    attention,
    dilated_attention,
    ring_attention,
    sequence_shards,
)
from dilabench.backends import math
from dilabench.contracts import BuildContext
from dilabench.distributed import calls
from dilabench.distributed.failures import RanksDisagreeError
from dilabench.engine.verify.oracle import reference

BRANCHES = {"segment_lengths": (6, 12, 24), "dilation_rates": (1, 2, 4)}
CASES = {
    "causal": (ring_cases.workload(seq_len=37), "zigzag", {}),
    "full, in order": (ring_cases.workload(causal=False), "contiguous", {"causal": False}),
    "window": (ring_cases.workload(window=(5, 0), scale=0.3), "zigzag", {"window": (5, 0), "scale": 0.3}),
    "one key head by name": (ring_cases.workload(num_kv_heads=1), "zigzag", {"algorithm": "llama3"}),
    "a function as backend": (ring_cases.workload(), "zigzag", {"backend": math.attend}),
    "window in a list": (ring_cases.workload(window=(5, 0)), "zigzag", {"window": [5, 0]}),
    "dilated": (ring_cases.workload(pattern={"kind": "dilated", **BRANCHES}), "contiguous", BRANCHES),
    "nothing to send": (
        ring_cases.workload(seq_len=48, pattern={"kind": "dilated", **BRANCHES}),
        "contiguous",
        BRANCHES,
    ),
    "packed": (ring_cases.packed(0, 1, 3, 30, 41), "zigzag", {}),
    "packed in balance": (ring_cases.packed(0, 1, 3, 290, 300, 700, window=(90, 0)), "balanced", {"window": (90, 0)}),
    "dilated, packed": (ring_cases.packed(0, 1, 30, 77, pattern={"kind": "dilated", **BRANCHES}), "zigzag", BRANCHES),
    "dilated in balance": (ring_cases.workload(pattern={"kind": "dilated", **BRANCHES}), "balanced", BRANCHES),
}


def wrong(world):
    """What differs from the formula, of out and gradients, by case."""
    found = []
    for name, (one, order, options) in CASES.items():
        packed = one.layout == "packed"
        dim = 0 if packed else 1
        sequences = {"cu_seqlens": one.cu_seqlens} if packed else {"seq_len": one.seq_len}
        mesh = init_device_mesh("cpu", (world.size,)) if name == "causal" else None
        assigned = {name: options[name] for name in options.keys() & {"window"} if order == "balanced"}
        shards = sequence_shards(**sequences, order=order, group=mesh, **assigned)
        inputs = ring_cases.random_inputs(one)
        right = ring_cases.results(reference.build(one, BuildContext(device=world.device)), inputs)
        for _ in range(2):
            q, k, v, dout = (shards.take(x, dim) for x in inputs)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = ring_attention(*leaves, shards, **options)
            mine = out, *torch.autograd.grad(out, leaves, dout)
            for part, x in zip(("out", "dq", "dk", "dv"), mine, strict=True):
                if not ring_cases.difference(shards.gather(x, dim), right[part]) <= ring_cases.TOLERANCE:
                    found.append((name, part))
        assert len(shards._functions) == 1
    return found


WITH_SINKS = [
    *(("seq_len", 37, "zigzag", name, {}) for name in ("zigzag-ring", "zigzag-allgather")),
    *(("seq_len", 37, "contiguous", name, {}) for name in ("ring", "ring-overlap", "ring-allgather", "ulysses")),
    ("seq_len", 37, "balanced", "balanced-allgather", {"window": (9, 0)}),
    ("seq_len", 1, "zigzag", "zigzag-ring", {}),
    *(("seq_len", 48, "contiguous", name, BRANCHES) for name in ("ring-overlap", "ring-allgather", "ulysses")),
    *(("cu_seqlens", (0, 1, 30, 77), "zigzag", name, {}) for name in ("ring-varlen", "zigzag-allgather")),
    ("cu_seqlens", (0, 1, 30, 77), "balanced", "balanced-allgather", {}),
    ("cu_seqlens", (0, 1, 30, 77), "contiguous", "ulysses", {}),
]


class Unchanged(TorchDispatchMode):
    """A mode under which a call of the library is an operator of torch."""

    def __torch_dispatch__(self, function, _types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def wrong_with_sinks(world, cases):
    """What differs from one device, of out and gradients, that of the sink among them, by case; as operators, too."""
    found = []
    for number in cases:
        by, length, order, algorithm, options = WITH_SINKS[number]
        torch.manual_seed(number)
        packed = by == "cu_seqlens"
        dim, tokens = (0, length[-1]) if packed else (1, length)
        lead = () if packed else (2,)
        whole = [torch.randn(*lead, tokens, heads, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
        dout, sink = torch.randn(*lead, tokens, 4, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        alone = dilated_attention if "dilation_rates" in options else attention
        given = {"causal": True, **options, **({"cu_seqlens": length} if packed else {})}
        right = _with_gradients(partial(alone, **given), whole, sink.clone(), dout)
        assigned = {name: options[name] for name in options.keys() & {"window"} if order == "balanced"}
        shards = sequence_shards(**{by: length}, order=order, **assigned)
        attend = partial(ring_attention, shards=shards, algorithm=algorithm, causal=True, **options)
        for mode in (nullcontext(), Unchanged()):
            leaves = [shards.take(x.detach(), dim).requires_grad_() for x in whole]
            with mode:
                mine = _with_gradients(attend, leaves, sink.clone(), shards.take(dout, dim))
            mine = [*(shards.gather(x, dim) for x in mine[:-1]), mine[-1]]
            for part, x, wanted in zip(("out", "dq", "dk", "dv", "dsink"), mine, right, strict=True):
                if not ring_cases.difference(x, wanted) <= ring_cases.TOLERANCE:
                    found.append((number, type(mode).__name__, part))
    return found


def _with_gradients(attend, leaves, sink, dout):
    """out and the gradients of q, k, v and the sink."""
    out = attend(*leaves, sink=sink.requires_grad_())
    return out.detach(), *torch.autograd.grad(out, [*leaves, sink], dout)


def wrong_if_empty(world):
    """What differs in batches of nothing, sequences without tokens, and fewer tokens than ranks."""
    found = []
    for order in ("zigzag", "contiguous", "balanced"):
        for batch, length in ((0, 24), (2, 0), (2, 1)):
            shards = sequence_shards(length, order=order)
            q, k, v = (shards.take(torch.randn(batch, length, 4, 8)).requires_grad_() for _ in range(3))
            out = ring_attention(q, k, v, shards)
            gradients = torch.autograd.grad(out.sum(), (q, k, v))
            if [x.shape for x in (out, *gradients)] != [q.shape, q.shape, k.shape, v.shape]:
                found.append((order, batch, length))
            if length < 2 and not torch.equal(shards.gather(out), shards.gather(v)):
                found.append((order, batch, length, "values"))
            if len(shards.positions) != shards.rows:
                found.append((order, batch, length, "positions"))
        inputs = ring_cases.random_inputs(ring_cases.packed(0, 3, 30))
        results = []
        for bounds in ((0, 3, 30), (0, 0, 3, 3, 30, 30)):
            shards = sequence_shards(cu_seqlens=bounds, order=order)
            q, k, v = (shards.take(x, 0) for x in inputs[:3])
            results.append(ring_attention(q, k, v, shards))
        if not torch.equal(*results):
            found.append((order, "empty documents"))
        none = sequence_shards(cu_seqlens=(0, 0), order=order)
        q = torch.randn(0, 4, 8)
        if ring_attention(q, q, q, none).shape != q.shape:
            found.append((order, "only empty documents"))
        with pytest.raises(ValueError, match="must have this rank's 0 tokens"):
            ring_attention(*[torch.randn(2, 4, 8)] * 3, none)
    return found


def refusals(world):
    """Requests that cannot be served: one message each."""
    shards = sequence_shards(24)
    channels_first = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(shards.gather(shards.take(channels_first, dim=-1), dim=-1), channels_first)
    assert shards.positions.tolist() == ([*range(6), *range(18, 24)] if world.rank == 0 else [*range(6, 18)])
    uneven = sequence_shards(cu_seqlens=(0, 300, 1024), order="balanced")
    q = shards.take(torch.randn(2, 24, 4, 8))
    said = []
    for call in (
        lambda: ring_attention(q, q, q, shards, segment_lengths=(6,), dilation_rates=(1,), algorithm="ring-allgather"),
        lambda: ring_attention(q[0], q[0], q[0], shards),
        lambda: ring_attention(q, q[0, 0], q, shards),
        lambda: ring_attention(q, q.double(), q, shards),
        lambda: ring_attention(q, q, q, shards, algorithm="no-such"),
        lambda: ring_attention(q, q, q, shards, algorithm="strided"),
        lambda: ring_attention(q, q, q, shards, scale=torch.nn.Parameter(torch.tensor(0.5))),
        lambda: ring_attention(q, q, q, shards, window=None),
        lambda: ring_attention(q, q, q, shards, segment_lengths=4, dilation_rates=(1,)),
        lambda: ring_attention(*[q.to("meta")] * 3, shards),
        lambda: shards.take(q),
        lambda: sequence_shards(24, cu_seqlens=(0, 24)),
        lambda: sequence_shards(cu_seqlens=(0, 5, 3)),
        lambda: sequence_shards(cu_seqlens=()),
        lambda: sequence_shards(24, order="striped"),
        lambda: ring_attention(*[torch.randn(512, 4, 8)] * 3, uneven, causal=False),
        lambda: ring_attention(*[torch.randn(512, 4, 8)] * 3, uneven, segment_lengths=(64,), dilation_rates=(2,)),
        lambda: sequence_shards(24, group=init_device_mesh("cpu", (1, world.size))),
    ):
        with pytest.raises(ValueError, match=r"[a-z]") as caught:
            call()
        said.append(str(caught.value))
    with pytest.raises(RanksDisagreeError):
        ring_attention(q, q, q, shards, causal=world.rank == 0)
    return said


def without_gradient(_world):
    """Parameters of native sparse attention in DDP that have no gradient, with batches below a compressed block."""
    torch.manual_seed(0)
    blocks = {"compression_length": 32, "compression_stride": 16, "block_size": 16, "top_k": 3, "window": 9}
    model = DistributedDataParallel(NativeSparseAttention(32, 4, 2, **blocks))
    found = []
    for tokens in (60, 20, 60):
        model.zero_grad()
        model(torch.randn(2, tokens, 32)).sum().backward()
        found += [(tokens, name) for name, parameter in model.named_parameters() if parameter.grad is None]
    return found


def wrong_and_refused(world):
    """All, by one start of ranks."""
    return [*wrong(world), *wrong_if_empty(world), *without_gradient(world)], refusals(world)


def in_different_calls(world, changes):
    """What ranks say of each change if the last rank makes the changed call and the others the usual one, and the
    seconds that it took.

    `changes`: the order of tokens, whether all ranks have made both calls before, the options of the usual call, and of
    the changed one, and its tensors as (batch, heads, dtype).
    """
    calls.PERIOD_S = 0.1
    said = []
    for order, known, options, changed, (batch, heads, dtype) in changes:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
        shards = sequence_shards(24, order=order, group=group)
        usual, other = (
            [torch.randn(items, shards.rows, n, 8, dtype=getattr(torch, kind)) for _ in range(3)]
            for items, n, kind in ((2, 4, "float32"), (batch, heads, dtype))
        )
        attend = partial(ring_attention, *usual, shards, **options)
        sink = {"sink": torch.randn(heads)} if changed.get("sink") else {}
        attend_otherwise = partial(ring_attention, *other, shards, **{**options, **changed, **sink})
        for _ in range(2):
            attend()
            if known:
                attend_otherwise()
        started_s = time.monotonic()
        with pytest.raises((RanksDisagreeError, RuntimeError)) as caught:
            attend_otherwise() if world.rank == world.size - 1 else attend()
        said.append((f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - started_s))
    return said


def with_a_late_rank(world):
    """Whether new and known calls are right although a rank comes later than others look for it."""
    calls.PERIOD_S = 0.02
    shards = sequence_shards(24)
    x = torch.randn(2, 24, 4, 8, generator=torch.Generator().manual_seed(0))
    mine = shards.take(x)
    right = []
    for causal in (True, True, False, False):
        time.sleep(0.4 * (world.rank == 1))
        out = shards.gather(ring_attention(mine, mine, mine, shards, causal=causal))
        heads_first = [x.transpose(1, 2)] * 3
        expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
        right.append(torch.allclose(out, expected, atol=1e-5))
    return right

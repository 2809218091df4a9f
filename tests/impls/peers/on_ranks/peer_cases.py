"""What ranks run in the tests of peers: each held to the oracle as `dilabench verify` does."""

from dataclasses import replace

import torch
import torch.distributed as dist

from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.distributed.shardings import (
    HEADS_FOR_TOKENS,
    HEADS_IN_RING,
    WHOLE_ZIGZAG_GATHER,
    WHOLE_ZIGZAG_RING,
)
from dilabench.distributed.whole import Whole
from dilabench.engine.verify import summary, verify
from dilabench.impls.peers import (
    ring_flash_attn,
    torch_context_parallel,
    yunchang,
)
from dilabench.workload.spec import Workload

MATH = LoadedBackend("math", math.attend, math.attend_backward)
GROUPED = {"num_heads": 4, "num_kv_heads": 2}
EQUAL = {"num_heads": 3, "num_kv_heads": 3}


def workload(**fields):
    base = {"batch_size": 2, "seq_len": 96, "head_dim": 16, "dtype": "bfloat16", "mode": "both", **GROUPED}
    return Workload.model_validate({"pattern": {"kind": "dense"}, **base, **fields})


def context(world, backend=MATH):
    return BuildContext(device=world.device, backend=backend, world=world)


def verdict(function, one):
    return summary(verify(Whole(function), one))


def ring_flash_attn_verdicts(world):
    """What the oracle says of both functions of the package."""
    cases = [(ring_flash_attn.build_zigzag, workload()), (ring_flash_attn.build_zigzag, workload(**EQUAL))]
    cases += [(ring_flash_attn.build_ring, workload(causal=causal)) for causal in (True, False)]
    return [verdict(build(one, context(world)), one) for build, one in cases]


def without_keys_gradient(world):
    """The same for a kernel that forgets dk."""

    def forgetful(*arguments, **options):
        dq, dk, dv = math.attend_backward(*arguments, **options)
        return dq, torch.zeros_like(dk), dv

    one = workload()
    return verdict(ring_flash_attn.build_zigzag(one, context(world, replace(MATH, attend_backward=forgetful))), one)


def context_parallel_verdicts(world):
    """What the oracle says of torch's own ring over a kernel of ours in place of the one that no CPU has."""
    seen = use_our_kernel()
    builds = (torch_context_parallel.build_allgather, torch_context_parallel.build_alltoall)
    cases = [(build, workload(**heads)) for build in builds for heads in (GROUPED, EQUAL)]
    told = [verdict(built(build, one, world), one) for build, one in cases]
    return told, len(seen) > 0


def recorded_verdicts(world):
    """What the oracle says of the peers whose packages are recorded or installed, by name."""
    heads = {"num_heads": 8, "num_kv_heads": 4}
    causal, both_ways = workload(**heads), workload(**heads, causal=False)
    cases = {"ulysses": (yunchang.build_ulysses, both_ways), "usp": (yunchang.build_usp, causal)}
    return {name: verdict(build(one, context(world)), one) for name, (build, one) in cases.items()}


def yunchang_verdicts(world):
    """What the oracle says of both modules of yunchang, with and without shared key/value heads."""
    shapes = [workload(num_heads=8, num_kv_heads=heads) for heads in (4, 8)]
    cases = [(yunchang.build_usp, one) for one in shapes]
    cases += [(yunchang.build_ulysses, shapes[0]), (yunchang.build_ulysses, shapes[1].replace(causal=False))]
    return [verdict(build(one, context(world)), one) for build, one in cases]


def yunchang_received_beside_the_formula(world):
    """Bytes that both modules of yunchang receive in one forward and backward call, and those by formula."""
    one, received = workload(num_heads=8, num_kv_heads=4), []
    all_to_all, send_and_receive = dist.all_to_all_single, dist.batch_isend_irecv

    def traded(output, given, group=None):
        received.append(output.nbytes * (group.size() - 1) // group.size())
        return all_to_all(output, given, group=group)

    def sent_round(operations):
        received.extend(each.tensor.nbytes for each in operations if each.op is dist.irecv)
        return send_and_receive(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = traded, sent_round
    found = []
    for build, sharding in ((yunchang.build_ulysses, HEADS_FOR_TOKENS), (yunchang.build_usp, HEADS_IN_RING)):
        function = build(one, context(world))
        shapes = [(2, 96 // world.size, heads, 16) for heads in (8, 4, 4)]
        leaves = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        del received[:]
        function(*leaves).sum().backward()
        found.append((sum(received), sharding.received_bytes(one, world.size)))
    return found


def received_beside_the_formula(world):
    """Bytes that torch's context parallelism receives in one forward and backward call, and those by formula."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    use_our_kernel()
    one, received = workload(), []

    def counting(rotater, shards):
        exchange = rotater.exchange_buffers

        def exchanged(self, buffer):
            # A gather is asked for again at every hop, and sends at the first.
            if getattr(self, "_aggregated_buffer", None) is None:
                received.append(shards * buffer.nbytes)
            exchange(self, buffer)

        rotater.exchange_buffers = exchanged

    counting(_attention._AllToAllRotater, 1)
    counting(_attention._AllGatherRotater, world.size - 1)
    found = []
    for build, sharding in (
        (torch_context_parallel.build_allgather, WHOLE_ZIGZAG_GATHER),
        (torch_context_parallel.build_alltoall, WHOLE_ZIGZAG_RING),
    ):
        shape = (2, 96 // world.size, 4, 16), (2, 96 // world.size, 2, 16)
        leaves = [torch.randn(shape[index > 0], dtype=torch.bfloat16, requires_grad=True) for index in range(3)]
        del received[:]
        built(build, one, world)(*leaves).sum().backward()
        found.append((sum(received), sharding.received_bytes(one, world.size)))
    return found


def rotations_of_interleaved_passes(world):
    """The rotations under which kernels run backward, of two peers whose backward passes follow both forward ones."""
    seen = use_our_kernel()
    one = workload()
    gathering, rotating = (
        built(build, one, world)
        for build in (torch_context_parallel.build_allgather, torch_context_parallel.build_alltoall)
    )
    shape = (2, 96 // world.size, 4, 16), (2, 96 // world.size, 2, 16)
    leaves = [torch.randn(shape[index > 0], dtype=torch.bfloat16, requires_grad=True) for index in range(3)]
    outs = [function(*leaves) for function in (gathering, rotating)]
    del seen[:]
    for out in outs:
        torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    return seen


def built(build, one, world):
    return build(one, context(world, LoadedBackend("sdpa-flash", math.attend, math.attend_backward)))


def has_lse(world):
    """Whether whole tensors around each peer have an lse."""
    one = workload()
    functions = [
        ring_flash_attn.build_zigzag(one, context(world)),
        built(torch_context_parallel.build_allgather, one, world),
    ]
    return [hasattr(Whole(function), "with_lse") for function in functions]


def use_our_kernel():
    """Register math as torch's flash attention on the CPU, called where scaled_dot_product_attention would on CUDA.

    Everything else is torch's: DTensor's dispatch, the ring, the collectives. Returns the rotations seen, pass by pass.
    """
    from torch.distributed.tensor.experimental._context_parallel import _cp_options

    rotations = []

    def forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        out, lse = math.attend(*tokens_first(q, k, v), causal=is_causal, scale=scale)
        rotations.append(_cp_options.rotate_method.name)
        unread = torch.zeros(2, dtype=torch.uint64)
        lengths = q.shape[2], k.shape[2]
        return out.transpose(1, 2).contiguous(), lse, None, None, *lengths, unread, unread[0], torch.empty(0)

    def backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        philox_seed, philox_offset, *, scale=None,
    ):  # fmt: skip
        rotations.append(_cp_options.rotate_method.name)
        given = tokens_first(grad_out, query, key, value, out)
        return tokens_first(*math.attend_backward(*given, logsumexp, causal=is_causal, scale=scale))

    def attention(q, k, v, is_causal, scale, enable_gqa):
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    # As long as the process lives: it is a rank's.
    torch.kernel_of_the_tests = library
    torch.nn.functional.scaled_dot_product_attention = attention
    return rotations


def tokens_first(*tensors):
    return tuple(x.transpose(1, 2) for x in tensors)

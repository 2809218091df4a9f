"""What ranks run in the tests of `column-bounds-ring`: against one device, in float64, under a random dout."""

import torch
from ring_cases import TOLERANCE, difference, random_inputs, results

from dilabench.contracts import BuildContext
from dilabench.distributed.whole import Whole
from dilabench.impls.block_sparse import block_sparse as one_device
from dilabench.impls.ring import column_bounds
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


def workload(pattern, **fields):
    return Workload.model_validate({**BASE, **fields, "pattern": pattern})


WINDOW = {"kind": "window_sink", "sinks": 3, "window_size": 9}
DOCUMENTS = {"kind": "column_bounds", "document_lengths": (7, 20, 3)}
CASES = {
    "window": workload(WINDOW),
    "window, full": workload(WINDOW, causal=False, seq_len=97, num_heads=5, num_kv_heads=5),
    "window of the workload besides": workload(WINDOW, window=(6, 0)),
    "documents": workload(DOCUMENTS),
    "documents, full": workload(DOCUMENTS, causal=False),
    "prefixes": workload({**DOCUMENTS, "bounds": "prefix_documents", "lead": 4}, causal=False),
    "shared questions": workload({**DOCUMENTS, "bounds": "shared_question", "lead": 4, "answers": 2}),
    "rows of several blocks": workload({**DOCUMENTS, "document_lengths": (170, 90)}, seq_len=401, batch_size=1),
    "fewer rows than ranks": workload(WINDOW, seq_len=1),
}


def exact(world, cases):
    """(case, part, error) of everything that is off, and received bytes of keys and gradients, after every case."""
    wrong, received = [], {}
    for case, one in cases.items():
        inputs = random_inputs(one)
        wanted = results(one_device.build(one, BuildContext(device=world.device)), inputs)
        function = column_bounds.build(one, BuildContext(device=world.device, world=world))
        for part, value in results(Whole(function), inputs).items():
            error = difference(value, wanted[part])
            if not error <= TOLERANCE:
                wrong.append((case, part, error))
        leaves = [function.shards.take(x, world.rank).requires_grad_() for x in inputs[:3]]
        world.traffic.clear()
        torch.autograd.grad(function(*leaves), leaves, function.shards.take(inputs[3], world.rank))
        counters = world.traffic.counters()
        received[case] = [counters.get(f"received_{kind}_bytes", 0) for kind in ("keys", "gradients")]
    return wrong, received

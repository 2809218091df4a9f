"""Every implementation, over every backend that it can use here, in every dtype, passes `verify` on odd shapes."""

from collections.abc import Iterator

import pytest
import torch

from dilabench.bench.verify.verification import summary, verify
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.machine import Machine, detect
from dilabench.plugins.manager import discover
from dilabench.registry import Catalogue, Implementation, load_target
from dilabench.results import Case
from dilabench.spec import Workload

# Heads that no rate divides, prime and tail lengths, segments longer than N, a rate above H, K < H.
SHAPES = {
    "branches": {
        "pattern": {"kind": "dilated", "segment_lengths": (16, 48, 200), "dilation_rates": (1, 3, 8)},
        "batch_size": 2,
        "seq_len": 97,
        "num_heads": 5,
        "num_kv_heads": 5,
        "head_dim": 24,
        "causal": True,
    },
    "shared keys": {
        "pattern": {
            "kind": "dilated",
            "segment_lengths": (32, 64),
            "dilation_rates": (2, 6),
            "offset": "blocked",
            "offset_by": "kv_head",
        },
        "batch_size": 1,
        "seq_len": 96,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 80,
        "causal": False,
    },
    "dense": {
        "pattern": {"kind": "dense"},
        "batch_size": 2,
        "seq_len": 61,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 24,
        "causal": True,
    },
    "blocks": {
        "pattern": {
            "kind": "block_sparse",
            "mask": "random",
            "block_size": 16,
            "sparsity": 0.5,
            "per_head": True,
            "branches": {"kind": "dilated", "segment_lengths": (64, 120), "dilation_rates": (1, 3)},
        },
        "batch_size": 2,
        "seq_len": 131,
        "num_heads": 5,
        "num_kv_heads": 5,
        "head_dim": 24,
        "causal": True,
    },
    "large blocks": {
        "pattern": {"kind": "block_sparse", "mask": "strided", "block_size": 128, "sparsity": 0.5},
        "batch_size": 1,
        "seq_len": 384,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 128,
        "causal": True,
    },
}
DTYPES = ("float64", "float32", "bfloat16", "float16")


def usable(catalogue: Catalogue, machine: Machine) -> Iterator[Case]:
    """Forward and backward of every implementation and backend that this machine can do."""
    for implementation in catalogue.implementations:
        backends = catalogue.backends.names if implementation.uses_backend else (None,)
        for fields in SHAPES.values():
            for dtype in DTYPES:
                for backend in backends:
                    workload = Workload.model_validate({**fields, "dtype": dtype, "mode": "both"})
                    case = Case(implementation=implementation.name, backend=backend, workload=workload)
                    if not catalogue.reasons_against(case, machine):
                        yield case


def check(catalogue: Catalogue, case: Case, device: str) -> None:
    implementation: Implementation = catalogue.implementations.get(case.implementation)
    backend = None
    if case.backend is not None:
        found = catalogue.backends.get(case.backend)
        assert found.backward_target is not None
        backend = LoadedBackend(found.name, load_target(found.target), load_target(found.backward_target))
    context = BuildContext(device=torch.device(device), backend=backend)
    function = load_target(implementation.target)(case.workload, context)
    verdict = verify(
        function,
        case.workload,
        takes=implementation.takes,
        device=device,
        deterministic=implementation.deterministic,
    )
    assert verdict.passed, summary(verdict)


def name(case: Case) -> str:
    kind = next(key for key, fields in SHAPES.items() if fields["seq_len"] == case.workload.seq_len)
    return "-".join(filter(None, (case.implementation, case.backend, case.workload.dtype, kind)))


CATALOGUE = discover().catalogue
HERE = detect("auto")


@pytest.mark.parametrize("case", list(usable(CATALOGUE, detect("cpu"))), ids=name)
def test_passes_verify(case: Case) -> None:
    check(CATALOGUE, case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(usable(CATALOGUE, HERE)) if HERE.device == "cuda" else [], ids=name)
def test_passes_verify_on_a_gpu(case: Case) -> None:
    check(CATALOGUE, case, "cuda")

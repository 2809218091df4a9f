"""Every implementation, over every backend that it can use here, in every dtype, passes `verify` on odd shapes."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import Backend, Implementation, load_target, unmet
from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.verification import summary, verify
from dilabench.machine import Machine, detect
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.manager import discover
from dilabench.record import Case, GpuInfo
from dilabench.workload.spec import Workload

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
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 128,
        "causal": True,
    },
}
# What kernels of their own take as it is: they run on a GPU only.
GPU_SHAPES = {
    "tiles": {
        "pattern": {"kind": "dilated", "segment_lengths": (64, 256), "dilation_rates": (1, 4)},
        "batch_size": 1,
        "seq_len": 512,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 64,
        "causal": True,
    },
    "window and sinks": {
        "pattern": {"kind": "window_sink", "sinks": 9, "window_size": 100},
        "batch_size": 2,
        "seq_len": 391,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "causal": True,
    },
    "documents": {
        "pattern": {"kind": "column_bounds", "document_lengths": (70, 3, 200)},
        "batch_size": 1,
        "seq_len": 389,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 128,
        "causal": False,
    },
    "selected": {
        "pattern": {"kind": "topk_blocks", "selector": "pooled", "block_size": 128, "top_k": 2},
        "batch_size": 1,
        "seq_len": 640,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 128,
        "causal": True,
    },
    "gated sum": {
        "pattern": {"kind": "native_sparse", "block_size": 32, "top_k": 3, "window_size": 50},
        "batch_size": 1,
        "seq_len": 421,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "causal": True,
    },
}
DTYPES = ("float64", "float32", "bfloat16", "float16")
# The first that a pair can do is its quick case.
QUICK_DTYPES = ("bfloat16", "float32", "float16", "float64")
H200 = Machine(device="cuda", gpus=(GpuInfo(name="NVIDIA H200", compute_capability="9.0"),))


def usable(catalogue: Catalogue, machine: Machine) -> Iterator[Case]:
    """Forward and backward of every implementation and backend that this machine can do."""
    shapes = SHAPES if machine.device == "cpu" else SHAPES | GPU_SHAPES
    workloads = [
        Workload.model_validate({**fields, "dtype": dtype, "mode": "both"})
        for fields in shapes.values()
        for dtype in DTYPES
    ]

    def ready(of: Implementation | Backend) -> bool:
        """Asked once of each: the answer reads what is installed."""
        return not unmet(of.requires, machine, catalogue.find_module)

    backends = [backend.name for backend in catalogue.backends if ready(backend)]
    for implementation in filter(ready, catalogue.implementations):
        for workload in workloads:
            for backend in backends if implementation.uses_backend else (None,):
                case = Case(implementation=implementation.name, backend=backend, workload=workload)
                if not catalogue.reasons_against(case, machine):
                    yield case


def compiles(catalogue: Catalogue, case: Case) -> bool:
    """Whether torch.compile makes a kernel for each shape of the case, which takes tens of seconds."""
    own = catalogue.implementations.get(case.implementation).compiles
    return own or (case.backend is not None and catalogue.backends.get(case.backend).compiles)


def quick(catalogue: Catalogue, cases: Iterable[Case]) -> dict[tuple[str, str | None], Case]:
    """One case of each implementation and backend, the cheapest."""

    def cost(case: Case) -> tuple[int, bool]:
        """Every odd shape of a kernel call is compiled anew; `tiles` has the fewest."""
        return QUICK_DTYPES.index(case.workload.dtype), compiles(catalogue, case) and kind(case) != "tiles"

    found: dict[tuple[str, str | None], Case] = {}
    for case in sorted(cases, key=cost):
        found.setdefault((case.implementation, case.backend), case)
    return found


def crossed_of(catalogue: Catalogue, cases: list[Case]) -> set[Case]:
    """Cases whose dtype and shape both differ from those of the cheapest one of their implementation and backend."""
    cheapest = quick(catalogue, cases)
    return {
        case
        for case in cases
        for like in [cheapest[case.implementation, case.backend]]
        if case.workload.dtype != like.workload.dtype and kind(case) != kind(like)
    }


def on_a_gpu(catalogue: Catalogue, cases: list[Case]) -> Iterator[Case]:
    """What torch.compile makes, and the formula, which knows of no dtype, take most of the time there: of these each
    shape in one dtype and each dtype in one shape.
    """
    crossed = crossed_of(catalogue, cases)
    for case in cases:
        is_formula = catalogue.implementations.get(case.implementation).role == "oracle"
        if case not in crossed or not (is_formula or compiles(catalogue, case)):
            yield case


def gpu_cases(catalogue: Catalogue, machine: Machine) -> list[Case]:
    """Of a machine with a GPU; none elsewhere."""
    return list(on_a_gpu(catalogue, list(usable(catalogue, machine)))) if machine.device == "cuda" else []


def quick_first(catalogue: Catalogue, cases: list[Case]) -> list[Any]:
    """The cases of a GPU as parameters, one of each implementation and backend first.

    `-k quickgpu` selects those, `-k "quickgpu and not compiling"` the ones that torch.compile does not slow down.
    """
    first = sorted(quick(catalogue, cases).values(), key=lambda case: compiles(catalogue, case))
    marked = [pytest.param(x, id=f"quickgpu-{'compiling-' if compiles(catalogue, x) else ''}{name(x)}") for x in first]
    return marked + [pytest.param(x, id=name(x)) for x in cases if x not in first]


@functools.cache
def oracle(workload: Workload, takes: str, device: str) -> Oracle:
    """One for all implementations and backends of a workload."""
    return Oracle(workload, takes=takes, device=device)


def check(catalogue: Catalogue, case: Case, device: str) -> None:
    implementation: Implementation = catalogue.implementations.get(case.implementation)
    backend = None
    if case.backend is not None:
        backend = load_backend(catalogue.backends.get(case.backend))
    context = BuildContext(device=torch.device(device), backend=backend)
    function = load_target(implementation.target)(case.workload, context)
    verdict = verify(
        function,
        case.workload,
        takes=implementation.takes,
        oracle=oracle(case.workload, implementation.takes, device),
        deterministic=implementation.deterministic,
    )
    assert verdict.passed, summary(verdict)


def kind(case: Case) -> str:
    """The name of its shape."""
    return next(key for key, fields in (SHAPES | GPU_SHAPES).items() if fields["seq_len"] == case.workload.seq_len)


def name(case: Case) -> str:
    return "-".join(filter(None, (case.implementation, case.backend, case.workload.dtype, kind(case))))


CATALOGUE = discover().catalogue
HERE = detect("auto")


def on_a_cpu(catalogue: Catalogue, cases: Iterable[Case]) -> Iterator[Case]:
    """Without float16 but for a case of heads and one of embeddings over each backend, and of each implementation that
    uses none: everything but a backend's kernel takes the branches of bfloat16 there.
    """
    tried: set[tuple[str, str]] = set()
    for case in cases:
        computes = case.backend or case.implementation, catalogue.implementations.get(case.implementation).takes
        if case.workload.dtype != "float16" or computes not in tried:
            yield case
        if case.workload.dtype == "float16":
            tried.add(computes)


def pairs_of(case: Case) -> set[tuple[object, ...]]:
    """Pairs of its implementation, backend, dtype and shape, and of the places of these."""
    properties = enumerate((case.implementation, case.backend, case.workload.dtype, kind(case)))
    return set(itertools.combinations(properties, 2))


def paired_first(cases: list[Case]) -> list[Any]:
    """By default few cases that have every pair of two properties; the others are slow."""
    pairs = {case: pairs_of(case) for case in cases}
    missing: set[tuple[object, ...]] = set().union(*pairs.values())
    chosen: set[Case] = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return [pytest.param(x, id=name(x), marks=() if x in chosen else pytest.mark.slow) for x in cases]


@pytest.mark.parametrize("case", paired_first(list(on_a_cpu(CATALOGUE, usable(CATALOGUE, detect("cpu"))))))
def test_passes_verify(case: Case) -> None:
    check(CATALOGUE, case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", quick_first(CATALOGUE, gpu_cases(CATALOGUE, HERE)))
def test_passes_verify_on_a_gpu(case: Case) -> None:
    check(CATALOGUE, case, "cuda")


def test_quick_cases_of_a_gpu_come_first_and_are_one_of_each_pair() -> None:
    found = gpu_cases(CATALOGUE, H200)
    params = quick_first(CATALOGUE, found)
    cases = [param.values[0] for param in params]
    pairs = {(case.implementation, case.backend) for case in cases}
    marked = [param for param in params if param.id.startswith("quickgpu-")]
    assert marked == params[: len(pairs)]
    assert {(case.implementation, case.backend) for case in cases[: len(pairs)]} == pairs
    assert len(cases) == len(found)
    assert set(cases) == set(found)
    assert {"fused", "flex"} <= {implementation for implementation, _ in pairs}

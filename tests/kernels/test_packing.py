"""Documents in one launch per pass, through Triton's interpreter: each as it comes out by itself, in float64."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from random import Random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

from triton.runtime import JITFunction

from dilabench.contracts import BuildContext
from dilabench.impls.fused import Packings
from dilabench.kernels.fused.packing import ListRequest, Packing, PassRequests
from dilabench.plugins.manager import discover
from dilabench.workload.spec import Workload, WorkloadRequest
from tests.conftest import slow

PARTS = {"out", "lse", "dq", "dk", "dv", "empty rows"}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "last"), [(0, 6), *((at, at + 49) for at in range(6, 300, 49))])
def test_random_packings(interpreted: Callable[..., dict[str, dict[str, float]]], first: int, last: int) -> None:
    """Lengths from 1 up; masks, windows, offsets, groups of heads, detached merges and tiles as they fall."""
    found = interpreted("kernels/interpreted_packings.py", arguments=(str(first), str(last)))
    assert len(found) == last - first
    for number, errors in found.items():
        assert set(errors) == PARTS
        assert errors["empty rows"] == 0.0, number
        assert max(errors.values()) < 5e-6, (number, errors)


@pytest.mark.parametrize(("first", "last"), [(0, 8), slow(8, 40)])
def test_lists_are_those_that_are_defined(interpreted: Callable[..., dict[str, object]], first: int, last: int) -> None:
    """Also for bounds in a tensor; kept apart from those of a single sequence. Kernels are compiled, and programs
    counted, alike for every packing of as many tokens and documents.
    """
    found = interpreted("kernels/interpreted_document_lists.py", arguments=(str(first), str(last)))
    assert found == {"different": [], "shapes": [1, 1], "kept apart": True}


def test_zero_keys_are_those_of_each_document(interpreted: Callable[..., dict[str, float]]) -> None:
    found = interpreted("kernels/interpreted_zero_keys.py")
    assert found["compared"] > 10
    assert found["largest"] < 1e-5


def random_bounds(seed: int, tokens: int = 65536) -> tuple[int, ...]:
    random = Random(seed)
    return (0, *sorted(random.sample(range(1, tokens), random.randint(18, 34))), tokens)


@pytest.mark.parametrize(
    ("mode", "longest"), [("both", 9000), ("both", 30000), ("both", 65536), ("forward", 9000), ("forward", 30000)]
)
def test_bounds_on_a_device_are_not_read(monkeypatch: pytest.MonkeyPatch, mode: str, longest: int) -> None:
    """Lists are made for all ends that documents may have, also if one may be as long as all tokens."""
    of_gigapath = WorkloadRequest.model_validate(discover().catalogue.workloads.get("packed_slides_64k").fields)
    workload = of_gigapath.resolve("bfloat16").replace(cu_seqlens=(0, 65536), dtype="bfloat16", mode=mode)
    monkeypatch.setattr(JITFunction, "run", lambda *_arguments, **_options: None)
    monkeypatch.setattr(Packing, "tails", lambda *_: pytest.fail("the bounds were read"))
    bounds = torch.tensor(random_bounds(0), dtype=torch.int32)
    computation = Packings(workload, BuildContext(device=torch.device("cpu"))).of(bounds, 65536, longest)
    assert computation.packing is not None
    for own, other, by_key in ((64, 128, False), (128, 64, True)):
        requests = PassRequests(*(ListRequest(group, own, other, by_key) for group in computation.plan.groups))
        computation.packing.lists(requests, workload.causal, torch.empty(0))


def test_any_number_of_packings_takes_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, tables and lists of packings that were are gone, or those of all."""
    workload = Workload.model_validate(
        {
            "pattern": {"kind": "dilated", "segment_lengths": (2048, 8192), "dilation_rates": (1, 4)},
            "batch_size": 1,
            "seq_len": 65536,
            "layout": "packed",
            "cu_seqlens": (0, 65536),
            "num_heads": 8,
            "num_kv_heads": 8,
            "head_dim": 64,
            "dtype": "bfloat16",
            "mode": "both",
        }
    )
    packings, x = Packings(workload, BuildContext(device=torch.device("cpu"))), torch.empty(0)
    requests: dict[int, PassRequests] = {}

    def lists_of(seed: int) -> None:
        computation = packings.of(random_bounds(seed))
        assert computation.packing is not None
        made = requests.setdefault(
            id(computation.plan), PassRequests(*(ListRequest(group, 64, 64) for group in computation.plan.groups))
        )
        computation.packing.lists(made, workload.causal, x)

    # The launch that writes the lists needs a GPU.
    monkeypatch.setattr(JITFunction, "run", lambda *_arguments, **_options: None)
    tracemalloc.start()
    try:
        for seed in range(150):
            lists_of(seed)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for seed in range(150, 450):
            lists_of(seed)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 32 << 10
    assert peak - before < 4 << 20

"""Calls over ranks with a part left out, and the bytes of every part by formula."""

import pytest

from dilabench.choice.descriptors import load_target
from dilabench.distributed.model import joined_bytes
from dilabench.plugins.manager import discover
from tests.conftest import slow

pytestmark = pytest.mark.distributed


ALONE = ["ring-overlap", "zigzag-ring", "ring-allgather", "zigzag-allgather", "balanced-allgather", "ulysses"]


PACKED = ["zigzag-allgather", "balanced-allgather", "ulysses"]


def test_a_part_alone_does_that_part_and_nothing_else(launch):
    import part_cases
    import ring_cases

    padded, packed = ring_cases.workload(), ring_cases.packed(0, 1, 3, 290, 700)
    calls = [*((name, padded) for name in ALONE), *((name, packed) for name in PACKED)]
    for found in launch(part_cases.ablated, 2, [calls]):
        for (name, one), (whole, computation, communication) in zip(calls, found, strict=True):
            assert min(whole) > 0, (name, one.layout)
            assert computation == (whole[0], 0), (name, one.layout)
            assert communication == (0, whole[1]), (name, one.layout)


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_received_bytes_are_those_of_the_formulas(ranks, launch):
    import part_cases
    import ring_cases

    nested = ring_cases.dilated([24, 48, 96], [1, 2, 4], offset_by="kv_head")
    names = ("ring", *ALONE)
    calls = [
        (name, ring_cases.workload(seq_len=96, num_kv_heads=4, causal=causal, pattern=pattern))
        for causal in (True, False)
        for name, pattern in [*((name, {"kind": "dense"}) for name in names), ("ring-allgather", nested)]
    ]
    found = launch(part_cases.received, ranks, [calls])
    implementations = discover().catalogue.implementations
    for index, (name, one) in enumerate(calls):
        sharding = load_target(implementations.get(name).sharding)
        for mode in ("forward", "backward", "both"):
            most = max(rank[index][mode] for rank in found)
            assert sharding.received_bytes(one.replace(mode=mode), ranks) == most, (name, one.causal, mode)


def test_joined_bytes_are_those_of_whole_tensors(launch):
    import part_cases
    import ring_cases

    one = ring_cases.workload()
    assert launch(part_cases.joined, 2, [one]) == [joined_bytes(one, 2)] * 2

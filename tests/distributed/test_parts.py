"""Calls over ranks with a part left out, and the bytes of every part by formula."""

import pytest

from dilabench.choice.descriptors import load_target
from dilabench.distributed.model import joined_bytes
from dilabench.plugins.manager import discover

pytestmark = pytest.mark.distributed


ALONE = ["ring-overlap", "zigzag-ring", "ring-allgather", "zigzag-allgather", "balanced-allgather", "ulysses"]


PACKED = ["zigzag-allgather", "balanced-allgather", "ulysses"]


@pytest.mark.parametrize(("name", "packed"), [*((name, False) for name in ALONE), *((name, True) for name in PACKED)])
def test_a_part_alone_does_that_part_and_nothing_else(name, packed, launch):
    import part_cases
    import ring_cases

    one = ring_cases.packed(0, 1, 3, 290, 700) if packed else ring_cases.workload()
    for whole, computation, communication in launch(part_cases.ablated, 2, [name, one]):
        assert whole[0] > 0
        assert whole[1] > 0
        assert computation == (whole[0], 0)
        assert communication == (0, whole[1])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
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

"""A message of an earlier call is always seen by the check of timed calls, whichever ranks it is between."""

import itertools

import pytest

from tests.conftest import slow

pytestmark = pytest.mark.distributed

WAYS = {
    "zigzag-ring": {},
    "zigzag-allgather": {},
    "ulysses": {},
    "ring-overlap": {"causal": False},
    "ring-allgather": {"pattern": "dilated"},
}


def workload(causal=True, pattern="dense"):
    import ring_cases

    kinds = {"dense": {"kind": "dense"}, "dilated": ring_cases.dilated([64, 256], [1, 2])}
    shape = {"seq_len": 256, "batch_size": 3, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
    return ring_cases.workload(pattern=kinds[pattern], **shape, dtype="bfloat16", causal=causal)


# By default one exchange on two ranks; on three all.
@pytest.mark.parametrize(
    ("name", "ranks", "seeds"),
    [
        ("zigzag-ring", 2, 1),
        *(slow(name, 2, 1) for name in ("zigzag-allgather", "ulysses")),
        *(slow(name, 3, 2) for name in WAYS),
    ],
)
def test_a_stale_message_between_any_two_ranks_fails_in_every_seed(name, ranks, seeds, launch):
    import stale_cases

    # In a ring a message comes from the neighbour before, with what ranks further back have sent.
    pairs = [(reader, sender) for reader, sender in itertools.permutations(range(ranks), 2)]
    if "ring" in name.split("-") and name != "ring-allgather":
        pairs = [(reader, (reader - 1) % ranks) for reader in range(ranks)]
    found = launch(stale_cases.checked, ranks, [name, "math", workload(**WAYS[name]), range(seeds), [None, *pairs]])[0]
    right, stale = found[:seeds], found[seeds:]
    assert right == [[]] * seeds
    assert all(stale), dict(zip(itertools.product(pairs, range(seeds)), stale, strict=True))

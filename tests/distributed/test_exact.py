"""Every algorithm on every kind of workload against the formula; one spawn per number of ranks."""

import pytest

from dilabench.choice.ways import own_ways
from dilabench.distributed.single_rank import SingleRank
from dilabench.distributed.world import World
from tests.conftest import slow

pytestmark = pytest.mark.distributed
ALGORITHMS = ["ring", "ring-overlap", "zigzag-ring", "ring-allgather", "zigzag-allgather", "balanced-allgather"]
ALGORITHMS += ["ring-varlen", "ulysses"]


# Of each kind one: enough for more parts than wait for each other, on five ranks, too.
OF_EACH_KIND = {"causal", "full", "window both ways", "branches", "offset by key head", "preset", "odd lengths, full"}
# Few rows, few key heads, windows of one side, rates that divide nothing, zero keys: what ends oddly between ranks.
ODD = {"one key head, N prime", "fewer rows than chunks", "window back", "r not dividing w", "zero keys"}
ODD |= {"grouped heads", "odd lengths, window", "single tokens", "dilated"}


@pytest.mark.parametrize(("ranks", "everything"), [slow(1, True), (3, False), slow(4, True)])
def test_out_lse_and_gradients_are_those_of_one_device(ranks, everything, launch):
    import ring_cases

    cases = ring_cases.PADDED | ring_cases.PACKED
    if not everything:
        cases = {name: cases[name] for name in OF_EACH_KIND | ODD}
    assert launch(ring_cases.exact, ranks, [ALGORITHMS, cases]) == [[]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "everything"), [(2, False), (2, True), (5, False)])
def test_deferred_sums_are_as_exact(ranks, everything, launch):
    pytest.importorskip("triton", reason="Triton is not installed: sums are deferred only for its kernels")
    import ring_cases

    cases = ring_cases.PADDED | ring_cases.PACKED
    if not everything:
        cases = {name: cases[name] for name in OF_EACH_KIND}
    assert launch(ring_cases.with_deferred_sums, ranks, [ALGORITHMS, cases]) == [[]] * ranks


@pytest.mark.parametrize(("ranks", "places"), [(2, False), slow(3, True)])
def test_masks_that_end_at_the_last_key_are_as_exact(ranks, places, launch):
    import ring_cases

    assert launch(ring_cases.with_aligned_ends, ranks, [sorted(ring_cases.GATHERING), places]) == [[]] * ranks


def test_algorithms_whose_kernels_must_look_ahead_say_so(launch):
    import ring_cases

    found = {name for names in launch(ring_cases.looking_ahead, 2, [ALGORITHMS]) for name in names}
    assert found == {name for name in ALGORITHMS if own_ways(True).implementations.get(name).calls_ahead}


def test_packed_sequences_in_one_call_are_as_exact(launch):
    """On two ranks; `test_any_packing_is_as_exact` has the same sequences and more on two and three."""
    import ring_cases

    assert launch(ring_cases.with_packed_kernel, 2, [["ulysses", *sorted(ring_cases.GATHERING)]]) == [[]] * 2


@pytest.mark.slow
def test_packed_sequences_in_tiles_are_as_exact(launch):
    import ring_cases

    assert launch(ring_cases.with_tiles, 3, [["ulysses", *sorted(ring_cases.GATHERING)]]) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_packing_is_as_exact(ranks, launch):
    import ring_cases

    packings = ring_cases.random_packings(ranks, 12)
    by_pieces = ["zigzag-allgather", "balanced-allgather", "ring-varlen", "ulysses"]
    assert launch(ring_cases.exact, ranks, [by_pieces, packings]) == [[]] * ranks
    in_one = ["zigzag-allgather", "balanced-allgather", "ulysses"]
    assert launch(ring_cases.with_packed_kernel, ranks, [in_one, packings]) == [[]] * ranks
    assert launch(ring_cases.with_tiles, ranks, [in_one, packings]) == [[]] * ranks


def test_a_ring_that_forgets_returned_gradients_is_caught(launch):
    import ring_cases

    wrong = launch(ring_cases.without_returned_gradients, 2)[0]
    assert {(case, part) for _, case, part, _ in wrong} == {("causal", "dk"), ("causal", "dv")}


def test_the_projected_ring_has_the_gradients_of_one_device(launch):
    import ring_cases

    for differences in launch(ring_cases.projected, 3):
        assert max(differences) < 1e-12


@pytest.mark.parametrize("numbers", [slow(1), 4001])
def test_gradients_of_parameters_are_rounded_once(numbers, launch):
    import ring_cases

    found = launch(ring_cases.parameters_summed, 3, [numbers])
    assert all(right for right, _ in found)
    # As an all-reduce: each element to whoever sums it, and the sum to the two others.
    assert sum(received for _, received in found) == 2 * 2 * 2 * numbers


def test_a_second_call_repeats_the_first(launch):
    import ring_cases

    one = ring_cases.workload(pattern=ring_cases.dilated([8, 16], [1, 2]))
    assert launch(ring_cases.twice, 2, ["ring-allgather", one]) == [0.0, 0.0]


def test_a_graph_can_be_passed_back_through_twice(launch):
    import ring_cases

    # Whole shards are kept of the first two, single vectors of the third.
    branches = ring_cases.dilated([6, 24], [1, 4])
    calls = [("zigzag-ring", ring_cases.workload()), ("ring-overlap", ring_cases.workload(causal=False))]
    calls += [("ring-overlap", ring_cases.workload(pattern=branches, causal=False))]
    assert launch(ring_cases.back_twice, 3, [calls]) == [[0.0] * 3] * 3


@pytest.mark.parametrize(
    ("name", "world", "kept"),
    [
        ("zigzag-ring", World.single(), []),
        ("zigzag-ring", SingleRank.of(0, 2), [(2, 12, 2, 6)] * 2),
        ("zigzag-ring", SingleRank.of(1, 2), [(2, 6, 2, 6)] * 2),
        ("ring-overlap", SingleRank.of(0, 2), []),
        ("ring-overlap", SingleRank.of(2, 3), [(2, 8, 2, 6)] * 2),
        ("ring", SingleRank.of(1, 2), []),
    ],
    ids=["one rank", "of a later rank", "of an earlier rank", "nothing ahead", "of the last step", "taking turns"],
)
def test_keys_that_are_kept(name, world, kept):
    import ring_cases

    one = ring_cases.workload()
    function = ring_cases.BUILDS[name](one, ring_cases.context(world))
    q, k, v = (function.shards.take(x, world.rank) for x in ring_cases.random_inputs(one)[:3])
    assert [tuple(x.shape) for x in function._algorithm.forward(q, k, v)[2]] == kept


KEYS, GRADIENTS, KERNEL = "keys", "gradients", "kernel"


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        (1, [KERNEL]),
        (2, [KERNEL, GRADIENTS, KERNEL]),
        (4, [KEYS, KERNEL, GRADIENTS, KEYS, KERNEL, GRADIENTS, KERNEL, GRADIENTS, KERNEL]),
    ],
)
def test_returned_gradients_travel_while_something_is_computed(ranks, order, monkeypatch):
    import ring_cases

    assert ring_cases.steps_back(SingleRank.of(ranks // 2, ranks), ring_cases.workload(), monkeypatch) == order

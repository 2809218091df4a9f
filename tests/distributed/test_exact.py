"""Every algorithm on every kind of workload against the formula; one spawn per number of ranks."""

import pytest

from dilabench.distributed.launch import launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ALGORITHMS = ["ring", "ring-overlap", "zigzag-ring", "ring-allgather", "ring-varlen", "ulysses"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_out_lse_and_gradients_are_those_of_one_device(ranks):
    import ring_cases

    assert launch(ring_cases.exact, ranks, [ALGORITHMS]) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 5])
def test_deferred_sums_are_as_exact(ranks):
    pytest.importorskip("triton", reason="Triton is not installed: sums are deferred only for its kernels")
    import ring_cases

    assert launch(ring_cases.with_deferred_sums, ranks, [ALGORITHMS]) == [[]] * ranks


def test_a_ring_that_forgets_returned_gradients_is_caught():
    import ring_cases

    wrong = launch(ring_cases.without_returned_gradients, 2)[0]
    parts = {part for _, case, part, _ in wrong if case == "causal"}
    assert parts == {"dk", "dv"}


def test_the_projected_ring_has_the_gradients_of_one_device():
    import ring_cases

    for differences in launch(ring_cases.projected, 3):
        assert max(differences) < 1e-12


def test_a_second_call_repeats_the_first():
    import ring_cases

    one = ring_cases.workload(pattern=ring_cases.dilated([8, 16], [1, 2]))
    assert launch(ring_cases.twice, 2, ["ring-allgather", one]) == [0.0, 0.0]

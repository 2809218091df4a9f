"""Peers on ranks of this machine: torch's own ring with only its kernel replaced, ring_flash_attn as it is installed
or as recorded.
"""

import pytest

from tests.conftest import slow

pytestmark = pytest.mark.distributed
needs_yunchang = pytest.mark.needs_extra("peers", "yunchang", "einops")


def passed(verdict):
    return verdict.endswith("checks passed")


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_ring_flash_attn_as_recorded_passes_the_oracle(recorded, ranks, launch):
    import peer_cases

    for verdicts in launch(peer_cases.ring_flash_attn_verdicts, ranks):
        assert list(map(passed, verdicts)) == [True] * 4, verdicts


@pytest.mark.needs_extra("peers", "ring-flash-attn")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_flash_attn_itself_passes_the_oracle(ranks, launch):
    import peer_cases

    for verdicts in launch(peer_cases.ring_flash_attn_verdicts, ranks):
        assert list(map(passed, verdicts)) == [True] * 4, verdicts


@needs_yunchang
@pytest.mark.parametrize("ranks", [2, 4])
def test_yunchang_itself_passes_the_oracle(ranks, launch):
    import peer_cases

    for verdicts in launch(peer_cases.yunchang_verdicts, ranks):
        assert list(map(passed, verdicts)) == [True] * 4, verdicts


@needs_yunchang
def test_yunchang_receives_what_its_sharding_says(launch):
    import peer_cases

    for counted in launch(peer_cases.yunchang_received_beside_the_formula, 4):
        assert [received == formula > 0 for received, formula in counted] == [True, True], counted


def test_a_peer_without_gradients_of_keys_is_caught(recorded, launch):
    import peer_cases

    for verdict in launch(peer_cases.without_keys_gradient, 2):
        assert verdict.startswith("dk is zero; dk: ")


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_context_parallel_passes_the_oracle(ranks, launch):
    import peer_cases

    for verdicts, ran in launch(peer_cases.context_parallel_verdicts, ranks):
        assert ran
        assert list(map(passed, verdicts)) == [True] * 4, verdicts


@pytest.mark.slow
def test_each_pass_runs_under_its_own_rotation(launch):
    import peer_cases

    for seen in launch(peer_cases.rotations_of_interleaved_passes, 2):
        assert seen == ["ALL_GATHER"] * 2 + ["ALL_TO_ALL"] * 2


@pytest.mark.slow
def test_context_parallel_receives_what_its_sharding_says(launch):
    import peer_cases

    for gathered, rotated in launch(peer_cases.received_beside_the_formula, 3):
        assert gathered[0] == gathered[1] > 0
        assert rotated[0] == rotated[1] > 0


@pytest.mark.slow
def test_lse_is_offered_where_the_project_gives_one(recorded, launch):
    import peer_cases

    assert launch(peer_cases.has_lse, 2) == [[True, False]] * 2

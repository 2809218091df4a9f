"""Ranks that need nothing of each other, and sequences over ranks that are verified on sampled rows."""

import pytest

from dilabench.workload.spec import Workload
from tests.conftest import slow

pytestmark = pytest.mark.distributed
SHAPE = {"batch_size": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "float32", "mode": "both"}


def test_whole_segments_on_every_rank_are_the_formula_and_send_nothing(launch):
    import apart_cases

    for found, sent in launch(apart_cases.exact, 2):
        assert len(found) == 3 * 5
        assert [one for one in found if not one[-1] < 1e-12] == []
        assert not any(sent.values())


@pytest.mark.slow
def test_the_fused_kernels_run_on_each_rank_s_part(launch):
    import apart_cases

    for found in launch(apart_cases.fused, 2):
        assert found.pop("local rows") == 256
        assert max(found.values()) < 5e-6, found


@pytest.mark.slow
def test_local_branches_are_fused_beside_the_exchange_of_the_others(launch):
    import apart_cases

    ranks = launch(apart_cases.fused_beside_messages, 2)
    for case in apart_cases.CROSSING:
        errors, notes, received = zip(*(found[case] for found in ranks), strict=True)
        assert max(errors) < 1e-5, case
        assert notes == (([] if case == "everything crosses" else ["fused_branches"]),) * 2, case
        assert sum(received) > 0, case


@pytest.mark.slow
def test_packed_documents_of_a_rank_are_one_launch_of_tiles(launch):
    import apart_cases

    for found in launch(apart_cases.packed_in_tiles, 2):
        assert max(error for error, _ in found.values()) < 1e-5, found
        assert [notes for _, notes in found.values()] == [["own_tiles"]] * 2


# 41 tokens: every row is compared; 10000: a sample. The longest segment crosses ranks, so that keys come from several.
@pytest.mark.parametrize(
    ("length", "segments", "rates"),
    [(41, (8, 64), (1, 2)), slow(10_000, (400, 7_500), (1, 5))],
)
def test_sampled_rows_over_ranks_pass_and_a_wrong_row_of_one_rank_shows_on_all(length, segments, rates, launch):
    import apart_cases

    pattern = {"kind": "dilated", "segment_lengths": segments, "dilation_rates": rates}
    one = Workload.model_validate({"pattern": pattern, "seq_len": length, **SHAPE})
    right = launch(apart_cases.sampled, 3, [one, None])
    assert [verdict for verdict, _, _ in right] == ["passed"] * 3
    assert {rows is None for _, rows, _ in right} == {length == 41}
    assert len({first for _, _, first in right}) == 3, "every rank draws inputs of its own"
    wrong = launch(apart_cases.sampled, 3, [one, 2])
    assert [verdict for verdict, _, _ in wrong] == ["out"] * 3

"""Messages by the copy engines of real GPUs; their protocol is held to threads in test_mailboxes."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_messages_of_any_length_arrive_as_they_were_sent(launch):
    import copy_cases

    # The longest is as long as the mailbox of an H200.
    found = launch(copy_cases.swapped, 2, [[1, 77, 1 << 20, 70_000_001, 300_000_000]], device="cuda")
    assert found == [("copy engines", [])] * 2


def test_nccl_carries_them_where_it_is_asked_to(monkeypatch, launch):
    import copy_cases

    monkeypatch.setenv("DILABENCH_TRANSPORT", "nccl")
    found = launch(copy_cases.swapped, 2, [[1, 1 << 20]], device="cuda")
    assert found == [("nccl (DILABENCH_TRANSPORT=nccl)", [])] * 2


def test_a_rank_that_comes_too_late_ends_the_wait(launch):
    import copy_cases

    with pytest.raises(RuntimeError, match="rank 0 receiving from \\[1\\] took more than 2 s"):
        launch(copy_cases.late, 2, [2.0], device="cuda")

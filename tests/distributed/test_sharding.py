import pytest
import torch

from dilabench.distributed.sharding import contiguous, zigzag

BOUNDS = [((0, 24),), ((0, 23),), ((0, 3),), ((0, 1), (1, 14), (14, 31))]


@pytest.mark.parametrize("sharding", [contiguous, zigzag])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_position_is_held_once_and_joins_again(sharding, bounds, size):
    shards = sharding(bounds, size)
    whole = torch.randn(2, bounds[-1][1], 3)
    parts = [shards.take(whole, rank) for rank in range(size)]
    assert [part.shape[1] for part in parts] == list(shards.rows)
    assert torch.equal(shards.join(parts), whole)


def test_zigzag_gives_rank_r_chunks_r_and_the_mirrored_one():
    positions = torch.arange(16)
    parts = [zigzag([(0, 16)], 4).take(positions, rank, 0).tolist() for rank in range(4)]
    assert parts == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_contiguous_parts_differ_by_one_row_at_most():
    assert set(contiguous([(0, 23)], 4).rows) == {5, 6}


def test_shards_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="ranks hold"):
        contiguous([(0, 8)], 2).join([torch.zeros(1, 3), torch.zeros(1, 5)])

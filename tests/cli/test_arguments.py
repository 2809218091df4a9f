"""Several values after one option, and underscores, as the source documents write them."""

import pytest

from dilabench.cli.arguments import spread


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            "run quick --implementations dilated improved ring_v2",
            "run quick --implementations dilated --implementations improved --implementations ring_v2",
        ),
        (
            "run range --range custom --custom-lengths 2048 -5 --batch-size 1",
            "run range --range custom --custom-lengths 2048 --custom-lengths -5 --batch-size 1",
        ),
        ("run quick --sequence_lengths 1K 2K -o out", "run quick --sequence-lengths 1K --sequence-lengths 2K -o out"),
        ("run --implementations=a quick", "run --implementations=a quick"),
        ("run quick --batch_size=8 --seq_len 5", "run quick --batch-size=8 --seq-len 5"),
        ("run quick --set seq_len=5 -i a_b", "run quick --set seq_len=5 -i a_b"),
        ("run quick --implementations", "run quick --implementations"),
        ("verify -- --batch_size a b", "verify -- --batch_size a b"),
        ("", ""),
    ],
)
def test_spread(written, read):
    assert spread(written.split()) == read.split()

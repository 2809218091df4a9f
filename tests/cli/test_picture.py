"""Pictures of block masks."""

import numpy as np

from dilabench.cli.show.describe import MAX_COLUMNS, MAX_LINES, picture
from dilabench.patterns.block_masks import block_shares


def test_small_masks_show_every_block():
    assert picture(block_shares(np.tril(np.ones((4, 4), bool)), MAX_LINES, MAX_COLUMNS)) == [
        "█   ",
        "██  ",
        "███ ",
        "████",
    ]


def test_large_masks_show_shares_and_single_blocks():
    mask = np.zeros((96, 96), bool)
    mask[:4, :2] = True
    mask[95, 95] = True
    mask[4, 4:6] = True
    lines = picture(block_shares(mask, MAX_LINES, MAX_COLUMNS))
    assert (len(lines), len(lines[0])) == (24, 48)
    assert lines[0][:3] == "█  "
    assert lines[1][:4] == "  ▒ ".replace("▒", "░")
    assert lines[23][47] == "░"
    assert sum(len(line.strip()) for line in lines) == 3


def test_describe_shows_a_kind_of_mask(cli):
    text = cli("describe", "hierarchical").stdout
    assert "mask hierarchical" in text
    assert "every 16th block" in text
    assert text.count("█") > 100

"""Lines of a table are the ones that rich's own table has, whatever its cells hold."""

import random

import pytest
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dilabench.report import grid

WORDS = (
    *("a", "fused", "  two", "1.0 ms", "長い", "✓ 64", "end  ", "\n", "x\ny", "\tq", "\x1b[1m", "", "–"),
    *("longer_than_all_columns_are", "e\u0301", "\u200b", "\xa0"),
)


@pytest.mark.parametrize("seed", range(200))
def test_lines_are_those_of_a_rich_table(seed):
    rng = random.Random(seed)
    columns = [
        " ".join([*rng.choices(WORDS, k=rng.randint(0, 2)), f"c{number}"]) for number in range(rng.randint(1, 4))
    ]
    rows = [[" ".join(rng.choices(WORDS, k=rng.randint(0, 4))) for _ in columns] for _ in range(rng.randint(0, 4))]
    widths = [rng.randint(2, 16) for _ in columns]
    right = {name for name in columns if rng.random() < 0.5}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(Text(name), justify="right" if name in right else "left", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    assert printed(grid._Table(columns, rows, widths, right)) == printed(table)


def printed(table):
    console, out = grid.text_console(100)
    console.print(table)
    return out.getvalue()

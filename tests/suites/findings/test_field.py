"""Why a public project has no row: in no run of its pattern, not over ranks, or not requested."""

import pytest

from dilabench.plugins.manager import discover
from dilabench.suites.field.findings import analyse

CATALOGUE = discover().catalogue
SELECTED = {"kind": "selected_blocks", "block_size": 32, "top_k": 2}


@pytest.mark.parametrize(
    ("name", "pattern", "ranks", "whys"),
    [
        (
            "selected-blocks",
            SELECTED,
            1,
            {
                "flash-linear-attention": "was not requested (-i fla-nsa)",
                "torchscale": "computes other patterns (--set pattern=dilated)",
                "yunchang": "computes over ranks, and this run has none (--nproc 2)",
            },
        ),
        (
            "ring",
            {"kind": "dense"},
            2,
            {
                "flash-linear-attention": "computes other patterns (--set pattern=selected_blocks)",
                "yunchang": "was not requested (-i yunchang-usp)",
            },
        ),
    ],
)
def test_a_project_without_a_row_says_why(record, row, name, pattern, ranks, whys):
    found = record(row(name, 5, pattern=pattern, ranks=ranks))
    (section,) = [section for section in analyse(found, CATALOGUE) if section.title == "Not in this run"]
    lines = {project: why for project, why, _ in section.rows}
    assert {project: lines[project] for project in whys} == whys

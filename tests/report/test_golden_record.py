"""The golden record: written by schema 1.0, to be read and rendered alike by every later version."""

from json import loads
from pathlib import Path
from typing import Any

import pytest

from dilabench.patterns.registry import with_present_names
from dilabench.plugins.manager import discover
from dilabench.record import SCHEMA_VERSION, Failed, Measured, RunRecord, Skipped
from dilabench.report import json, markdown, table
from dilabench.report.findings import Section, sections_of
from dilabench.store.migrations import migrated
from dilabench.store.run_files import read_record

GOLDEN = Path(__file__).parents[1] / "golden"

# Content hashes join old records with new ones: a change here cuts every stored baseline off.
CASE_IDS = {
    "0 gather": "bbc5970b97b5b508",
    "1 strided": "bcb16c49ec9633a7",
    "2 strided": "5dcd72201e5c60fe",
    "3 gather-multihead": "8541a80e81c904d6",
    "4 shifted": "0f8129bea97453a5",
    "5 fused": "5cedd6778cc2f9ee",
    "6 dense": "7c905ac22a9e9485",
    "7 gather": "98faa1cd9c25027f",
    "8 strided": "4bbcf8a4c488db34",
    "9 strided": "668527ef063bf497",
    "10 gather-multihead": "cd2fb5d7707ca4bd",
    "11 shifted": "25016b62b6d9f319",
    "12 fused": "c5d7574a5c711fff",
    "13 dense": "69889f4d39a35d55",
    "14 gather": "de8020e3666ac3d0",
    "15 strided": "e1bfad22054e9870",
    "16 strided": "ffe80ab67d21baf5",
    "17 gather-multihead": "785fe0971477468c",
    "18 shifted": "c9c77406d2d8c549",
    "19 fused": "acd5cef047e6dbd1",
    "20 dense": "9330cd38f93a1556",
    "21 gather": "7bf3c655238a5a03",
    "22 strided": "7c71000ff3a81fcd",
    "23 reference": "c4dcc28ce2d0f5db",
}


@pytest.fixture
def record() -> RunRecord:
    return read_record(GOLDEN / "run_record.v1.json")


def test_golden_record_holds_every_kind_of_outcome(record: RunRecord) -> None:
    assert {type(row.outcome) for row in record.rows} == {Measured, Skipped, Failed}
    assert record.schema_version == SCHEMA_VERSION


def test_case_ids_never_change(record: RunRecord) -> None:
    found = {f"{index} {row.case.implementation}": row.case.case_id for index, row in enumerate(record.rows)}
    assert found == CASE_IDS


def test_json_keeps_all_that_was_read(record: RunRecord) -> None:
    path = GOLDEN / "run_record.v1.json"
    golden = migrated(loads(path.read_text()), path)
    for row in golden["rows"]:
        if asked := row["planned"]["requested_workload"]:
            # What was asked for under a name of before is written under today's: density for sparsity.
            row["planned"]["requested_workload"] = with_present_names(asked)
    written = loads(json.to_text(record))
    assert without_new_fields(written, golden) == golden
    assert RunRecord.model_validate(written) == record


def without_new_fields(written: Any, golden: Any) -> Any:
    """What was written, less the fields (of their defaults) that later versions have added."""
    if isinstance(golden, dict):
        assert golden.keys() <= written.keys()
        return {key: without_new_fields(written[key], golden[key]) for key in golden}
    if isinstance(golden, list):
        assert len(written) == len(golden)
        return [without_new_fields(*pair) for pair in zip(written, golden, strict=True)]
    return written


@pytest.fixture
def sections(record: RunRecord) -> tuple[Section, ...]:
    return sections_of(record, discover().catalogue)


@pytest.mark.parametrize("width", [80, 120])
def test_table_snapshot(record: RunRecord, sections: tuple[Section, ...], width: int) -> None:
    text = table.to_text(record, width=width, sections=sections)
    assert text + "\n" == (GOLDEN / f"table_{width}.txt").read_text()
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_table_leaves_columns_out_and_cuts_no_figure(record: RunRecord, width: int) -> None:
    text = table.to_text(record, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "speed-up" in text


def test_markdown_snapshot(record: RunRecord, sections: tuple[Section, ...]) -> None:
    assert markdown.to_text(record, sections) == (GOLDEN / "report.md").read_text()

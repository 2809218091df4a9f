"""Texts of a record that a stranger wrote: no reporter lets them move a cursor, link, mention or compute."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from dilabench.comparison.matrix import compare_all
from dilabench.errors import DilabenchError
from dilabench.plugins.catalogue import Catalogue
from dilabench.record import Row, RunRecord
from dilabench.report.findings import Curve, CurvePlot, Point, render, sections_of
from dilabench.report.plots.plots import _picture
from dilabench.report.pull_request import of_comparison, of_matrix, of_run
from dilabench.report.tidy import _cell
from dilabench.stats.decisions.decide import Policy
from dilabench.store.run_files import read_record

pytestmark = pytest.mark.faults

GOLDEN = Path(__file__).parents[1] / "golden" / "run_record.v1.json"
HOSTILE = (
    "=1+1 \x1b[2J \x9b8m \u200f\u061c\u202e\u2066 "
    "[x](http://evil.example) ![i](https://evil.example/p.png) www.evil.example @everyone "
    "user@evil.example mailto:a.b+c@-evil.example\n"
    "````\n# heading"
)
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def record() -> RunRecord:
    """A record with the hostile text wherever its models take one."""
    document = read_record(GOLDEN).model_dump(mode="json")
    # A row at a time, because the whole takes long to validate.
    rows, document["rows"] = document["rows"], []
    changed = made_hostile(RunRecord, document) + sum(made_hostile(Row, row) for row in rows)
    assert changed > 20
    return RunRecord.model_validate(document | {"rows": rows})


def made_hostile(model: type[BaseModel], document: dict[str, Any]) -> int:
    """Replace texts of a document wherever its model still takes it; how many there were."""
    changed = 0
    for holder, key in list(texts(document)):
        before = holder[key]
        holder[key] = HOSTILE
        try:
            model.model_validate(document)
            changed += 1
        except (ValidationError, DilabenchError):
            holder[key] = before
    return changed


def texts(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, str):
            yield value, key
        elif isinstance(item, dict | list):
            yield from texts(item)


def rendered(record: RunRecord, catalogue: Catalogue, name: str) -> str:
    return "".join(render(catalogue.reporters.get(name), record, None, sections_of(record, catalogue), catalogue) or ())


@pytest.mark.parametrize("name", ["table", "markdown", "pull-request", "csv", "csv-samples", "html", "json"])
def test_no_control_character_is_printed(record: RunRecord, catalogue: Catalogue, name: str) -> None:
    assert not CONTROLS.search(rendered(record, catalogue, name))


@pytest.mark.parametrize("form", ["png", "svg"])
def test_long_names_leave_room_for_a_plot(form: str) -> None:
    long = "n" * 100_000
    curve = Curve(label=long, points=(Point(x=1, y=1.0), Point(x=2, y=2.0)))
    plot = CurvePlot(name="p", title=long, x_label=long, y_label=long, curves=(curve,))
    assert len(_picture(plot, long, long, form, (long,))) < 1 << 20


@pytest.mark.parametrize("of", [of_run, of_comparison, of_matrix])
def test_no_control_character_is_in_what_goes_into_a_pull_request(record: RunRecord, of: Any) -> None:
    """The record, or what is compared, as commands have it."""
    matrix = compare_all((HOSTILE, "b"), [(record,), (record,)], policy=Policy())
    given = {of_run: (record, ()), of_comparison: (*matrix.with_first, HOSTILE), of_matrix: (matrix, [HOSTILE])}
    text = of(*given[of])
    assert "evil.example" in text
    assert not CONTROLS.search(text)


@pytest.mark.parametrize("name", ["markdown", "pull-request"])
def test_markdown_neither_links_nor_mentions(record: RunRecord, catalogue: Catalogue, name: str) -> None:
    prose, fence = [], ""
    for line in rendered(record, catalogue, name).splitlines():
        ticks = re.match(r" *(`{3,})$", line)
        if ticks and fence in {"", ticks[1]}:
            fence = "" if fence else ticks[1]
        elif not fence:
            prose.append(line)
    # Between single ticks nothing is markup.
    text = re.sub(r"(?<!\\)`[^`]*`", "", "\n".join(prose))
    assert not fence
    assert "evil.example" in text
    assert not re.search(r"(?<!\\)\[[^\]]*\]\(http|://|@[\w-]|www\.", text)
    assert "# heading" not in prose


BEGINNINGS = ("=", "+", "-", "@", "\t=", "\r=", "\n=", "\n", " =", "\u00a0=", "＝", "＋", "－", "＠", "﹦", "\n＝")


@pytest.mark.parametrize("beginning", BEGINNINGS, ids=ascii)
def test_a_text_that_begins_like_a_formula_is_a_text(beginning: str) -> None:
    for text in (beginning, f"{beginning}1+1", f"{beginning}cmd|'/c calc'!A1"):
        assert _cell(text) == f"'{text}"
    assert _cell("1=1") == "1=1"
    assert (_cell(-1.5), _cell(None), _cell("")) == (-1.5, None, "")


@pytest.mark.parametrize("name", ["csv", "csv-samples"])
def test_no_cell_is_a_formula(record: RunRecord, catalogue: Catalogue, name: str) -> None:
    cells = [cell for line in csv.reader(io.StringIO(rendered(record, catalogue, name))) for cell in line]
    assert any("evil.example" in cell for cell in cells)
    assert not [cell for cell in cells if re.match(r"[=+@\t\r]|-(?![\d.])", cell)]

"""The HTML report as a file: self-contained, escaped, small, with commands that measure the rows they stand beside."""

import json
import re
import shlex
import time
from pathlib import Path

import pytest

from dilabench.cli.options import names
from dilabench.machine import detect
from dilabench.plugins.manager import discover
from dilabench.record import Failed, Row, Skipped
from dilabench.report.content import workload_tables
from dilabench.report.findings import BarPlot, Bars, Curve, CurvePlot, MaskPlot, Point, Section, sections_of
from dilabench.report.html import page
from dilabench.report.html.commands import row_command
from dilabench.report.html.winners import winner_map
from dilabench.request import run_request
from dilabench.retired import RETIRED
from dilabench.store.run_files import read_record
from dilabench.suites.planner import expand
from dilabench.workload.spec import WorkloadRequest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "run_record.v1.json"


@pytest.fixture(autouse=True)
def _without_the_library(request, monkeypatch):
    """Bundling the charting library takes a second; only tests of it and of the browser want that."""
    if "library" not in request.keywords:
        monkeypatch.setattr(page, "chart_library", lambda: "/* charts */")


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_it_is_one_file_with_a_row_for_each_case(tmp_path):
    record = read_record(GOLDEN)
    assert page.render(record, tmp_path) is None
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    data = data_of((tmp_path / "report.html").read_text())
    assert len(data["rows"]) == len(record.rows)


def test_nothing_is_fetched():
    text = page.to_text(read_record(GOLDEN))
    assert "default-src 'none'" in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)


def test_texts_of_a_record_are_escaped(make_row, make_record):
    evil = "</script><img src=x onerror=alert(1)>"
    rows = [
        make_row("evil</script><b>", labels={"mine:x": evil}),
        make_row("strided", outcome=Skipped(code="unsupported", why=evil)),
        make_row("gather", outcome=Failed(stage="build", code="exception", why=evil, traceback=evil)),
    ]
    plot = BarPlot(name="x", title=evil, value_label=evil, categories=(evil,), bars=(Bars(label=evil, values=(1.0,)),))
    section = Section(title=evil, sentence=evil, columns=(evil,), rows=((evil,),), plots=(plot,))
    text = page.to_text(make_record(rows, suite=evil, argv=("dilabench", evil)), [section])
    assert "<img src=x" not in text
    assert "<b>" not in text
    assert data_of(text)["texts"].count(evil) == 1


def test_plots_are_data_and_masks_are_pictures(make_row, make_record):
    curve = CurvePlot(name="c", title="growth", y_label="ms", curves=(Curve(label="a", points=(Point(1, 2),)),))
    mask = MaskPlot(name="m", title="a band", blocks=2, block_size=64, cells=((1.0, None), (0.5, 1.0)))
    section = Section(title="t", sentence="s", plots=(curve, mask))
    text = page.to_text(make_record([make_row()]), [section])
    assert [plot["kind"] for plot in data_of(text)["plots"].values()] == ["curves"]
    assert text.count('src="data:image/svg+xml;base64,') == 1
    assert 'alt="Mask of 2 x 2 blocks of 64 tokens: a band"' in text


def test_without_the_library_plots_are_pictures_and_the_way_to_get_it_is_told(make_row, make_record, monkeypatch):
    monkeypatch.setattr(page, "chart_library", lambda: None)
    curve = CurvePlot(name="c", title="growth", y_label="ms", curves=(Curve(label="a", points=(Point(1, 2),)),))
    text = page.to_text(make_record([make_row()]), [Section(title="t", sentence="s", plots=(curve,))])
    assert "pip install &#39;dilabench[html]&#39;" in text or "pip install 'dilabench[html]'" in text
    assert text.count('src="data:image/svg+xml;base64,') == 1


@pytest.mark.library
@pytest.mark.needs_extra("html")
def test_the_library_cannot_end_its_script_element():
    library = page.chart_library()
    assert "vegaEmbed" in library
    assert "</script" not in library
    assert "<!--" not in library


def test_an_empty_record_has_a_page(make_record):
    assert "0 of 0 rows" in page.to_text(make_record([]))


def test_the_answer_stands_in_the_banner_with_its_table_and_the_counts(make_row, make_record):
    record = make_record([make_row("gather", ns=2e7), make_row("strided", ns=1e7, position=1)])
    text = page.to_text(record, sections_of(record, discover().catalogue))
    banner = re.search(r'<section class="banner.*?</section>', text, re.S)[0]
    assert '<p class="answer">Fastest at 96: strided over math (10.00 ms).</p>' in banner
    assert re.findall(r"<td[^>]*>(.*?)</td>", banner)[:2] == ["96", "strided over math"]
    assert banner.index("</table>") < banner.index("2 of 2 rows verified and measured")
    assert text.count("Fastest at 96") == 1
    assert "Fastest at 96: strided over math" in page.notebook(record)


@pytest.mark.parametrize("times", [(1e7,), (1e7, 1e7), (1e7, 2e7)], ids=["unopposed", "tie", "won"])
def test_green_is_what_won_a_comparison(make_row, make_record, times):
    rows = [make_row(f"way{place}", ns=ns, position=place) for place, ns in enumerate(times)]
    record = make_record(rows)
    text = page.to_text(record, sections_of(record, discover().catalogue))
    won = len(set(times)) > 1
    assert ('<section class="banner "' in text) == won
    assert (re.search(r'<td data-length="96" class="(\w+)"', text)[1] == "won") == won
    assert ".single" not in re.search(r"\.map td\.won[^{]*{", text)[0]


def test_columns_are_those_asked_for(make_row, make_record):
    record = make_record([make_row("gather", ns=2e7)])
    data = data_of(page.to_text(record, (), ["std", "median"]))
    assert data["columns"] == ["implementation", "backend", "std", "median"]
    assert data["rows"][0]["c"][3] == "19.98 ms"


def test_winners_ties_and_reasons(make_row, make_record):
    rows = [
        make_row("gather", ns=2e7),
        make_row("strided", ns=1e7, position=1),
        make_row("gather", ns=1e7, seq_len=128),
        make_row("strided", ns=1e7, seq_len=128, position=1),
        make_row("gather", seq_len=256, outcome=Skipped(code="unsupported", why="too long")),
    ]
    found = winner_map(workload_tables(make_record(rows)))
    assert found.lengths == ("96", "128", "256")
    ((_, fields),) = found.lines
    assert [field.state for field in fields] == ["won", "tied", "skipped"]
    assert fields[0].word == "strided over math"
    assert fields[1].word in {"tie: gather over math, strided over math", "tie: strided over math, gather over math"}
    assert fields[2].reasons == ("gather over math skipped: too long",)


@pytest.mark.parametrize("suite", ["decode", "quick", "block-sparse", "range"])
def test_the_command_of_a_row_plans_that_row(suite, make_record):
    catalogue, machine = discover().catalogue, detect("cpu")
    asked = run_request(catalogue, suite=suite, run={"lengths": [256, 512]} if suite == "range" else {})
    planned = [plan for plan in expand(catalogue, machine, asked) if plan.skip is None]
    assert len(planned) > 5
    for plan in planned:
        parts = row_command(Row(planned=plan, outcome=Skipped(code="budget", why="")), make_record([]))
        assert parts is not None
        words = [*parts[0], *parts[1]]
        assert plan.case.case_id in {one.case.case_id for one in expand(catalogue, machine, _request(catalogue, words))}


@pytest.mark.parametrize("name", [entry.name for entry in RETIRED if entry.kind == "implementation"])
def test_a_row_of_a_removed_implementation_has_no_command(name, make_row, make_record):
    asked = {"requested_workload": WorkloadRequest()}
    rows = [
        row.model_copy(update={"planned": row.planned.model_copy(update=asked)}) for row in (make_row(name), make_row())
    ]
    assert [row_command(row, make_record([])) is None for row in rows] == [True, False]


def _request(catalogue, words):
    """The request of a command line, as far as commands of rows go."""
    assert shlex.split(shlex.join(words)) == words
    suite, options = words[1], list(zip(words[2::2], words[3::2], strict=True))
    given = {name: [value for option, value in options if option == name] for name, _ in options}
    run = {"implementations": names(given["-i"]), "backends": names(given.get("-b")), "device": given["--device"][0]}
    return run_request(catalogue, suite=suite, assignments=given["--set"], run=run)


@pytest.mark.slow
def test_thousands_of_rows_stay_small_and_quick(make_row, make_record):
    few = [make_row(f"way{index}", seed=index, rounds=5, samples=2) for index in range(10)]
    rows = [
        row.model_copy(
            update={
                "planned": row.planned.model_copy(
                    update={
                        "case": row.case.model_copy(update={"workload": row.case.workload.replace(seq_len=64 + length)})
                    }
                )
            }
        )
        for length in range(300)
        for row in few
    ]
    record = make_record(rows)
    started = time.perf_counter()
    text = page.to_text(record)
    assert len(text) < 3e6
    # 3,000 rows take about two seconds on an idle core; ten times that is another algorithm.
    assert time.perf_counter() - started < 20


def test_without_the_charts_library_curves_and_bars_are_as_wide_as_the_page(make_row, make_record, monkeypatch):
    monkeypatch.setattr(page, "chart_library", lambda: None)
    mask = {"kind": "block_sparse", "mask": "local_window", "block_size": 32, "sparsity": 0.5}
    rows = [make_row(seq_len=length, pattern=mask) for length in (256, 512)]
    record = make_record(rows, suite="range")
    text = page.to_text(record, sections_of(record, discover().catalogue))
    figures = re.findall(r"<figure( class=\"mask\")?><figcaption>.*?</figure>", text, re.S)
    assert set(figures) == {"", ' class="mask"'}
    assert text.count('<img src="data:image/svg+xml') == len(figures)
    assert ".pictures figure:not(.mask) img { width: 100%; }" in text

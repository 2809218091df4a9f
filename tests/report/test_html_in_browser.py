"""The HTML report in a browser (Debian's chromium): nothing is fetched, nothing is complained of, tables work."""

import shutil
from pathlib import Path

import pytest

from dilabench.comparison.matrix import compare_all
from dilabench.errors import ExitCode
from dilabench.plugins.manager import discover
from dilabench.record import Skipped
from dilabench.report.columns import Column
from dilabench.report.findings import Curve, CurvePlot, Point, sections_of
from dilabench.report.html import comparison, history, page
from dilabench.report.html.history import Trend
from dilabench.report.leaderboard import leaderboard, to_html
from dilabench.stats.decisions.decide import Policy
from dilabench.store.run_files import read_record

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs_extra("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
]

CPU = Policy.for_device("cpu")
ROOT = Path(__file__).parents[2]
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield one
        one.close()


def rendered(record, folder):
    page.render(record, folder, sections_of(record, discover().catalogue))
    return folder / "report.html"


@pytest.fixture(scope="module")
def page_of_a_range(tmp_path_factory):
    """The page of a record with charts of every kind."""
    return rendered(read_record(ROOT / "docs" / "results" / "h200-range.json.xz"), tmp_path_factory.mktemp("range"))


@pytest.fixture
def opened(browser):
    """Opens a page; what the browser complained of or wanted to fetch fails the test at its end."""
    troubles = []

    def open_file(path, width=1280, scheme="light"):
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab.on("console", lambda message: troubles.append(message.text))
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or troubles.append(request.url))
        tab.goto(path.as_uri())
        return tab

    yield open_file
    assert troubles == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
@pytest.mark.library
def test_every_chart_is_drawn_and_the_page_is_as_wide_as_the_window(opened, page_of_a_range, width, scheme):
    tab = opened(page_of_a_range, width, scheme)
    for chart in tab.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("svg").first.wait_for()
    for figure in tab.locator("#explore-figure option").all():
        tab.select_option("#explore-figure", figure.get_attribute("value"))
        tab.wait_for_timeout(200)
        assert tab.locator("#explore-chart svg").count() == 1
    assert tab.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.library
def test_rows_are_sorted_filtered_and_opened(opened, make_row, make_record, tmp_path):
    rows = [make_row(f"way{index}", ns=1e6 * (index * 7 % 11 + 1), seed=index) for index in range(10)]
    rows.append(make_row("strided", outcome=Skipped(code="unsupported", why="no such thing here")))
    tab = opened(rendered(make_record(rows), tmp_path))

    def first_column():
        return [row.locator("td").nth(1).inner_text() for row in tab.locator("#row-table tbody tr").all()]

    tab.click("#row-table th:has-text('median') button")
    assert first_column()[0] == "way0"
    assert first_column()[-1] == "strided"
    tab.click("#row-table th:has-text('median') button")
    assert first_column()[0] == "way3"
    assert first_column()[-1] == "strided"
    tab.fill("#row-search", "way4")
    assert first_column() == ["way4"]
    assert tab.locator("#row-count").inner_text() == "1 of 11 rows"
    tab.fill("#row-search", "")
    tab.select_option("#row-status", "skipped")
    assert first_column() == ["strided"]
    # By keyboard, as those do who have no mouse.
    tab.locator("#row-table .more").first.focus()
    tab.keyboard.press("Enter")
    assert "no such thing here" in tab.locator("tr.detail").inner_text()
    tab.select_option("#row-status", "measured")
    tab.locator("#row-table .more").first.click()
    tab.locator("tr.detail svg").first.wait_for()


@pytest.mark.library
def test_the_history_draws_each_case(opened, tmp_path):
    levels = [Curve(label=name, points=(Point(x=at, y=at), Point(x=at + 1, y=at))) for name, at in (("a", 1), ("b", 3))]
    plot = CurvePlot(name="case0", title="a case", x_label="run", y_label="ms", curves=tuple(levels))
    columns = (Column(name="run", cell=str),)
    trend = Trend(title="a case", where="here", columns=columns, lines=["x"], steps=["slower"], plot=plot)
    (tmp_path / "history.html").write_text(history.to_text([trend], "all cases"))
    tab = opened(tmp_path / "history.html")
    tab.locator("#case0 ~ figure svg").first.wait_for()
    ticks = tab.locator("#case0 ~ figure [aria-label^=X-axis] .role-axis-label text").all_text_contents()
    assert ticks
    assert all(tick.isdigit() for tick in ticks), "runs are whole numbers"
    assert tab.locator(".banner").inner_text() == "a case: slower"


@pytest.mark.library
def test_a_long_history_draws_all_of_its_charts_without_being_scrolled(opened, tmp_path):
    columns = (Column(name="run", cell=str),)
    trends = []
    for at in range(50):
        curve = Curve(label="wall", points=(Point(x=1, y=at + 1), Point(x=2, y=at + 2)))
        plot = CurvePlot(name=f"case{at}", title=f"case {at}", x_label="run", y_label="ms", curves=(curve,))
        trends.append(Trend(title=f"case {at}", where="here", columns=columns, lines=["x"], steps=[], plot=plot))
    (tmp_path / "history.html").write_text(history.to_text(trends, "all cases"))
    tab = opened(tmp_path / "history.html")
    tab.wait_for_function("document.querySelectorAll('.chart svg').length === 50")


@pytest.mark.library
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_implementation_has_one_colour_in_all_charts(opened, page_of_a_range, scheme):
    tab = opened(page_of_a_range, scheme=scheme)
    tab.wait_for_function("[...document.querySelectorAll('.chart')].every((chart) => chart.querySelector('svg'))")
    marks = tab.evaluate(
        """[...document.querySelectorAll('.chart')].flatMap((chart, number) =>
        [...chart.querySelectorAll('.mark-symbol path[aria-label]')].map((mark) =>
        [number, /(?:series|row): ([^;]*)/.exec(mark.getAttribute('aria-label'))?.[1],
        mark.getAttribute('fill')])).filter(([, series]) => series)"""
    )
    colours, charts = {}, {}
    for chart, series, colour in marks:
        colours.setdefault(series.replace(" (yardstick: another function)", ""), set()).add(colour)
        charts.setdefault(series, set()).add(chart)
    assert {name: len(several) for name, several in colours.items()} == dict.fromkeys(colours, 1)
    assert len(set().union(*colours.values())) == len(colours) == 4
    assert min(map(len, charts.values())) > 1 or len(charts) > len(colours)


@pytest.mark.library
def test_the_answer_and_the_winners_are_in_sight_at_400_pixels(opened, page_of_a_range):
    tab = opened(page_of_a_range, width=400)
    # The length without a time is in the sentence.
    assert tab.locator(".banner tbody tr").count() == 19
    for cell in tab.locator(".banner tbody td").all():
        box = cell.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 400, cell.inner_text()
    boxes = [cell.bounding_box() for cell in tab.locator(".winners td").all()]
    assert len(boxes) == 20
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 400 for box in boxes)


@pytest.mark.library
def test_a_map_wider_than_the_page_says_so_until_its_end(opened, page_of_a_range, make_row, make_record, tmp_path):
    region, hint = ".scroll:has(.winners)", ".scroll:has(.winners) + .hint"
    wide = opened(page_of_a_range)
    wide.locator(hint).wait_for(state="visible")
    wide.evaluate(f"document.querySelector('{region}').scrollLeft = 1e6")
    wide.locator(hint).wait_for(state="hidden")
    narrow = opened(rendered(make_record([make_row("gather"), make_row("strided", position=1)]), tmp_path))
    assert narrow.locator(region).is_visible()
    assert not narrow.locator(hint).is_visible()


@pytest.mark.parametrize("width", [400, 1280])
def test_a_leaderboard_shows_implementation_and_time_at_any_width(opened, make_row, make_record, tmp_path, width):
    rows = [make_row("strided", ns=1e7), make_row("a-quite-long-name-of-an-implementation", ns=2e7, position=1)]
    rows = [row.model_copy(update={"planned": row.planned.model_copy(update={"source": "theirs 1.0"})}) for row in rows]
    (tmp_path / "board.html").write_text(to_html(leaderboard([make_record(rows)])))
    tab = opened(tmp_path / "board.html", width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    for name in ("implementation", "time"):
        for cell in tab.locator(f"td[data-name={name}]").all():
            box = cell.bounding_box()
            assert 0 <= box["x"] < box["x"] + box["width"] <= width


def test_a_comparison_shows_row_and_change_and_verdict_at_400_pixels(opened, make_row, make_record, tmp_path):
    records = [make_record([make_row("strided", ns=ns, sessions=5)], run_id=f"{ns:g}") for ns in (1e7, 2e7)]
    matrix = compare_all([record.run_id for record in records], [[record] for record in records], policy=CPU)
    text = comparison.to_text(matrix, records, "verdict: REGRESSION", ExitCode.REGRESSION)
    (tmp_path / "comparison.html").write_text(text)
    tab = opened(tmp_path / "comparison.html", 400)
    (cells,) = (row.locator("td").all() for row in tab.locator(".board tbody tr").all())
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 400 for box in (cell.bounding_box() for cell in cells))
    texts = tab.locator(".board tbody").inner_text()
    assert "SLOWER" in texts
    assert "2.0x slower" in texts

"""Plots: every section's, as PNG and SVG, with units on the axes; colours that everybody can tell apart."""

import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from dilabench.errors import EnvironmentNotReady
from dilabench.plugins.manager import discover
from dilabench.record import RunRecord
from dilabench.report import markdown, table
from dilabench.report.findings import (
    BarPlot,
    Bars,
    Curve,
    CurvePlot,
    MaskPlot,
    Point,
    Section,
    Span,
    render,
    sections_of,
)
from dilabench.report.plots import plots
from dilabench.report.plots.drawing import COLOURS, COMPUTED, HIDDEN, SKIPPED, draw_bars, draw_curves, draw_mask, look
from dilabench.store.run_files import read_record

GOLDEN = Path(__file__).parents[1] / "golden" / "run_record.v1.json"
CURVES = CurvePlot(
    name="latency",
    title="Latency",
    y_label="latency (ms)",
    curves=(
        Curve(label="gather", points=(Point(1024, 1.0, 0.9, 1.2), Point(49152, 40.0))),
        Curve(label="gather", points=(Point(1024, 1.1), Point(49152, 41.0)), fitted=True),
        Curve(label="strided", points=(Point(1024, 2.0), Point(49152, 20.0))),
    ),
)
BARS = BarPlot(
    name="impact",
    title="Speed-up",
    value_label="speed-up (x)",
    categories=("gather 4K", "gather 16K"),
    bars=(
        Bars(label="pool", values=(0.5, None), low=(0.4, None), high=(0.6, None)),
        Bars(label="cache", values=(2.0, 1.1)),
    ),
    reference=1.0,
)
SECTION = Section(
    title="Finding", sentence="The *pool* costs.", columns=("who", "x"), rows=(("a|b", "0.5"),), plots=(CURVES, BARS)
)


@pytest.fixture
def record() -> RunRecord:
    return read_record(GOLDEN)


def test_each_plot_is_written_as_png_and_svg(record: RunRecord, tmp_path: Path) -> None:
    assert plots.render(record, tmp_path, [SECTION]) is None
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["impact.png", "impact.svg", "latency.png", "latency.svg"]
    assert (tmp_path / "plots" / "impact.png").read_bytes().startswith(b"\x89PNG")
    assert ET.parse(tmp_path / "plots" / "latency.svg").getroot().tag.endswith("svg")


def test_the_same_record_gives_the_same_file(record: RunRecord, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        plots.render(record, tmp_path / folder, [SECTION])
    one, two = ((tmp_path / folder / "plots" / "latency.svg").read_bytes() for folder in ("one", "two"))
    assert one == two


def test_without_sections_or_folder_nothing_is_written(record: RunRecord, tmp_path: Path) -> None:
    plots.render(record, tmp_path)
    plots.render(record, None, [SECTION])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_environment_error(record: RunRecord, tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("")
    with pytest.raises(EnvironmentNotReady, match="choose another folder with -o"):
        plots.render(record, tmp_path, [SECTION])


def test_curves_name_units_and_measured_lengths() -> None:
    (axes,) = draw_curves(CURVES).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("sequence length (tokens)", "latency (ms)")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    ticks = axes.xaxis.get_major_locator()()
    assert [axes.xaxis.get_major_formatter()(tick, None) for tick in ticks] == ["1K", "48K"]
    assert axes.get_legend_handles_labels()[1] == ["gather", "strided"]


def test_changes_along_x_are_marked() -> None:
    spans = (Span(1024, 4096, "8"), Span(8192, 49152, "1"))
    axes = draw_curves(replace(CURVES, spans=spans)).axes[0]
    (top,) = axes.child_axes
    assert top.get_xlabel() == "batch"
    assert [label.get_text() for label in top.get_xticklabels()] == ["8", "1"]
    border = axes.lines[-1].get_xdata()[0]
    assert 4096 < border < 8192


def test_ticks_stand_where_was_measured_and_say_it() -> None:
    curves = (Curve(label="a", points=(Point(3.3, 2e4), Point(50.1, 1e7))),)
    figure = draw_curves(CurvePlot(name="density", title="", y_label="", curves=curves))
    axes = figure.axes[0]
    ticks = axes.xaxis.get_major_locator()()
    assert [axes.xaxis.get_major_formatter()(tick, None) for tick in ticks] == ["3.3", "50.1"]
    assert [axes.yaxis.get_major_formatter()(value, None) for value in (0.5, 2e4, 1e7)] == ["0.5", "20k", "10M"]


def test_bars_that_are_absent_take_no_room_and_names_of_several_lines_do() -> None:
    values = ((1.0, None), (None, 2.0), (None, 3.0))
    bars = tuple(Bars(label=f"a name of some length {index}", values=one) for index, one in enumerate(values))
    plot = BarPlot(name="x", title="", value_label="", categories=("one\nin\nthree lines", "two"), bars=bars)
    figure = draw_bars(plot)
    (axes,) = figure.axes
    places = [bar.get_y() for container in axes.containers if hasattr(container, "patches") for bar in container]
    assert [round(after - before, 2) for before, after in itertools.pairwise(places)] == [2.42, 1.0]
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert 0 <= legend.x0 < legend.x1 <= figure.bbox.width
    above, below = (label.get_window_extent() for label in axes.get_yticklabels())
    assert above.y0 > below.y1


def test_bars_begin_at_the_reference_and_leave_out_what_is_absent() -> None:
    (axes,) = draw_bars(BARS).axes
    assert axes.get_xlabel() == "speed-up (x)"
    pool, cache = (container for container in axes.containers if hasattr(container, "patches"))
    assert [(bar.get_x(), bar.get_width()) for bar in pool] == [(1.0, -0.5)]
    assert len(cache) == 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["gather 4K", "gather 16K"]


def test_a_mask_is_drawn_block_by_block() -> None:
    mask = MaskPlot(name="mask", title="random", blocks=2, block_size=64, cells=((1.0, None), (0.0, 1.0)))
    figure = draw_mask(mask)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("keys (blocks of 64 tokens)", "queries (blocks of 64 tokens)")
    (image,) = axes.images
    assert image.get_extent() == [0, 2, 2, 0]
    colours = image.cmap(image.norm(image.get_array()))
    assert to_hex(colours[0][0]) == to_hex(colours[1][1]) == to_hex(COMPUTED)
    assert to_hex(colours[1][0]) == to_hex(SKIPPED)
    assert to_hex(colours[0][1]) == to_hex(HIDDEN)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["computed", "skipped", "hidden by the causal mask"]


def test_a_mask_with_more_blocks_than_cells_has_a_scale() -> None:
    mask = MaskPlot(name="mask", title="random", blocks=4, block_size=64, cells=((1.0, 0.25), (0.5, 1.0)))
    _, scale = draw_mask(mask).axes
    assert scale.get_ylabel() == "share of the blocks that is computed"


def test_series_differ_without_colour_too() -> None:
    looks = [look(index) for index in range(20)]
    assert len({(one.colour, one.marker) for one in looks}) == 20
    assert "#F0E442" not in COLOURS, "yellow vanishes on white"


def test_a_series_looks_alike_in_all_plots_of_a_record() -> None:
    """`strided` is the second series of one plot and the only one of the other."""
    alone = replace(CURVES, name="alone", curves=CURVES.curves[2:])
    series = plots.series_of([replace(SECTION, plots=(CURVES, BARS, alone))])
    assert series == ("gather", "strided", "pool", "cache")

    def colour(plot: CurvePlot) -> object:
        handles, labels = draw_curves(plot, series).axes[0].get_legend_handles_labels()
        return dict(zip(labels, handles, strict=True))["strided"].lines[0].get_color()

    assert colour(alone) == colour(CURVES)


def test_markdown_embeds_plots_that_are_there(record: RunRecord, tmp_path: Path) -> None:
    plots.render(record, tmp_path, [SECTION])
    markdown.render(record, tmp_path, [SECTION])
    text = (tmp_path / "report.md").read_text()
    assert text.index("rows verified and measured") < text.index("## Finding") < text.index("## Results")
    assert "![Latency, with 95 % intervals](plots/latency.png)" in text
    assert r"The \*pool\* costs." in text
    assert r"| a\|b | 0.5 |" in text
    assert "plots/" not in markdown.to_text(record, [SECTION])


def test_the_table_prints_findings_but_not_mere_plots(record: RunRecord) -> None:
    only_plots = Section(title="At a glance", sentence="Plots.", plots=(CURVES,))
    text = table.to_text(record, width=100, sections=[SECTION, only_plots])
    assert "Finding\nThe *pool* costs.\n" in text
    assert "a|b" in text
    assert "At a glance" not in text


def test_an_old_record_is_redrawn_by_its_suite(record: RunRecord, tmp_path: Path) -> None:
    catalogue = discover().catalogue
    sections = sections_of(record, catalogue)
    render(catalogue.reporters.get("plots"), record, tmp_path, sections, catalogue)
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {plot.name for plot in plots.plots_of(sections)}
    unknown = record.model_copy(update={"suite": "of a plug-in that is gone"})
    assert [section.answers for section in sections_of(unknown, catalogue)] == [True]


def test_a_headed_finding_says_its_first_column_once_above_the_rows(record: RunRecord) -> None:
    rows = (("1x8K causal", "ring", "1 ms"), ("1x8K causal", "ulysses", "2 ms"), ("1x16K causal", "ring", "3 ms"))
    columns = ("workload", "implementation", "time")
    section = Section(title="T", sentence="S.", columns=columns, rows=rows, numeric=frozenset({"time"}), headed=True)
    text = table.to_text(record, width=80, sections=[section])
    assert (text.count("1x8K causal\n"), text.count("1x16K causal\n")) == (1, 1)
    assert "workload" not in text
    assert "\nulysses         2 ms\n" in text


def test_ticks_of_lengths_have_room_and_the_longest_has_one() -> None:
    lengths = (512, 1024, 2048, 49152, 50000, 65536, 98304, 100000, 131072, 200000, 786432)
    curve = Curve(label="a", points=tuple(Point(length, 1.0 + length) for length in lengths))
    axes = draw_curves(CurvePlot(name="x", title="x", y_label="ms", curves=(curve,))).axes[0]
    shown = list(axes.get_xticks())
    assert shown[-1] == 786432
    assert all(after / before > 2 for before, after in itertools.pairwise(shown))


def test_whiskers_are_drawn_and_named_only_where_there_are_intervals() -> None:
    def drawn(*points: Point) -> tuple[int, str]:
        plot = CurvePlot(name="x", title="x", y_label="ms", curves=(Curve(label="a", points=points),))
        (container,) = draw_curves(plot).axes[0].containers
        segments = container.lines[2][0].get_segments() if container.lines[2] else []
        return sum(len(segment) > 0 and not np.isnan(segment).any() for segment in segments), plot.caption

    assert drawn(Point(1, 2, 1, 3), Point(2, 3)) == (1, "x, with 95 % intervals")
    assert drawn(Point(1, 2), Point(2, 3)) == (0, "x")


def test_a_plot_says_which_machine_dtype_and_shape_it_is_of(record: RunRecord) -> None:
    some = record.model_copy(update={"rows": record.rows[:3]})
    assert plots.subject(some).startswith("Example CPU @ 2.60GHz (2 threads) · 1x1K H8 D64 fp32")
    assert "fp32" in plots.subject(some)
    # What rows do not share is not said of all of them.
    assert "H" not in plots.subject(record).partition("·")[2]
    assert ET.fromstring(plots.svg(CURVES, record)).tag.endswith("svg")

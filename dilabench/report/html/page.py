"""report.html: everything known about a run, in one file that needs no network."""

import contextlib
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dilabench.atomic_file import cache_folder, read_checked, with_digest, write_bytes, write_text
from dilabench.errors import EnvironmentNotReady
from dilabench.plugins.manager import discover
from dilabench.record import RunRecord
from dilabench.report.columns import chosen_columns
from dilabench.report.content import (
    device_text,
    environment_rows,
    footnotes,
    headline,
    note_groups,
    reproduce_command,
    unmeasured,
    workload_tables,
)
from dilabench.report.findings import Bars, Curve, CurvePlot, MaskPlot, Plot, Section, sections_of
from dilabench.report.html.data import PageData
from dilabench.report.html.winners import winner_map
from dilabench.report.plots.plots import series_of, subject, svg
from dilabench.units import format_count

FILENAME = "report.html"
HERE = Path(__file__).parent
MOST_IN_NOTEBOOK = 20
# Each takes a tenth of a second to draw.
MOST_MASKS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A plot on the page: `key` into the page's data if a script draws it, or the `picture` itself."""

    plot: Plot
    key: str | None = None
    picture: str | None = None

    @property
    def alt(self) -> str:
        """A text alternative to the plot."""
        plot = self.plot
        if isinstance(plot, MaskPlot):
            return f"Mask of {plot.blocks} x {plot.blocks} blocks of {plot.block_size} tokens: {plot.title}"
        parts: Sequence[Curve | Bars] = plot.curves if isinstance(plot, CurvePlot) else plot.bars
        return f"{plot.caption}: {', '.join(dict.fromkeys(part.label for part in parts))}. The tables hold the numbers."


def render(
    record: RunRecord, folder: Path | None, sections: Sequence[Section] = (), *, columns: Sequence[str] = ()
) -> str | None:
    """Write report.html into `folder` and print nothing; without a folder, return the text to print.

    Raises EnvironmentNotReady when the file cannot be written.
    """
    text = to_text(record, sections, columns)
    if folder is None:
        return text
    write_text(folder / FILENAME, text)
    return None


def to_text(record: RunRecord, sections: Sequence[Section] = (), columns: Sequence[str] = ()) -> str:
    """The whole page."""
    chosen = chosen_columns(columns, record.rows)
    tables = workload_tables(record)
    charts = chart_library()
    drawn = {id(plot): drawn_plot for plot, drawn_plot in _drawn(record, sections, scripted=charts is not None)}
    data = PageData(record, tables, chosen)
    return page(
        "report.html.j2",
        record=record,
        answers=[section for section in sections if section.answers],
        headline=headline(record),
        counts=Counter(row.outcome.status for row in record.rows),
        # A row that none was compared with is no reason for green.
        decided=any(row.fastest for table in tables for row in table.rows),
        device=device_text(record),
        command=reproduce_command(record),
        # The fields of the request that say anything.
        asked=[(name, _text(value)) for name, value in record.config.items() if value not in (None, "", [], {}, False)],
        environment=environment_rows(record),
        winners=winner_map(tables),
        findings=[section for section in sections if not section.answers],
        drawn=drawn,
        notes=note_groups(record),
        subject=subject(record),
        unmeasured=unmeasured(record),
        footnotes=footnotes(tables, chosen),
        charts=charts,
        data=data.as_json({drawn_plot.key: drawn_plot.plot for drawn_plot in drawn.values() if drawn_plot.key}),
    )


def notebook(record: RunRecord) -> str:
    """The view of a record in a notebook: the answer and the tables of the first workloads."""
    tables = workload_tables(record)
    sections = sections_of(record, discover().catalogue)
    return page(
        "notebook.html.j2",
        answers=[section for section in sections if section.answers],
        headline=headline(record),
        tables=tables[:MOST_IN_NOTEBOOK],
        columns=chosen_columns((), record.rows),
        left_out=max(0, len(tables) - MOST_IN_NOTEBOOK),
    )


def page(template: str, **facts: Any) -> str:
    """A page of this folder's templates, in which every text is escaped."""
    # Only HTML needs jinja2.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["id"] = id
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return environment.get_template(template).render(style=style, script=script, **facts)


def chart_library() -> str | None:
    """Vega-Lite as a script (extra `html`); None if it is not installed."""
    try:
        import vl_convert
    except ImportError:
        return None
    # Bundling takes a second; the result depends only on the version.
    kept = cache_folder() / f"vega-lite-{version('vl-convert-python')}.js"
    if data := read_checked(kept):
        return data.decode()
    # This is the only text that would end a script element.
    text = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
    with contextlib.suppress(EnvironmentNotReady):
        write_bytes(kept, with_digest(text.encode()))
    return text


def _drawn(record: RunRecord, sections: Sequence[Section], scripted: bool) -> Iterator[tuple[Plot, Drawn]]:
    masks, series = 0, () if scripted else series_of(sections)
    for number, plot in enumerate(plot for section in sections for plot in section.plots):
        masks += isinstance(plot, MaskPlot)
        if scripted and not isinstance(plot, MaskPlot):
            yield plot, Drawn(plot=plot, key=f"plot{number}")
        elif masks <= MOST_MASKS:
            picture = b64encode(svg(plot, record, series).encode()).decode()
            yield plot, Drawn(plot=plot, picture=f"data:image/svg+xml;base64,{picture}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return format_count(value) if type(value) is int and value >= 1024 else str(value)

"""The renderings of a run record that dilabench ships."""

from dilabench.plugins.descriptors import Reporter

REPORTERS = (
    Reporter(
        "table",
        "a table in the terminal",
        "dilabench.report.table:render",
        shows_sections=True,
        options=("details", "columns"),
    ),
    Reporter("json", "the run record", "dilabench.report.json:render", filename="run.json"),
    Reporter(
        "markdown",
        "a report to read and share",
        "dilabench.report.markdown:render",
        filename="report.md",
        shows_sections=True,
        options=("columns",),
    ),
    Reporter(
        "plots",
        "curves and bars as PNG and SVG",
        "dilabench.report.plots.plots:render",
        filename="plots",
        shows_sections=True,
        prints=False,
    ),
)

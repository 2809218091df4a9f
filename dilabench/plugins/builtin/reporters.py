"""The renderings of a run record that dilabench ships."""

from dilabench.plugins.descriptors import Reporter

REPORTERS = (
    Reporter(
        "table",
        "a table in the terminal",
        "dilabench.report.table:render",
        shows_sections=True,
        shows_plots=False,
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
        "pull-request",
        "the answer as Markdown to paste into a pull request",
        "dilabench.report.pull_request:render",
        filename="pull-request.md",
        shows_sections=True,
    ),
    Reporter(
        "html",
        "one page that opens offline: tables to sort, charts",
        "dilabench.report.html.page:render",
        filename="report.html",
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
    Reporter(
        "csv",
        "one line per case, for spreadsheets and programs",
        "dilabench.report.tidy:render_csv",
        filename="cases.csv",
        samples="csv-samples",
    ),
    Reporter(
        "csv-samples",
        "one line per sample",
        "dilabench.report.tidy:render_csv_samples",
        filename="samples.csv",
    ),
    Reporter(
        "parquet",
        "one line per case (extra: data)",
        "dilabench.report.tidy:render_parquet",
        filename="cases.parquet",
        prints=False,
        samples="parquet-samples",
    ),
    Reporter(
        "parquet-samples",
        "one line per sample (extra: data)",
        "dilabench.report.tidy:render_parquet_samples",
        filename="samples.parquet",
        prints=False,
    ),
    Reporter(
        "bencher",
        "Bencher Metric Format, with lower and upper values",
        "dilabench.report.continuous_benchmarking:render_bencher",
        filename="bencher.json",
    ),
    Reporter(
        "github-action-benchmark",
        "for that action, as customSmallerIsBetter",
        "dilabench.report.continuous_benchmarking:render_github_action",
        filename="github-action-benchmark.json",
    ),
)

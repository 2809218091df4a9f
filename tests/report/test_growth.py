"""What reports cost grows with the record, not with its square."""

import sys

import pytest

from dilabench.plugins.axis import LENGTH
from dilabench.record import RunRecord
from dilabench.report import json, markdown, tidy
from dilabench.report.answer import answer
from dilabench.report.table import to_text
from tests.conftest import slow

FORMS = {
    "table": lambda record: to_text(record, width=120, details=True),
    "markdown": lambda record: markdown.to_text(record),
    "answer": lambda record: answer(record, LENGTH).sentence,
    "csv": lambda record: tidy.render_csv(record, None),
    "csv-samples": lambda record: "".join(tidy.render_csv_samples(record, None)),
    "json": lambda record: json.render(record, None),
}


@pytest.fixture
def record_of(make_row, make_record):
    def make(workloads: int) -> RunRecord:
        return make_record(
            [
                make_row(name, batch_size=1 + at, position=place, ns=1e6 * (1 + place))
                for at in range(workloads)
                for place, name in enumerate(("gather", "strided"))
            ]
        )

    return make


@pytest.mark.parametrize("form", ["table", "csv-samples", *map(slow, ("markdown", "answer", "csv", "json"))])
def test_ten_times_the_workloads_take_ten_times_the_calls(calls_of, record_of, form):
    FORMS[form](record_of(2))
    few, many = (calls_of(FORMS[form], record_of(workloads)) for workloads in (5, 50))
    assert many < 11 * few


def test_csv_of_samples_comes_in_small_parts(record_of):
    parts = list(tidy.render_csv_samples(record_of(20), None))
    assert max(map(sys.getsizeof, parts)) < 5000

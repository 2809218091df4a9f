"""What the findings of a suite cost grows with the record, not with its square."""

import pytest

from dilabench.plugins.manager import discover
from dilabench.report.findings import sections_of
from tests.conftest import slow_but_every

CATALOGUE = discover().catalogue
SUITES = {suite.analysis: suite.name for suite in CATALOGUE.suites}.values()
ROWS = (("gather", "plain"), ("strided", "method"), ("dense", "yardstick"))
AXES = {"batch_size": lambda at: 1 + at, "seq_len": lambda at: 96 + 32 * at}


# Only along a range do batch sizes form series.
@pytest.mark.parametrize(
    ("suite", "axis"), [("range", "batch_size"), *slow_but_every(3, ((suite, "seq_len") for suite in SUITES))]
)
def test_each_further_workload_takes_as_many_calls(calls_of, make_row, make_record, suite, axis):
    # They stay until the end: a record that is freed calls functions.
    records = []

    def calls(workloads):
        rows = [
            make_row(name, position=place, ns=1e6 * (1 + place), role=role, **{axis: AXES[axis](at)})
            for at in range(workloads)
            for place, (name, role) in enumerate(ROWS)
        ]
        records.append(make_record(rows, suite=suite))
        return calls_of(sections_of, records[-1], CATALOGUE)

    # What is done once only is done now.
    calls(5)
    few, more, most = map(calls, (5, 10, 15))
    # Short sequences take a few calls less.
    assert most - more < 1.005 * (more - few)

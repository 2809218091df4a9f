"""Scaling over ranks: the winner at each length, strong and weak scaling, memory."""

import pytest

from dilabench.plugins.manager import discover
from dilabench.report.findings import sections_of
from dilabench.suites.distributed.findings import analyse
from tests.suites.findings.conftest import table

CATALOGUE = discover().catalogue

SHAPE = {"pattern": {"kind": "dense"}, "num_heads": 4, "num_kv_heads": 4, "dtype": "float32", "mode": "both"}


@pytest.fixture
def distributed(row, record):
    """Of 1000 and 2000 tokens on 1, 2 and 4 devices; `ring` wins short sequences, `ulysses` long ones."""
    rows = []
    for length, one_ms in ((1000, 10.0), (2000, 40.0), (4000, 160.0)):
        rows.append(row("dense", one_ms, seq_len=length, peak_mib=64, **SHAPE))
        for ranks in (2, 4):
            for at, (name, share) in enumerate((("ring", 0.9 if length < 2000 else 0.6), ("ulysses", 0.75))):
                ms = one_ms / ranks / share
                rows.append(row(name, ms, at=at, ranks=ranks, seq_len=length, peak_mib=64 // ranks + at, **SHAPE))
    return record(*rows, suite="distributed")


@pytest.fixture
def sections(distributed):
    return {section.title: section for section in analyse(distributed, CATALOGUE)}


def test_the_fastest_is_named_once_by_the_answer(distributed, sections):
    answer, *others = sections_of(distributed, CATALOGUE)
    fastest = {(cells["ranks"], cells["workload"]): cells["fastest"] for cells in table(answer)}
    assert fastest["4", "1x1000"].startswith("ring")
    assert fastest["4", "1x2000"].startswith("ulysses")
    assert fastest["2", "1x4000"].startswith("ulysses")
    assert not any("fastest" in section.columns for section in others)


def test_a_crossover_is_looked_for_on_each_number_of_ranks(sections):
    for ranks in (2, 4):
        (crossing,) = table(sections[f"Crossover lengths on {ranks} ranks"])
        assert crossing["faster below"].startswith("ring")
        assert crossing["faster above"].startswith("ulysses")


def test_strong_scaling_keeps_the_workload(sections):
    ring = table(sections["Strong scaling"])[0]
    assert ring["1 device"] == "10.05 ms"
    assert ring["4 ranks"].endswith("(3.60x, 90%)")
    plot = sections["Strong scaling"].plots[0]
    assert [curve.label for curve in plot.curves] == ["ring", "ulysses", "ideal: P times one device"]
    assert [point.x for point in plot.curves[0].points] == [1, 2, 4]
    assert plot.curves[0].points[2].y == pytest.approx(3.6)


def test_weak_scaling_keeps_the_tokens_of_a_rank(sections):
    """Useful FLOP/s per rank: 2000 tokens are four times the work of 1000, on two ranks twice that of each."""
    lines = table(sections["Weak scaling"])
    assert [cells["workload"].split()[0] for cells in lines] == ["1x1000"] * 2 + ["1x2000"] * 2
    assert lines[1]["implementation"] == "ulysses"
    assert lines[1]["2 ranks"].endswith("(75%)")
    assert lines[1]["4 ranks"].endswith("(75%)")
    # 8000 tokens on 4 ranks were not measured.
    assert lines[3]["4 ranks"] == "–"


def test_memory_is_that_of_a_rank(sections):
    ring = table(sections["Memory over ranks"])[0]
    assert (ring["1 device"], ring["2 ranks"], ring["4 ranks"]) == ("64.0 MiB", "32.0 MiB", "16.0 MiB")
    assert [point.y for point in sections["Memory over ranks"].plots[0].curves[0].points] == [64, 32, 16]


def test_names_of_plots_are_their_own(sections):
    names = [plot.name for section in sections.values() for plot in section.plots]
    assert len(set(names)) == len(names) == 9


def test_nothing_is_said_of_nothing(record):
    assert analyse(record(suite="distributed"), CATALOGUE) == ()

"""Exponents, crossovers and curves against times of known laws."""

import pytest

from dilabench.suites.findings.series import series_of
from dilabench.suites.range.findings import analyse
from tests.suites.findings.conftest import table

LENGTHS = (1000, 2000, 4000, 8000)


def rows_of(row, name, law, at=0, lengths=LENGTHS, **changes):
    return [row(name, law(length), at=at, seq_len=length, **changes) for length in lengths]


def test_a_quadratic_law_has_exponent_two(row, record):
    sections = analyse(record(*rows_of(row, "plain", lambda n: 1e-6 * n**2)))
    growth = table(sections[1])[0]
    assert float(growth["exponent"]) == pytest.approx(2.0, abs=1e-3)
    assert growth["lengths"] == "4: 1000 to 8000"
    assert "N^2.00" in sections[1].sentence


def test_the_time_is_that_of_one_sequence(row, record):
    """Four times as many sequences in four times the time: the same time each."""
    rows = [row("plain", 8.0, batch_size=8, seq_len=1000), row("plain", 4.0, batch_size=2, seq_len=2000)]
    growth = table(analyse(record(*rows, row("plain", 4.0, batch_size=1, seq_len=4000)))[1])[0]
    assert float(growth["exponent"]) == pytest.approx(1.0, abs=1e-3)


def test_two_lengths_have_no_exponent(row, record):
    """A line through two points fits whatever the times are."""
    sections = analyse(record(row("plain", 1.0, seq_len=1000), row("plain", 4.0, seq_len=2000)))
    assert "Growth with length" not in [section.title for section in sections]


def test_times_that_fit_no_law_have_no_exponent(row, record):
    """The interval of three scattered times reaches from below constant to beyond quadratic."""
    rows = [row("plain", ms, seq_len=length) for length, ms in ((1000, 1.0), (2000, 7.0), (4000, 8.0))]
    assert "Growth with length" not in [section.title for section in analyse(record(*rows))]


def test_an_unopposed_row_at_the_longest_length_is_not_called_fastest(row, record):
    rows = [*rows_of(row, "gather", lambda n: n / 100, lengths=(1000, 2000)), row("gather", seq_len=4000)]
    rows += rows_of(row, "strided", lambda n: n / 200, at=1, lengths=(1000, 2000, 4000))
    sentence = analyse(record(*rows))[0].sentence
    assert "At 4000 one measured row, no comparison: strided over math, " in sentence
    assert "astest" not in sentence


def test_every_line_tells_length_batch_and_speedup(row, record):
    rows = [*rows_of(row, "gather", lambda n: n / 100), *rows_of(row, "strided", lambda n: n / 200, at=1)]
    first = table(analyse(record(*rows))[0])[0]
    assert (first["length"], first["batch"]) == ("1000", "1*")
    assert first["gather over math"].startswith("10.05 ms")
    assert first["strided over math"].endswith("(2.00x)")


def test_what_was_skipped_is_said_in_its_place(row, record):
    rows = [*rows_of(row, "gather", lambda n: n / 100), row("gather", None, seq_len=16000)]
    last = table(analyse(record(*rows))[0])[-1]
    assert (last["length"], last["gather over math"]) == ("16000", "skipped")


def test_lengths_without_any_time_are_said_once(row, record):
    rows = [*rows_of(row, "gather", lambda n: n / 100), *(row("gather", None, seq_len=n) for n in (16000, 32000))]
    section = analyse(record(*rows))[0]
    assert not {"16000", "32000"} & {line["length"] for line in table(section)}
    assert section.sentence.endswith("2 lengths from 16000 to 32000 have no time.")


def test_whiskers_of_few_turns_are_called_what_they_are(row, record):
    def captions(rounds):
        rows = [row("gather", n, seq_len=n * 1000, rounds=rounds) for n in (1, 2)]
        return [plot.caption for plot in analyse(record(*rows))[0].plots][:2]

    assert captions(8) == ["Latency of one call, with 95 % intervals", "Throughput, with 95 % intervals"]
    assert all(caption.endswith("intervals; with few rounds the whole range") for caption in captions(5))


def test_a_crossover_lies_where_the_laws_meet(row, record):
    """n²/4000 and n meet at 4000: below it the quadratic one is faster."""
    lengths = (1000, 2000, 8000, 16000)
    quadratic = rows_of(row, "gather", lambda n: 1e-3 * n**2 / 4000, lengths=lengths)
    linear = rows_of(row, "strided", lambda n: 1e-3 * n, at=1, lengths=lengths)
    found = table(analyse(record(*quadratic, *linear))[2])
    assert len(found) == 1
    assert (found[0]["faster below"], found[0]["faster above"]) == ("gather over math", "strided over math")
    assert found[0]["crossover length"] == "3.91K"
    assert found[0]["proven between"] == "2000 and 8000"


def test_where_sides_change_more_than_once_the_lengths_of_each_are_told(row, record):
    """A crossover was once said to be proven although one side won at both ends."""
    wavy = {1000: 1.0, 2000: 3.0, 4000: 1.0, 8000: 9.0}
    rows = [*rows_of(row, "gather", wavy.get), *rows_of(row, "strided", lambda n: 2.0, at=1)]
    section = analyse(record(*rows))[2]
    assert section.rows == ()
    assert section.sentence == (
        "gather over math is faster than strided over math at 1000, 4000. "
        "strided over math is faster than gather over math at 2000, 8000."
    )


def test_equal_implementations_do_not_overtake_each_other(row, record):
    rows = [*rows_of(row, "gather", lambda n: n), *rows_of(row, "strided", lambda n: n, at=1)]
    assert analyse(record(*rows))[2].sentence == "No implementation is proven to overtake another along these lengths."


def test_other_families_are_never_compared(row, record):
    dense = rows_of(row, "dense", lambda n: 1e-3 * n**2 / 4000, pattern={"kind": "dense"}, role="yardstick")
    strided = rows_of(row, "strided", lambda n: 1e-3 * n, at=1)
    modules = rows_of(row, "strided-multihead", lambda n: 1e-6 * n**2, at=2, takes="embeddings")
    sections = analyse(record(*dense, *strided, *modules))
    assert [section.title for section in sections][:2] == ["Latency by length", "Growth with length"]
    assert sections[2].columns == ()
    assert sections[2].sentence == "strided over math is faster than dense over math from about 3.91K tokens on."
    assert "x)" not in " ".join(cell for cells in sections[0].rows for cell in cells)


def test_one_length_has_no_growth(row, record):
    assert analyse(record(row("gather", 1.0), row("strided", 2.0))) == ()
    assert analyse(record(row("gather", None))) == ()


def test_intervals_of_rates_are_turned_around(row, record):
    latency, throughput, scaling = (
        plot
        for section in analyse(record(*rows_of(row, "plain", lambda n: n)))
        for plot in section.plots
        if plot.name in ("latency", "throughput", "scaling")
    )
    point, rate = latency.curves[0].points[0], throughput.curves[0].points[0]
    assert point.low < point.y < point.high
    assert rate.low == pytest.approx(1e6 / point.high)
    assert rate.high == pytest.approx(1e6 / point.low)
    assert [curve.fitted for curve in scaling.curves] == [False, True]


def test_names_tell_series_apart(row, record):
    rows = [
        row("gather", 1.0, dtype="bfloat16"),
        row("gather", 1.0, dtype="float32"),
        row("gather", 1.0, dtype="float32", mode="both"),
        row("strided", 1.0),
    ]
    labels = [series.label for series in series_of(record(*rows))]
    assert labels == [
        "gather over math bfloat16",
        "gather over math float32 forward",
        "gather over math float32 both",
        "strided over math",
    ]

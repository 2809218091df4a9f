"""Rows over ranks beside one device: speed-up, exposed communication, the modelled efficiency, balance."""

import pytest

from dilabench.distributed.shardings import RING, ZIGZAG_RING
from dilabench.metadata import ABOVE_PEAK_FLOPS, CHOSEN_BY
from dilabench.plugins.manager import discover
from dilabench.record.samples import Slots
from dilabench.report.markdown import to_text as markdown
from dilabench.report.table import to_text
from dilabench.suites.findings.exposure import exposure, modelled
from dilabench.suites.ring.findings import MODEL, analyse, workload_text
from tests.suites.findings.conftest import table

CATALOGUE = discover().catalogue

DENSE = {"kind": "dense"}
SHAPE = {"pattern": DENSE, "seq_len": 4096, "num_heads": 4, "num_kv_heads": 4, "dtype": "float32"}
PARTS = {"whole": 60.0, "computation": 45.0, "communication": 30.0}
# Zigzag on 2 ranks, both ways: of K and V half a shard or a whole one comes, and of dK and dV the other way round.
RECEIVED = 2 * 2048 * 4 * 24 * 4 * 3 // 2


@pytest.fixture
def single(row):
    def make(mode, ms, **fields):
        return row("dense", ms, mode=mode, **{**SHAPE, **fields})

    return make


@pytest.fixture
def over(row):
    def make(name, mode, ms, **fields):
        counters = {"received_bytes": RECEIVED}
        return row(name, ms, mode=mode, **{"ranks": 2, "counters": counters, **SHAPE, **fields})

    return make


def test_single_and_parallel_stand_one_above_the_other(record, single, over):
    rows = [single("forward", 10), single("backward", 30), single("both", 40)]
    rows += [over("ring", "forward", 8), over("ring", "backward", 20), over("ring", "both", 25)]
    section = analyse(record(*rows, suite="ring"), CATALOGUE)[0]
    one, two = table(section)
    assert (one["mode"], two["mode"]) == ("single: dense", "parallel: ring")
    assert (one["devices"], two["devices"]) == ("1", "2")
    assert one["forward"].startswith("10.05")
    assert one["total"].startswith("40.20")
    assert two["speed-up fwd, bwd, total"] == "1.25x 1.50x 1.60x"
    assert two["efficiency"] == "80.0% of dense"
    assert "80% of 2 ranks" in section.sentence


def launched(one, ms):
    """The row with this time of the host for each sample."""
    (timing,) = one.outcome.timings
    slots = [slot.model_copy(update={"enqueue_ns": (int(ms * 1e6),) * len(slot.samples_ns)}) for slot in timing.slots]
    timed = timing.model_copy(update={"slots": Slots(slots)})
    return one.model_copy(update={"outcome": one.outcome.model_copy(update={"timings": (timed,)})})


@pytest.mark.parametrize(("host_ms", "text"), [(2.0, "2.000 ms"), (26.0, "26.00 ms§")])
def test_the_time_of_the_host_is_shown_and_where_a_program_waits_for_it(record, single, over, host_ms, text):
    rows = [launched(single("both", 40), 1.0), launched(over("ring", "both", 25), host_ms)]
    section = analyse(record(*rows, suite="ring"), CATALOGUE)[0]
    one, two = table(section)
    assert one["host"] == "1.000 ms"
    assert two["host"] == text
    assert "host: the time that the host takes to launch a call." in section.sentence
    assert ("§ The host takes longer than its device" in section.sentence) == ("§" in text)


def test_no_column_of_the_host_stands_where_no_timer_took_it(record, single, over):
    section = analyse(record(single("both", 40), over("ring", "both", 25), suite="ring"), CATALOGUE)[0]
    assert "host" not in section.columns
    assert "host" not in section.sentence


def test_what_auto_took_is_said_with_what_was_expected(record, single, over):
    one = over("zigzag-ring", "both", 25)
    labels = CHOSEN_BY.entry("auto (24 ms expected, ulysses 26 ms)")
    taken = one.model_copy(update={"planned": one.planned.model_copy(update={"labels": labels})})
    section = analyse(record(single("both", 40), taken, suite="ring"), CATALOGUE)[0]
    assert f"zigzag-ring at {one.case.workload.label()} by auto (24 ms expected, ulysses 26 ms)." in section.sentence


def test_at_80_columns_each_implementation_has_one_line_below_its_workload(record, single, over):
    modes = {"forward": 10, "backward": 30, "both": 40}
    rows = [single(mode, ms) for mode, ms in modes.items()]
    for faster, name in ((2, "zigzag-ring"), (1.5, "zigzag-allgather")):
        parts = {part: ms / faster for part, ms in PARTS.items()}
        rows += [over(name, mode, ms / faster, parts=parts) for mode, ms in modes.items()]
    found = record(*rows, suite="ring")
    sections = analyse(found, CATALOGUE)
    shown = to_text(found, width=80, sections=sections).split("Answer")[0]
    findings = shown[: shown.index("2 devices")].splitlines()
    for name in ("single: dense", "parallel: zigzag-ring", "parallel: zigzag-allgather"):
        (line,) = (one for one in findings if one.startswith(name))
        assert line.count(" ms") == 3
    assert sum(one.startswith("zigzag-ring ") for one in findings) == 2
    assert "omitted at 80 columns: tok/s, devices, efficiency" in findings
    for text in (findings, markdown(found, sections).splitlines()):
        assert sum(one.startswith(workload_text(rows[0])) for one in text) == len(sections)


def test_tokens_per_second_count_the_batch(record, single, over):
    rows = [single("forward", 10, batch_size=4), over("ring", "forward", 10, batch_size=4)]
    rate = table(analyse(record(*rows, suite="ring"), CATALOGUE)[0])[1]["tok/s"]
    assert rate == f"{4 * 4096 / 10.05e-3 / 1e6:.2f}M"


def test_the_report_says_where_the_sharding_is(record, single, over):
    outside = analyse(record(single("both", 40), over("ring", "both", 25), suite="ring"), CATALOGUE)[0]
    inside = over("ring", "both", 25, optimizations={"sharding_inside": True})
    sections = analyse(record(single("both", 40), inside, suite="ring"), CATALOGUE)
    assert "joining results is outside the timed call" in outside.sentence
    assert "cutting and joining are inside" in sections[0].sentence
    assert table(sections[0])[1]["mode"] == "parallel: ring +sharding"


def test_the_fastest_on_one_device_is_the_base_whatever_its_backend(record, single, over):
    rows = [single("both", 80, backend="math"), single("both", 40, backend="sdpa-flash")]
    rows += [over("ring", "both", 25, backend=backend) for backend in ("math", "sdpa-flash")]
    section = analyse(record(*rows, suite="ring"), CATALOGUE)[0]
    assert [cells["mode"] for cells in table(section)[:2]] == [
        "single: dense over math",
        "single: dense over sdpa-flash",
    ]
    of_fastest = "80.0% of dense over sdpa-flash"
    assert [cells["efficiency"] for cells in table(section)] == ["–", "–", of_fastest, of_fastest]
    assert "1.60x dense over sdpa-flash on one device" in section.sentence


def test_a_way_without_a_backend_is_the_base_if_it_is_the_fastest(record, row):
    rows = [row("strided", 40, mode="both"), row("fused", 20, mode="both", backend=None)]
    rows += [row("ring-allgather", 12.5, mode="both", ranks=2)]
    lines = table(analyse(record(*rows, suite="ring"), CATALOGUE)[0])
    assert [cells["mode"] for cells in lines] == ["single: strided", "single: fused", "parallel: ring-allgather"]
    assert lines[-1]["efficiency"] == "80.0% of fused"


def test_each_mode_has_its_own_fastest_single_device(record, single, over):
    rows = [single("forward", 10, backend="math"), single("both", 60, backend="math")]
    rows += [single("forward", 20, backend="sdpa-flash"), single("both", 40, backend="sdpa-flash")]
    rows += [over("ring", "forward", 8), over("ring", "both", 25)]
    *_, parallel = table(analyse(record(*rows, suite="ring"), CATALOGUE)[0])
    assert parallel["speed-up fwd, total"] == "1.25x 1.60x"


def test_a_time_that_cannot_be_true_is_no_base(record, single, over):
    impossible = single("both", 4, backend="sdpa-flash")
    notes = (ABOVE_PEAK_FLOPS.note("more than this device can do"),)
    noted = impossible.model_copy(update={"outcome": impossible.outcome.model_copy(update={"notes": notes})})
    rows = [single("both", 40), noted, over("ring", "both", 25)]
    assert table(analyse(record(*rows, suite="ring"), CATALOGUE)[0])[-1]["efficiency"] == "80.0% of dense over math"


@pytest.mark.parametrize("modes", [("forward",), ("backward",), ("both",), ("forward", "both")])
def test_columns_of_modes_that_nothing_was_measured_in_are_not_shown(record, single, over, modes):
    rows = [
        make(mode) for mode in modes for make in (lambda mode: single(mode, 40), lambda mode: over("ring", mode, 25))
    ]
    section = analyse(record(*rows, suite="ring"), CATALOGUE)[0]
    columns = {"forward": "forward", "backward": "backward", "both": "total"}
    assert {column for mode, column in columns.items() if column in section.columns} == {
        columns[mode] for mode in modes
    }
    for cells in table(section):
        assert all(cells[columns[mode]].endswith(" ms") for mode in modes)


def test_exposed_communication_is_the_whole_less_computation(over):
    found = exposure(over("zigzag-ring", "both", 60, parts=PARTS))
    assert found.exposed_ns == pytest.approx(15e6, rel=0.02)
    assert found.interval.low <= found.exposed_ns <= found.interval.high
    assert found.overlap == pytest.approx(0.5, rel=0.02)


def test_a_difference_lost_in_noise_hides_everything(over):
    found = exposure(over("zigzag-ring", "both", 60, parts={**PARTS, "computation": 61.0}))
    assert found.exposed_ns < 0
    assert found.overlap == 1.0


def test_modelled_efficiency_from_measured_bandwidth_and_work(over):
    """T_comp = 100 / 2 ms; half of it can run while bytes travel; 30 ms of them leave 5 ms exposed."""
    row = over("zigzag-ring", "both", 60, parts=PARTS)
    assert modelled(row, 100e6, ZIGZAG_RING) == pytest.approx(50 / 55, rel=5e-3)
    # Were twice as many bytes counted as the formula has, the ideal would send half of them.
    wasteful = over("zigzag-ring", "both", 60, parts=PARTS, counters={"received_bytes": 2 * RECEIVED})
    assert modelled(wasteful, 100e6, ZIGZAG_RING) == pytest.approx(1.0, rel=1e-3)


def test_an_efficiency_above_the_model_contradicts_no_name(record, single, over):
    """Ranks that compute at a higher rate than one device exceed the model, which the section says is no bound."""
    sections = analyse(
        record(single("both", 100), over("zigzag-ring", "both", 45, parts=PARTS), suite="ring"), CATALOGUE
    )
    (section,) = (section for section in sections if section.columns == MODEL)
    (cells,) = table(section)
    assert float(cells["efficiency / model"].rstrip("%")) > 100
    assert not any("ideal" in text.lower() for text in (section.title, section.sentence, *section.columns))
    assert "no bound" in section.sentence


def test_there_is_no_model_where_a_part_of_its_formula_is_unknown(over):
    assert modelled(over("ring", "both", 60), 100e6, RING) is None
    assert modelled(over("somebody-elses", "both", 60, parts=PARTS), 100e6, None) is None
    silent = over("ring", "both", 60, parts=PARTS, counters={"received_bytes": 0})
    assert modelled(silent, 100e6, RING) is None


def test_records_without_diagnostics_say_nothing_of_the_model(record, single, over):
    before = analyse(record(single("both", 40), over("ring", "both", 25), suite="ring"), CATALOGUE)
    after = analyse(record(single("both", 40), over("ring", "both", 25, parts=PARTS), suite="ring"), CATALOGUE)
    assert [one.columns for one in after if one not in before and one.columns == MODEL]
    assert not [one for one in before if one.columns == MODEL]


def test_each_rank_has_its_median(record, single, over):
    row = over("ring", "both", 25, ranks=3)
    fast, _, slow = row.outcome.timings[0].rank_medians_ns
    assert slow == pytest.approx(2 * fast, rel=1e-6)
    assert single("both", 40).outcome.timings[0].rank_medians_ns == ()
    balance = table(analyse(record(single("both", 40), row, suite="ring"), CATALOGUE)[1])[0]
    assert balance["median of each rank"] == "12.56 ms, 12.56 ms, 25.12 ms"
    assert balance["λ"] == "0.600"


def test_nothing_is_said_without_both_sides(record, single, over):
    assert analyse(record(single("both", 40), suite="ring"), CATALOGUE) == ()
    assert analyse(record(over("ring", "both", 40), suite="ring"), CATALOGUE) == ()
    assert analyse(record(single("forward", 40), over("ring", "backward", 40), suite="ring"), CATALOGUE) == ()

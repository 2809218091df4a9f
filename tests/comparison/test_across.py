"""Two sides measured at different times: the spread between sessions is the error."""

import pytest

from dilabench.comparison.across import compare_across, refusals
from dilabench.comparison.gate import confirmed, exit_code
from dilabench.errors import ExitCode
from dilabench.record import Failed, GpuInfo, Memory, Skipped, Verification
from dilabench.stats.decisions.decide import Policy
from dilabench.stats.decisions.verdicts import Cause, Code

CPU = Policy.for_device("cpu")
LEVELS = (0.997, 1.002, 1.0, 0.999, 1.003, 1.001)


@pytest.fixture
def history(make_row, make_record):
    """Records of one case, a session each, between which the machine wanders by a quarter of a per cent."""

    def make(count=6, *, name="strided", **fields):
        return [
            make_record([make_row(name, seed=index, ns=1e7 * LEVELS[index % 6], **fields)], run_id=f"base{index}")
            for index in range(count)
        ]

    return make


@pytest.mark.parametrize(("ratio", "code"), [(1.05, Code.SLOWER), (0.95, Code.FASTER), (1.0, Code.SAME)])
def test_six_sessions_show_their_spread(history, make_row, make_record, ratio, code):
    new = make_record([make_row("strided", seed=99, ns=1e7 * ratio)], run_id="new")
    found = compare_across(history(), [new], policy=CPU)
    (cell,) = found.pairs
    assert (cell.verdict.code, cell.route) == (code, "stored")
    assert cell.verdict.numbers.spread_source == "sessions"
    assert found.warnings == ()
    assert exit_code(found) is (ExitCode.REGRESSION if code is Code.SLOWER else ExitCode.OK)


@pytest.mark.parametrize("sessions", [1, 2, 4])
@pytest.mark.parametrize(
    ("ratio", "code"), [(3.0, ExitCode.REGRESSION), (1.5, ExitCode.REGRESSION), (1 / 3, ExitCode.OK)]
)
def test_a_large_change_is_decided_by_few_sessions(history, make_row, make_record, sessions, ratio, code):
    found = compare_across(
        history(sessions), [make_record([make_row("strided", ns=1e7 * ratio)], run_id="n")], policy=CPU
    )
    assert found.pairs[0].verdict.flagged
    assert found.warnings == ()
    assert exit_code(found) is code


def test_a_change_within_the_assumed_spread_is_undecided(make_row, make_record):
    sides = [make_record([make_row()], run_id="a")], [make_record([make_row(ns=1.1e7)], run_id="b")]
    found = compare_across(*sides, policy=CPU)
    verdict = found.pairs[0].verdict
    assert (verdict.code, verdict.cause) == (Code.UNDECIDED, Cause.IMPRECISE)
    assert "one session each, assumed to spread by 5 %" in verdict.reason
    assert exit_code(found) is ExitCode.OK
    assert exit_code(found, {"undecided"}) is ExitCode.INCONCLUSIVE


def test_rounds_of_two_records_never_pair(make_row, make_record):
    """Both number their rounds from zero, yet they did not take turns."""
    found = compare_across(
        [make_record([make_row(position=0)], run_id="a")], [make_record([make_row(position=1)], run_id="b")], policy=CPU
    )
    assert found.pairs[0].route == "stored"


@pytest.mark.parametrize(
    ("peak", "code"),
    [
        (2**30, ExitCode.OK),
        (2**30 + 10 * 2**20, ExitCode.OK),
        (2**30 + 11 * 2**20, ExitCode.REGRESSION),
        (2**20, ExitCode.OK),
    ],
)
def test_memory_is_gated_exactly_even_without_a_history(make_row, make_record, peak, code):
    found = compare_across(
        [make_record([make_row(peak=2**30)], run_id="a")], [make_record([make_row(peak=peak)], run_id="b")], policy=CPU
    )
    assert exit_code(found) is code


@pytest.mark.parametrize(("peak", "code"), [(2**26 + 7 * 2**20, ExitCode.OK), (2**26 + 9 * 2**20, ExitCode.REGRESSION)])
def test_a_resident_set_may_wander(make_row, make_record, peak, code):
    """Pages of a process come and go: identical code was seen 4 MiB apart."""
    sides = [[make_record([make_row(peak=one, source="resident_set")], run_id=f"{one}")] for one in (2**26, peak)]
    assert exit_code(compare_across(*sides, policy=CPU)) is code


@pytest.mark.parametrize(("process", "code"), [(26 * 2**20, ExitCode.OK), (36 * 2**20, ExitCode.REGRESSION)])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_peak_with_a_resident_set_in_it_wanders_too(make_row, make_record, process, code, swapped):
    """Of one side the resident set exceeds the allocator's count by more than it wanders, of the other it does not."""
    counted = Memory(peak_bytes=18 * 2**20, process_bytes=23 * 2**20, inputs_bytes=2**21, source="allocator")
    shown = Memory(peak_bytes=process + 2**21, process_bytes=process, inputs_bytes=2**21, source="allocator")
    sides = []
    for memory in (shown, counted) if swapped else (counted, shown):
        row = make_row()
        row = row.model_copy(update={"outcome": row.outcome.model_copy(update={"memory": memory})})
        sides.append([make_record([row], run_id=f"{memory.peak_bytes}")])
    found = compare_across(*sides, policy=CPU)
    assert exit_code(found) is (ExitCode.OK if swapped else code)
    expected = "SAME" if code is ExitCode.OK else "SMALLER" if swapped else "LARGER"
    assert found.pairs[0].memory.code == expected


def test_the_largest_stored_peak_is_the_baseline(make_row, make_record):
    stored = [make_record([make_row(peak=peak)], run_id=f"{peak}") for peak in (2**20, 2**25, 2**21)]
    (cell,) = compare_across(stored, [make_record([make_row(peak=2**25)], run_id="new")], policy=CPU).pairs
    assert (cell.memory.code, cell.memory.baseline_bytes) == ("SAME", 2**25)


def test_peaks_taken_in_different_ways_do_not_compare(make_row, make_record):
    old, new = make_row(peak=2**20), make_row(peak=2**30, source="resident_set")
    (cell,) = compare_across([make_record([old], run_id="a")], [make_record([new], run_id="b")], policy=CPU).pairs
    assert cell.memory is None
    assert "different ways" in cell.notes[0]


def test_every_row_that_only_one_side_measured_is_named(make_row, make_record):
    skipped, crashed = (
        Skipped(code="unsupported", why="needs cuda"),
        Failed(stage="time", code="crash", why="killed by SIGSEGV"),
    )
    old = [
        make_row("both"),
        make_row("gone"),
        make_row("broken"),
        make_row("later", outcome=skipped),
        make_row("no", outcome=skipped),
    ]
    new = [
        make_row("both"),
        make_row("fresh"),
        make_row("broken", outcome=crashed),
        make_row("later"),
        make_row("no", outcome=skipped),
    ]
    found = compare_across([make_record(old, run_id="a")], [make_record(new, run_id="b")], policy=CPU)
    assert [cell.candidate.implementation for cell in found.pairs] == ["both"]
    named = {one.case.implementation: (one.lack, one.regressed) for one in found.uncompared}
    assert named == {
        "gone": ("missing", True),
        "broken": ("failed", True),
        "fresh": ("new", False),
        "later": ("new", False),
        "no": ("skipped", False),
    }
    assert exit_code(found) is ExitCode.CASE_FAILED
    assert "SIGSEGV" in next(one.candidate for one in found.uncompared if one.lack == "failed")


def test_wrong_output_outranks_everything(make_row, make_record):
    wrong = Failed(stage="verify", code="wrong_output", why="out differs", verification=Verification(checks=()))
    new = [make_row("a", outcome=wrong), make_row("b", peak=2**40)]
    found = compare_across([make_record([make_row("b")], run_id="a")], [make_record(new, run_id="b")], policy=CPU)
    assert exit_code(found, ()) is ExitCode.WRONG_OUTPUT


def test_a_hang_in_verification_is_a_failure_and_no_wrong_output(make_row, make_record):
    hung = make_row("a", outcome=Failed(stage="verify", code="timeout", why="no answer within 10 s"))
    sides = [make_record([make_row("a")], run_id="a")], [make_record([hung], run_id="b")]
    found = compare_across(*sides, policy=CPU)
    assert [one.lack for one in found.uncompared] == ["failed"]
    assert exit_code(found) is ExitCode.CASE_FAILED


def test_nothing_in_common_is_nothing_measured(make_row, make_record):
    found = compare_across(
        [make_record([make_row("a")], run_id="a")], [make_record([make_row("b")], run_id="b")], policy=CPU
    )
    assert exit_code(found) is ExitCode.NOTHING_MEASURED


def test_no_common_timer(make_row, make_record):
    found = compare_across(
        [make_record([make_row(timer="hot")], run_id="a")],
        [make_record([make_row(timer="wall")], run_id="b")],
        policy=CPU,
    )
    (one,) = found.uncompared
    assert (one.lack, one.baseline, one.candidate) == ("not comparable", "measured by hot", "measured by wall")


def test_a_missing_case_is_undecided_when_asked(make_row, make_record):
    old = make_record([make_row("a"), make_row("b")], run_id="a")
    found = compare_across([old], [make_record([make_row("a")], run_id="b")], policy=Policy(user_margin=0.5))
    assert exit_code(found) is ExitCode.OK
    assert exit_code(found, {"undecided"}) is ExitCode.INCONCLUSIVE


GPU = {"device": "cuda", "gpu": "H200", "driver": "570.1", "power_limit_mw": "700000"}


@pytest.mark.parametrize(
    ("field", "other"), [("gpu", "H100"), ("driver", "580.2"), ("power_limit_mw", "230000"), ("device", "cpu")]
)
def test_another_machine_is_refused_with_the_field_and_both_values(make_row, make_record, field, other):
    old = make_record([make_row()], hard=GPU, device="cuda")
    new = make_record([make_row()], hard={**GPU, field: other}, device=other if field == "device" else "cuda")
    (mismatch,) = refusals([old], [new])
    assert str(mismatch) == f"{field}: {GPU[field]} against {other}"


def test_another_dtype_is_refused(make_row, make_record):
    (mismatch,) = refusals([make_record([make_row(dtype="bfloat16")])], [make_record([make_row(dtype="float32")])])
    assert str(mismatch) == "dtype: bfloat16 against float32"
    both = make_record([make_row(dtype="float32"), make_row(dtype="bfloat16")])
    assert refusals([both], [make_record([make_row(dtype="float32")])]) == ()


def test_a_record_without_fingerprint_is_known_by_its_environment(make_row, make_record):
    def on(gpu):
        record = make_record([make_row()], hard={}, device="cuda")
        environment = record.environment.model_copy(update={"gpus": (gpu,)})
        return record.model_copy(update={"environment": environment})

    old = on(GpuInfo(name="H200", driver="570", power_limit_mw=700_000))
    assert [str(one) for one in refusals([old], [on(GpuInfo(name="H200", driver="570", power_limit_mw=230_000))])] == [
        "power_limit_mw: 700000 against 230000"
    ]
    assert refusals([old], [on(GpuInfo(name="H200"))]) == ()


def test_soft_fields_warn(make_row, make_record):
    old, new = make_record([make_row()], soft={"torch": "2.6"}), make_record([make_row()], "new", soft={"torch": "2.7"})
    assert "torch: 2.6 against 2.7; this may explain a change" in compare_across([old], [new], policy=CPU).warnings


@pytest.fixture
def flagged(history, make_row, make_record):
    return compare_across(history(), [make_record([make_row("strided", ns=1.2e7)], run_id="new")], policy=CPU)


@pytest.mark.parametrize(("ratio", "code"), [(1.0, ExitCode.OK), (1.2, ExitCode.REGRESSION)])
def test_only_the_second_data_decide(history, flagged, make_row, make_record, ratio, code):
    assert [case.implementation for case in flagged.flagged] == ["strided"]
    again = make_record([make_row("strided", seed=5, ns=1e7 * ratio)], run_id="second")
    final = confirmed(flagged, compare_across(history(), [again], policy=CPU))
    assert exit_code(final) is code
    assert final.pairs[0].first_look.startswith("SLOWER, +20 %")
    numbers = final.pairs[0].verdict.numbers
    assert numbers.ratio == pytest.approx(final.pairs[0].candidate_ns / final.pairs[0].baseline_ns)


def test_what_was_not_measured_again_is_undecided(flagged):
    final = confirmed(flagged, None)
    assert final.pairs[0].verdict.cause is Cause.NOT_REMEASURED
    assert exit_code(final) is ExitCode.OK
    assert exit_code(final, {"undecided"}) is ExitCode.INCONCLUSIVE


def test_a_failure_at_the_second_look_is_told(history, flagged, make_row, make_record):
    crashed = make_record(
        [make_row("strided", outcome=Failed(stage="time", code="crash", why="killed"))], run_id="second"
    )
    final = confirmed(flagged, compare_across(history(), [crashed], policy=CPU))
    assert exit_code(final) is ExitCode.CASE_FAILED


def test_each_further_pair_is_judged_by_few_calls(calls_of, make_row, make_record):
    """Quantiles and medians are computed for many pairs together."""

    def calls(count):
        sides = [[make_record([make_row(seq_len=96 + n, seed=seed) for n in range(count)])] for seed in (0, 1)]
        compare_across(*sides, policy=CPU)
        return calls_of(lambda: compare_across(*sides, policy=CPU))

    assert calls(100) - calls(10) < 90 * 800

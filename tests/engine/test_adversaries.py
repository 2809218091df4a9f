"""Adversaries and what becomes of them: those that would get a time that they have not earned get none."""

from dataclasses import replace

import pytest
import torch

from dilabench.comparison.view import is_quotable
from dilabench.engine.plausibility import _work_kept
from dilabench.errors import ExitCode
from dilabench.metadata import matmul_key
from dilabench.plugins.descriptors import Implementation, Timer
from dilabench.record import Failed, Measured, Slot, Timing
from dilabench.runs.execution import exit_code
from tests.conftest import slow
from tests.engine.conftest import DENSE

TIMED = "wrong once it is timed"


@pytest.fixture
def outcome(engine, catalogue):
    def of(name, *, beside=(), **workload):
        options = {"timeout_s": 60.0, "timing": "simple", "timing_runs": None, "takes": "heads"}
        options |= {name: workload.pop(name) for name in options.keys() & workload}
        takes = options.pop("takes")
        for one in (name, *beside):
            target = f"adversaries:{one}"
            supports = replace(DENSE, last_rows="query_len" in workload)
            catalogue.implementations.add(Implementation(one, "", target, supports=supports, takes=takes), "builtin")
        record = of.record = engine(name, *beside, workload=workload, **options)
        found = {row.case.implementation: row.outcome for row in record.rows}
        return found if beside else found[name]

    return of


@pytest.mark.parametrize(
    "name", ["zeros_at_first_in_a_process", slow("every_second_row_at_first"), slow("no_gradients_at_first")]
)
def test_a_first_call_in_a_fresh_process_is_checked(outcome, name):
    mode = "both" if "gradients" in name else "forward"
    found = outcome(name, timing="first_call", mode=mode)
    assert isinstance(found, Failed), found.verification
    assert found.code == "wrong_output"
    assert TIMED in found.why


@pytest.mark.parametrize("queries", [1, 5, slow(92)])
def test_right_last_rows_have_a_time(outcome, queries):
    found = outcome("last_rows", seq_len=93, query_len=queries)
    assert isinstance(found, Measured), found.why
    assert all(row < queries for _, _, row, _ in found.verification.timed_rows)


@pytest.mark.slow
def test_a_right_first_call_has_a_time(outcome):
    found = outcome("honest", timing="first_call", mode="both")
    assert isinstance(found, Measured), found.why
    assert found.verification.timed_calls >= 1


IN_TWO_ITEMS = {"batch_size": 2}
OVER_A_CACHE = {"seq_len": 93, "query_len": 5}


# Of each way to be wrong one; its kin are slow.
@pytest.mark.parametrize(
    ("name", "workload", "why"),
    [
        ("out_1_01", {"dtype": "bfloat16"}, "out is the right one scaled by 1.01"),
        slow("out_1_002", {"dtype": "float16"}, "out is the right one scaled by 1.002"),
        slow("dk_1_06", {"dtype": "bfloat16", "mode": "both"}, "dk is the right one scaled by 1.06"),
        slow("dk_1_005", {"dtype": "float16", "mode": "both"}, "dk is the right one scaled by 1.005"),
        ("takes_dout_to_lie_as_out", {"mode": "both"}, "right only if dout has the memory layout of out: "),
        ("shifted_by_one", {}, "out is that of the position one earlier (shifted by one)"),
        slow("not_causal", {}, "out is that of causal=false"),
        ("first_rows", OVER_A_CACHE, "out is that of queries that are the first rows of the keys, not the last"),
        ("rows_one_early", OVER_A_CACHE, "out is that of queries one position before the last rows (off by one)"),
        ("rows_of_a_whole_chunk", OVER_A_CACHE, "as if 16 were there (a short last chunk)"),
        ("last_block_of_keys_missed", OVER_A_CACHE, "the last 13 keys not read (a short last block of keys)"),
        slow("rows_one_early", {**OVER_A_CACHE, "query_len": 1}, "dependency"),
        ("last_rows_of_known_keys", {**OVER_A_CACHE, "query_len": 1}, TIMED),
        slow("early_once_timed", OVER_A_CACHE, TIMED),
        slow("without_scale", {}, "out is that of scale=1 (no scale)"),
        slow("over_heads", {"causal": False}, "out is that of attention over heads, not positions"),
        ("lazy_subclass", {}, "a subclass of Tensor"),
        slow("two_buffers", {}, "result_kept: "),
        slow("eight_buffers", {}, "result_kept: "),
        ("flips_inputs", {}, "inputs)"),
        ("WrongWithLse", {}, "out_with_lse: "),
        slow("LseIsNone", {}, "lse: with_lse returned (Tensor, NoneType)"),
        ("default_dtype_in_calls", {}, "settings: a call changed settings of all of torch: default dtype"),
        ("exp_without_maximum", {}, "large_scores: "),
        slow("scores_clamped", {}, "large_scores: "),
        slow("maximum_over_all_rows", {}, "large_scores: "),
        slow("exp_without_maximum", {"dtype": "bfloat16"}, "large_scores: "),
        slow("scores_clamped", {"mode": "both"}, "large_scores: "),
        ("wrong_after_10", {}, TIMED),
        slow("wrong_after_40", {"seq_len": 33}, TIMED),
        ("cached_by_address", {}, TIMED),
        slow("cached_by_version", {}, TIMED),
        slow("cached_by_first_values", {}, TIMED),
        # Of few rows the last one would often be the one that is changed.
        slow("cached_by_last_values", {"seq_len": 512}, "repeat: "),
        slow("keys_cached_by_address", {}, TIMED),
        slow("memo_of_both", {"mode": "both"}, TIMED),
        slow("lazy_when_not_poisoned", {}, TIMED),
        slow("lazy_for_strangers", {}, TIMED),
        ("wrong_backward_when_timed", {"mode": "both"}, TIMED),
        slow("lazy_subclass_when_timed", {}, TIMED),
        ("thread_when_timed", {}, TIMED),
        slow("wrong_at_first", {}, TIMED),
        slow("wrong_in_the_middle", {}, TIMED),
        slow("wrong_every_second_time", {}, TIMED),
        slow("wrong_but_once", {}, TIMED),
        ("off_by_003_when_timed", {"dtype": "bfloat16", "seq_len": 512}, f"{TIMED}: timed_out_slope"),
        slow("off_by_003_when_timed", {"dtype": "float16", "mode": "both"}, TIMED),
        slow("copies_a_batch_item", IN_TWO_ITEMS, TIMED),
        ("stale_row", {}, TIMED),
        ("not_plain_at_first", {}, "timed_form: of timed call 1: returned a Buffer"),
        slow("narrower_at_first", {}, "timed_form: of timed call 1: returned"),
        ("zeroes_v", {}, "timed_inputs: of timed call"),
        slow("zeroes_v_both", {"mode": "both"}, "timed_inputs"),
        slow("equal_keys", {}, "timed_inputs"),
        ("gradients_in_forward", {"mode": "backward"}, TIMED),
        slow("gradients_of_known_signs", {"mode": "backward", "timing": "warmup"}, TIMED),
        slow("made_up_gradients", {"mode": "both"}, TIMED),
        ("lazy_on_the_instance", {}, "extra attributes (detach)"),
        slow("lazy_by_a_patch", {}, "intact: after a timed call Tensor.detach was replaced"),
        # This one loads torch._dynamo.
        slow(
            "lazy_by_dispatch",
            {},
            "intact: after a timed call a TorchDispatchMode (_Dispatch) was entered and not left",
        ),
        ("lazy_by_function", {}, "intact: after a timed call a TorchFunctionMode (_Function) was entered and not left"),
        slow("leaves_a_profile_function", {}, "intact: after a timed call sys.setprofile was used"),
        slow("leaves_a_trace_function", {}, "intact: after a timed call sys.settrace was used"),
        slow("leaves_a_signal_handler", {}, "intact: after a timed call the handler of SIGALRM was replaced"),
        slow("leaves_a_callback_of_collections", {}, "intact: after a timed call gc.callbacks was changed"),
        ("replaces_the_clock_of_wall", {}, "defaults of Wall.__init__ were replaced"),
        slow("replaces_a_maximum", {}, "World.max_over_ranks was replaced"),
        slow("replaces_code", {}, "code of Traffic.add was replaced"),
        slow("replaces_finfo", {}, "intact: after a timed call torch.finfo was replaced"),
        ("slow_clock", {}, "intact: after a timed call time.perf_counter_ns was replaced"),
        slow("with_an_attribute", {}, "the first call returned a tensor with extra attributes (lse)"),
    ],
)
def test_a_wrong_output_gets_no_time(outcome, name, workload, why):
    found = outcome(name, **workload)
    assert isinstance(found, Failed), found.verification
    assert why in found.why
    assert (found.stage, found.code) in {("verify", "wrong_output"), ("build", "exception")}


@pytest.mark.parametrize(
    ("name", "workload", "why"),
    [
        ("returns_a_tuple", {}, "the first call returned a tuple of 2, not one tensor: return out only"),
        ("returns_none", {}, "the first call returned None, not one tensor: is a `return` missing?"),
        ("forgets_to_return", {}, "build returned None, not a function: is a `return` missing in build?"),
        ("gives_no_gradient", {"mode": "both"}, "out carries no gradient, but the workload's mode needs one"),
        ("raises_what_cannot_be_printed", {}, "Unprintable: (its text cannot be printed: its __str__ raised"),
    ],
)
def test_what_authors_forget_is_said_at_the_first_call(outcome, name, workload, why):
    found = outcome(name, **workload)
    assert isinstance(found, Failed)
    assert (found.stage, found.code) == ("build", "exception")
    assert found.why.startswith(why)


@pytest.mark.parametrize(
    "name", ["no_grad_mode", "double_by_default", slow("tf32"), slow("one_thread"), slow("deterministic")]
)
def test_settings_are_put_back_and_the_one_who_changed_them_is_named(outcome, name):
    found = outcome(name, beside=("honest",), mode="both")
    for one in (name, "honest"):
        assert isinstance(found[one], Measured), found[one].why
    codes = {one: {note.code for note in found[one].notes} for one in found}
    assert "changed_settings" in codes[name]
    assert "changed_settings" not in codes["honest"]
    assert torch.get_default_dtype() is torch.float32


def test_an_honest_one_has_calls_of_the_timed_sequence_checked(outcome):
    found = outcome("honest")
    assert isinstance(found, Measured)
    assert found.verification.timed_calls >= 1


@pytest.mark.parametrize("mode", ["forward", slow("both"), slow("backward")])
def test_a_call_cannot_tell_whether_it_is_kept(outcome, mode):
    found = outcome("stops_when_not_kept", timing="warmup", mode=mode)
    assert isinstance(found, Measured), found.why


def test_parameters_are_asked_for_once(outcome):
    """Those that a module hides from a timer still get gradients in timed calls."""
    found = outcome("HidesParametersWhenTimed", takes="embeddings", mode="both")
    assert isinstance(found, Measured), found.why


@pytest.mark.slow
def test_a_verification_that_hangs_has_its_own_code(outcome):
    found = outcome("hangs_when_verified", timeout_s=3.0)
    assert isinstance(found, Failed)
    assert (found.stage, found.code) == ("verify", "verification_timeout")
    assert "it is unknown whether the output is right" in found.why


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Averages", "called its attribute 'attention' never"),
        slow("Inlines", "called its attribute 'attention' never"),
        ("ScalesTwice", "q is 0.204124 times a projection of the input: 'attention' already scales"),
        ("SwapsKeysAndValues", "k is 1.5 times a projection"),
        ("AddsAMean", "with 'attention' replaced by a constant, position "),
        slow("IgnoresItsCore", "with 'attention' replaced by a constant, position "),
        ("CallsTwice", "called its attribute 'attention' 2 times"),
        ("ShiftsKeys", "of k depends on position "),
        ("HonestForConstants", "'attention' replaced by a constant, position "),
        ("CallsNoOracle", "in torch.float64, one call of the module called its attribute 'attention' never"),
    ],
)
def test_a_module_is_projections_around_its_attention(outcome, name, why):
    found = outcome(name, takes="embeddings")
    assert isinstance(found, Failed), found.verification
    assert (found.stage, found.code) == ("verify", "wrong_output")
    assert found.why.startswith("core: ")
    assert why in found.why


@pytest.mark.parametrize(
    ("name", "mode", "check"),
    [
        ("GoesStale", "forward", "timed_out"),
        slow("WithoutGradientsWhenTimed", "both", "timed_gradients"),
        slow("WithoutParameterGradientsWhenTimed", "both", "timed_gradients"),
        slow("WithoutGradientsInSomeCalls", "both", "timed_gradients"),
    ],
)
def test_a_module_that_is_wrong_once_it_is_timed_gets_no_time(outcome, name, mode, check):
    found = outcome(name, takes="embeddings", mode=mode, timing="warmup")
    assert isinstance(found, Failed), found.verification
    assert f"{TIMED}: {check}" in found.why


@pytest.mark.parametrize("mode", ["forward", "both"])
def test_a_right_module_has_a_time(outcome, mode):
    found = outcome("Module", takes="embeddings", mode=mode)
    assert isinstance(found, Measured), found.why
    assert found.verification.timed_calls > 1


@pytest.mark.parametrize("name", ["memo_of_values", slow("row_by_row")])
def test_a_time_of_work_that_was_done_before_is_not_quoted(outcome, name):
    found = outcome(name, timing="warmup", seq_len=512, causal=False)
    assert isinstance(found, Measured), found.why
    # Which of the two says so depends on how much of a call's work was kept.
    assert {note.code for note in found.notes} & {"work_kept", "above_peak_flops"}
    (row,) = outcome.record.rows
    assert not is_quotable(row)
    assert exit_code(outcome.record) is ExitCode.WRONG_OUTPUT


@pytest.mark.slow
def test_a_memo_of_all_inputs_gains_nothing_in_batches_of_calls(outcome):
    found = outcome("memo_of_all_values", timing="warmup", seq_len=64)
    assert isinstance(found, Measured), found.why
    assert {"work_kept", "batched"} <= {note.code for note in found.notes}
    (row,) = outcome.record.rows
    assert not is_quotable(row)
    assert exit_code(outcome.record) is ExitCode.WRONG_OUTPUT


def test_each_of_single_samples_has_new_inputs(outcome):
    """With a given number of samples, each slot has one: all are taken on new inputs, so that no memo gains."""
    found = outcome("honest", timing="warmup", timing_runs=7)
    assert isinstance(found, Measured), found.why
    assert [slot.renewed for slot in found.timings[0].slots] == [(0,)] * 7


@pytest.mark.parametrize(
    ("timer", "why"),
    [
        ("NeverCalls", "gave 20 samples of 0 calls"),
        ("CallsOnce", "gave 20 samples of 1 calls"),
        ("AsksAndNeverCalls", " samples of "),
        ("Exaggerates", "by the runner's clock"),
    ],
)
def test_a_timer_must_time_its_calls(outcome, catalogue, timer, why):
    catalogue.timers.add(Timer(timer, "", f"adversaries:{timer}", proves="nothing"), "builtin")
    found = outcome("honest", timing=timer, timing_runs=None)
    assert isinstance(found, Failed)
    assert (found.stage, found.code) == ("time", "exception")
    assert why in found.why


def test_a_time_that_the_device_cannot_reach_fails_the_run(outcome, catalogue):
    catalogue.timers.add(Timer("Belittles", "", "adversaries:Belittles", proves="nothing"), "builtin")
    found = outcome("honest", timing="Belittles")
    assert isinstance(found, Measured), found.why
    assert matmul_key("float32") in outcome.record.ceilings
    assert exit_code(outcome.record) is ExitCode.WRONG_OUTPUT


@pytest.mark.parametrize("name", ["scratch_of_numpy", "scratch_of_build", slow("scratch_of_build_in_numpy")])
def test_memory_that_a_call_needs_is_in_its_peak(outcome, name):
    found = outcome(name, beside=("honest",))
    hidden, plain = found[name].memory, found["honest"].memory
    assert plain.peak_bytes < 2**23
    assert hidden.peak_bytes > plain.peak_bytes + 0.9 * 2**26


@pytest.mark.parametrize(("factor", "number", "kept"), [(3.0, 12, True), (1.3, 100, False), (3.0, 5, False)])
def test_samples_on_new_inputs_are_compared_with_their_neighbours(factor, number, kept):
    samples = (900, 100, int(100 * factor), 110, 100)
    for new in ({"renewed": (2,)}, {"changed": (2,)}):
        timing = Timing(timer="wall", proves="", slots=(Slot(samples_ns=samples, **new),) * number)
        assert bool(list(_work_kept(timing))) is kept
    # A neighbour that had a row changed is none that repeats its inputs.
    timing = Timing(timer="wall", proves="", slots=(Slot(samples_ns=samples, changed=(2, 3)),) * number)
    assert not list(_work_kept(timing))

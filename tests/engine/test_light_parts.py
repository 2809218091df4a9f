"""Warm-up, budget, claims, re-check, suspicion, clocks, keys: everything that needs no process and no real clock."""

import itertools

import pytest

from dilabench.engine.budget import Budget, steady
from dilabench.engine.case_spec import case_spec, worker_key
from dilabench.engine.device.clocks import NvmlClocks, throttle_reasons
from dilabench.engine.plausibility import interference, suspicions, typical_seconds, unproven_backend
from dilabench.engine.worker.process import describe_exit
from dilabench.engine.worker.warmup import WarmUpLimits, warm_up
from dilabench.metadata import COPY_KEY, LAUNCH_BOUND, OWN_TILES, matmul_key
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Backend, Implementation
from dilabench.record import Case, Check, KernelUse, Measured, PlannedCase, Row, Slot, Timing, Verification
from dilabench.workload.lower_bounds import least_flops
from dilabench.workload.spec import Workload, WorkloadRequest, flops

LIMITS = WarmUpLimits(min_s=0.0, max_s=5.0)


class Machine:
    """A clock that advances by what the samples take."""

    def __init__(self, times_ns):
        self.times_ns, self.now_ns = iter(times_ns), 0

    def take(self, count):
        taken = list(itertools.islice(self.times_ns, count))
        self.now_ns += sum(taken)
        return taken

    def clock(self):
        return self.now_ns * 1e-9


def test_warm_up_goes_on_while_times_fall_and_stops_when_they_settle():
    falling = [int(20e6 * 0.97**i) for i in range(60)]
    machine = Machine([*falling, *[3_000_000] * 10_000])
    result = warm_up(machine.take, 10_000_000, LIMITS, machine.clock)
    assert result.settled
    assert result.samples_ns[: len(falling)] == tuple(falling)
    assert result.samples_ns[-1] == 3_000_000


def test_warm_up_that_never_settles_ends_with_its_limit():
    machine = Machine(int(1e7 * 1.02**i) for i in range(10**6))
    result = warm_up(machine.take, 10_000_000, LIMITS, machine.clock)
    assert not result.settled
    assert machine.clock() <= 5.0


def test_warm_up_lasts_at_least_its_minimum():
    machine = Machine(itertools.repeat(1_000_000))
    warm_up(machine.take, 1_000_000, WarmUpLimits(min_s=0.3, max_s=5.0), machine.clock)
    assert machine.clock() >= 0.3


def test_calls_longer_than_the_limit_are_not_warmed_up_again():
    machine = Machine(itertools.repeat(4 * 10**9))
    assert warm_up(machine.take, 4 * 10**9, LIMITS, machine.clock).samples_ns == ()


def test_warm_up_ends_although_the_clock_runs_backwards():
    ticks = itertools.count(10**9, -1)
    machine = Machine([*[1_000_000] * 2000])
    assert warm_up(machine.take, 1_000_000, LIMITS, lambda: next(ticks)).settled


def case(seq_len, implementation="gather", **fields):
    request = WorkloadRequest(seq_len=seq_len, batch_size=1, **fields)
    return Case(implementation=implementation, workload=request.resolve("float32"))


def test_the_budget_is_shared_half_equally_and_half_by_work():
    now = [0.0]
    cases = [case(1024), case(8192)]
    budget = Budget(100.0, cases, lambda: now[0])
    work = [flops(one.workload) for one in cases]
    assert budget.share_s(cases[:1]) == pytest.approx(50 * 0.5 + 50 * work[0] / sum(work))
    assert budget.share_s(cases) == pytest.approx(100.0)
    now[0] = 10.0
    budget.done(cases[0])
    assert budget.share_s(cases[1:]) == pytest.approx(90.0)
    now[0] = 101.0
    assert budget.exhausted
    assert budget.share_s(cases[1:]) == 0


def test_no_budget_is_without_end():
    budget = Budget(None, [case(1024)], lambda: 0.0)
    assert budget.share_s([case(1024)]) == float("inf")
    assert not budget.exhausted


def test_a_steady_clock_never_runs_backwards():
    times = iter([5.0, 3.0, 4.0, 6.0])
    clock = steady(lambda: next(times))
    assert [clock() for _ in range(4)] == [5.0, 5.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("patterns", "names", "proven"),
    [
        ((), ["anything"], True),
        (("flash_fwd",), ["void pytorch_flash::flash_fwd_kernel<...>"], True),
        (("flash_fwd", "fmha"), ["fmha_cutlassF"], True),
        (("flash_fwd",), ["gemm", "softmax"], False),
        (("flash_fwd",), [], False),
    ],
)
def test_a_claim_is_proven_by_any_matching_kernel(patterns, names, proven):
    uses = [KernelUse(name=name, count=1, duration_ns=1) for name in names]
    why = unproven_backend(Backend("flashy", "", "m:a", kernels=patterns), uses)
    assert (why is None) == proven


@pytest.mark.parametrize(("name", "proven"), [("_block_forward_kernel", True), ("flash_fwd", False)])
def test_what_computes_in_place_of_a_backend_has_to_show_itself(name, proven):
    backend, uses = Backend("flashy", "", "m:a", kernels=("flash_fwd",)), [KernelUse(name=name, count=1, duration_ns=1)]
    assert (unproven_backend(backend, uses, [OWN_TILES.note("because")]) is None) == proven
    assert (unproven_backend(backend, uses, [LAUNCH_BOUND.note("because")]) is None) != proven


@pytest.mark.parametrize(
    ("together", "alone", "noted"),
    [
        ([100.0] * 6, [102] * 3, False),
        ([100.0] * 6, [104] * 3, True),
        ([100.0] * 6, [96] * 3, True),
        ([90.0, 110.0] * 3, [104] * 3, False),
    ],
)
def test_interference_is_a_change_beyond_3_percent_and_the_spread(together, alone, noted):
    slots = [Slot(samples_ns=(time,) * 5) for time in alone]
    assert (interference(together, slots) is not None) == noted


def measured(one, seconds):
    timing = Timing(timer="wall", proves="p", slots=(Slot(samples_ns=(round(seconds * 1e9),) * 5),))
    verification = Verification(checks=(Check(name="out", passed=True),))
    return Row(planned=PlannedCase(case=one), outcome=Measured(verification=verification, timings=(timing,)))


def codes(row, peak=1e12, device="cuda"):
    ceilings = {matmul_key("float32"): peak, COPY_KEY: 1e13}
    return [note.code for note in suspicions(row, ceilings, device)]


def test_above_peak_is_flagged_and_below_is_not():
    one = case(4096, pattern="dense")
    at_peak = flops(one.workload) / 1e12
    assert codes(measured(one, at_peak / 1.3)) == ["above_peak_flops"]
    assert codes(measured(one, at_peak)) == []
    assert codes(measured(one, at_peak / 1.3), device="cpu") == []


@pytest.mark.parametrize(
    ("ranks_ms", "noted"),
    [
        ((39, 39, 81, 39), "rank 2 takes 81.00 ms, the others 39.00 ms"),
        ((80, 39), "rank 0 takes 80.00 ms, the others 39.00 ms"),
        ((39, 39, 77, 39), None),
        ((81, 81, 39, 81), None),
        ((40,), None),
        ((), None),
    ],
)
def test_a_rank_that_takes_twice_as_long_as_the_others_is_a_note(ranks_ms, noted):
    samples = tuple((round(ms * 1e6),) * 3 for ms in ranks_ms)
    slots = tuple(Slot(round=at, samples_ns=(90_000_000,) * 3, rank_samples_ns=samples) for at in range(4))
    row = measured(case(4096, pattern="dense"), 0.09)
    timing = row.outcome.timings[0].model_copy(update={"slots": slots})
    row = row.model_copy(update={"outcome": row.outcome.model_copy(update={"timings": (timing,)})})
    notes = suspicions(row, {}, "cuda")
    assert [note.message for note in notes] == ([noted] if noted else [])
    assert all(note.code == "slow_rank" for note in notes)


def test_float32_is_bounded_by_what_tensor_cores_could_make_of_it():
    """Three products in half precision reach its bits: who takes it apart is faster than a product in float32."""
    one = case(4096, pattern="dense")
    row = measured(one, flops(one.workload) / 3e12)
    ceilings = {matmul_key("float32"): 1e12, COPY_KEY: 1e13}
    assert [note.code for note in suspicions(row, ceilings, "cuda")] == ["above_peak_flops"]
    assert suspicions(row, ceilings | {matmul_key("bfloat16"): 9e12}, "cuda") == ()
    assert len(suspicions(row, ceilings | {matmul_key("bfloat16"): 6e12}, "cuda")) == 1
    half = measured(
        one.model_copy(update={"workload": one.workload.replace(dtype="bfloat16")}), typical_seconds(row.outcome)
    )
    assert len(suspicions(half, {matmul_key("bfloat16"): 2e12, COPY_KEY: 1e13}, "cuda")) == 1


def test_ranks_have_a_gpu_each_and_share_one_processor():
    one = case(4096, pattern="dense").model_copy(update={"world_size": 4})
    at_peak = flops(one.workload) / 1e12
    assert codes(measured(one, at_peak / 3)) == []
    assert codes(measured(one, at_peak / 5)) == ["above_peak_flops"]
    assert codes(measured(one, at_peak / 3), device="cpu") == ["above_peak_flops"]


def test_saved_work_is_not_suspicious():
    """Who computes a key that all branches give only once has FLOP/s by the formula above the peak."""
    one = case(4096, segment_lengths=(4096, 4096, 4096), dilation_rates=(1, 1, 1))
    seconds = flops(one.workload) / 3 / 1e12
    assert least_flops(one.workload) == pytest.approx(flops(one.workload) / 3)
    assert codes(measured(one, seconds)) == []


def test_bytes_beyond_the_copy_ceiling_are_flagged_on_a_gpu():
    one = case(1024, segment_lengths=(16,), dilation_rates=(16,))
    assert codes(measured(one, 1e-9), peak=1e30) == ["above_peak_bandwidth"]


def test_a_longer_call_may_be_busier_than_a_shorter_one_but_not_busier_than_the_device():
    """Dense attention of 16K tokens was seen to take 169 times as long as of 1K, for 256 times the work."""
    short, long = case(1024, pattern="dense"), case(16384, pattern="dense")
    short_s = flops(short.workload) / 0.6e12
    for device in ("cpu", "cuda"):
        assert codes(measured(long, 169 * short_s), device=device) == []
        # Half of the work is left out, then all of it but the first 1K.
        assert codes(measured(long, flops(long.workload) / 0.8e12 / 2), device=device) == ["above_peak_flops"]
        assert codes(measured(long, short_s), device=device) == ["above_peak_flops"]


def test_throttle_bits_have_names_and_idle_is_none():
    assert throttle_reasons(0x1 | 0x2) == ()
    assert throttle_reasons(0x4 | 0x40) == ("sw_power_cap", "hw_thermal")


class Nvml:
    """A driver that answers some questions only."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle):
        raise self.NVMLError

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 41

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x20


def test_clocks_of_an_older_driver_are_read_as_far_as_it_tells():
    reading = NvmlClocks(Nvml(), "GPU-x").read()
    assert (reading.sm_clock_mhz, reading.power_mw, reading.temperature_c) == (1980, None, 41)
    assert reading.throttle == ("sw_thermal",)


@pytest.mark.parametrize(
    ("code", "text"),
    [(-11, "SIGSEGV (segmentation fault)"), (-9, "kill -9"), (3, "exit code 3"), (-99, "signal 99"), (None, "pipe")],
)
def test_exit_codes_in_words(code, text):
    assert text in describe_exit(code)


@pytest.fixture
def catalogue():
    shelves = Catalogue()
    shelves.implementations.add(Implementation("ours", "", "m:b", uses_backend=True), "builtin")
    shelves.implementations.add(Implementation("theirs", "", "m:b", uses_backend=True), "their_plugin")
    shelves.backends.add(Backend("sdpa", "", "m:a", requires=("cuda>=sm80|cpu",)), "builtin")
    shelves.backends.add(Backend("library", "", "m:a", "m:b", requires=("cuda", "library>=2"), library=True), "builtin")
    shelves.backends.add(Backend("foreign", "", "m:a"), "other_plugin")
    return shelves


@pytest.mark.parametrize(
    ("implementation", "backend", "key"),
    [
        ("ours", None, "builtin"),
        ("ours", "sdpa", "builtin"),
        ("ours", "library", "builtin+library"),
        ("ours", "foreign", "builtin+other_plugin"),
        ("theirs", "sdpa", "their_plugin+builtin"),
        ("theirs", None, "their_plugin"),
    ],
)
def test_processes_are_split_by_plug_in_and_by_foreign_library(catalogue, implementation, backend, key):
    one = Case(implementation=implementation, backend=backend, workload=case(64).workload)
    assert worker_key(one, catalogue) == key


def test_cases_of_a_cell_share_their_inputs_and_seeds_change_them(catalogue):
    workload = case(64).workload
    ours = Case(implementation="ours", backend="library", workload=workload)
    theirs = Case(implementation="theirs", backend="sdpa", workload=workload)
    assert case_spec(ours, catalogue, 0).seed == case_spec(theirs, catalogue, 0).seed
    assert case_spec(ours, catalogue, 0).seed != case_spec(ours, catalogue, 1).seed
    assert case_spec(ours, catalogue, 0).backend.backward_target == "m:b"


def test_specs_survive_the_pipe(catalogue):
    spec = case_spec(Case(implementation="ours", backend="sdpa", workload=case(64).workload), catalogue, 3)
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec


def test_grouped_heads_count_what_they_compute():
    fields = {"segment_lengths": (64, 128), "dilation_rates": (1, 2), "heads": "grouped"}
    workload = case(128, **fields).workload
    assert isinstance(workload, Workload)
    assert least_flops(workload) == flops(workload)

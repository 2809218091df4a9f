"""Timers under a clock of our own."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.method import choose_method
from dilabench.engine.timers import ClockError, TimerUnusableError, cuda_events, graph
from dilabench.engine.timers.cold import launch_notes
from dilabench.engine.timers.cuda_events import Spacer
from dilabench.engine.timers.first_call import FirstCall
from dilabench.engine.timers.wall import Wall, resolution_ns
from dilabench.errors import ConfigError


class FakeCall:
    """A call that advances the clock by `call_ns`."""

    def __init__(self, call_ns, mode="forward"):
        self.call_ns, self.now, self.calls, self.set_ups = call_ns, 0, 0, 0
        self.device = torch.device("cpu")
        self.workload = SimpleNamespace(mode=mode)

    def rotate(self, batch=1):
        return batch

    def fresh(self):
        self.set_ups += 1
        # Set-up takes long, and must not show.
        self.now += 10**9

        def call():
            self.calls += 1
            self.now += self.call_ns

        return call

    def clock(self):
        self.now += 25
        return self.now


def test_wall_takes_the_time_of_the_call_alone():
    call = FakeCall(2_000_000)
    assert Wall(call, call.clock).take(3).samples_ns == (2_000_025,) * 3
    assert call.calls == call.set_ups == 3


def test_calls_near_the_clocks_resolution_are_timed_in_batches():
    call = FakeCall(1_000)
    wall = Wall(call, call.clock)
    samples = wall.take(4).samples_ns
    # 25 ns resolution x 1000 = 25 µs per sample = 25 calls.
    assert call.calls == 100
    assert samples == (1_001,) * 4
    assert [note.code for note in wall.notes()] == ["batched"]


def test_backward_alone_is_never_batched():
    call = FakeCall(1_000, mode="backward")
    Wall(call, call.clock).take(4)
    assert call.calls == 4


def test_a_sample_over_which_the_clock_ran_backwards_is_taken_again():
    call = FakeCall(2_000_000)
    wall = Wall(call, call.clock)
    jumps = iter([0, -(10**12), 0, 0])
    wall._clock = lambda: call.clock() + next(jumps, 0)
    assert wall.take(1).samples_ns == (2_000_025,)
    assert [note.code for note in wall.notes()] == ["clock"]


def test_a_clock_that_always_runs_backwards_is_an_error():
    call = FakeCall(2_000_000)
    ticks = itertools.count(10**12, -(10**7))
    wall = Wall(call, call.clock)
    wall._clock = lambda: next(ticks)
    with pytest.raises(ClockError, match="did not advance"):
        wall.take(1)


def test_resolution_is_the_smallest_step_seen():
    steps = iter([0, 0, 0, 50, 100, 130])
    now = 0

    def clock():
        nonlocal now
        now = next(steps, now + 50)
        return now

    assert resolution_ns(clock, tries=3) == 30
    assert resolution_ns(lambda: 7) == 1


@pytest.mark.parametrize(
    ("gpu", "enqueue", "codes"),
    [
        ([100_000] * 5, [20_000] * 5, []),
        ([20_000] * 5, [100_000] * 5, ["launch_bound"]),
        ([20_000] * 5, [6_000_000] * 5, ["launch_bound", "launch_exposed"]),
        # The first launch carries one-time work of the driver.
        ([100_000] * 5, [9_000_000] + [20_000] * 4, []),
    ],
)
def test_launches_are_judged_by_their_medians(gpu, enqueue, codes):
    assert [note.code for note in launch_notes(gpu, enqueue, 5_000_000)] == codes


@pytest.mark.parametrize(
    ("enqueue_ms", "hidden_ms"),
    [
        # Twice what the host takes; the first call of all may take longer.
        (lambda *_: 0.1, 0.2),
        (lambda *_: 12.0, 24.0),
        (lambda *_: 40.0, 50.0),
        (lambda _, at: 3.0 if at else 90.0, 6.0),
        (lambda _, at: 90.0 if at == 5 else 12.0, 24.0),
        # Long launches, with a spacer or without.
        (lambda _, at: 54.0 + at % 2, 108.0),
        (lambda *_: 150.0, 200.0),
        (lambda *_: 300.0, 5.0),
        # Who waits for the device inside waits for the spacer, too.
        (lambda spacer_ms, _: spacer_ms + 0.3, 5.0),
        (lambda spacer_ms, _: spacer_ms + 10.0, 5.0),
    ],
)
def test_a_spacer_hides_launches_unless_the_call_waits_for_it(enqueue_ms, hidden_ms):
    spacer = Spacer()
    for at in range(10):
        spacer.adapt(int(enqueue_ms(spacer.ns * 1e-6, at) * 1e6))
    assert spacer.ns == pytest.approx(hidden_ms * 1e6)


@pytest.mark.parametrize("enqueue_ns", [30_000, 3_000_000])
def test_calls_share_their_spins_and_each_begins_behind_twice_its_launches(enqueue_ns):
    spacer, host_ns, spins = Spacer(), 10**9, []
    gpu_ns = host_ns
    for _ in range(100):
        spins.append(spacer.queued(host_ns))
        gpu_ns = max(gpu_ns, host_ns) + spins[-1]
        ahead_ns = gpu_ns - host_ns
        host_ns += enqueue_ns
        if len(spins) > 1:
            assert ahead_ns >= 2 * enqueue_ns
        spacer.adapt(enqueue_ns)
    assert sum(spins[2:]) <= 1.05 * enqueue_ns * len(spins[2:])


def test_after_a_pause_of_the_host_a_call_gets_its_whole_spin():
    spacer = Spacer()
    spacer.adapt(2_000_000)
    assert [spacer.queued(now_ns) for now_ns in (0, 0, 1_000_000, 90_000_000)] == [
        4_000_000,
        20_000,
        980_000,
        4_000_000,
    ]


class FakeGpu:
    """Writes down what is queued on it."""

    def __init__(self, monkeypatch):
        self.queued = []
        for name, fake in {"_sleep": self.adding("spin"), "synchronize": lambda _: None, "Event": self.event}.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(cuda_events, "_spin_rate", lambda _: 1.0)

    def adding(self, what):
        return lambda *_: self.queued.append(what)

    def event(self, **_options):
        return SimpleNamespace(record=self.adding("event"), elapsed_time=lambda _: 1.0)


def test_ranks_wait_for_each_other_between_the_spin_and_the_call(monkeypatch):
    """Each spins as long as its own launches take: one that spins less would measure how long the others spin."""
    gpu = FakeGpu(monkeypatch)
    call = SimpleNamespace(device=torch.device("cpu"), working_set_bytes=1, device_barrier=gpu.adding("barrier"))
    cuda_events.ColdStage(call).run(lambda: gpu.adding("call"), 2)
    assert gpu.queued == ["spin", "barrier", "event", "call", "event"] * 2


def test_methods_name_their_timers(catalogue):
    assert choose_method("warmup", "cpu", catalogue).timer.name == "wall"
    assert choose_method("warmup", "cuda", catalogue).timer.name == "cold"
    assert choose_method("warmup", "cuda", catalogue).graph_timer.name == "graph"
    assert choose_method("hot", "cuda", catalogue).graph_timer is None
    assert choose_method("profiler", "cpu", catalogue).trace
    assert choose_method("simple", "cpu", catalogue).max_rounds == 1
    usual, shorter = (choose_method("warmup", "cpu", catalogue, sampling_s=one) for one in (None, 0.5))
    assert shorter.sampling_s == 0.5
    assert shorter.warm_up.max_s == 0.05 < usual.warm_up.max_s
    assert usual.max_rounds > shorter.max_rounds > shorter.usual_rounds == usual.usual_rounds > usual.min_rounds
    on_gpu = [choose_method("warmup", "cuda", catalogue, sampling_s=one).warm_up for one in (None, 1.0, 0.3)]
    assert [one.min_s for one in on_gpu] == [0.3, 0.3, pytest.approx(0.1)]
    assert choose_method("warmup", "cuda", catalogue, far_slower=3.0).graph_timer is None
    assert choose_method("warmup", "cpu", catalogue, sampling_s=60.0) == usual, "never more than its own"
    with pytest.raises(ConfigError):
        choose_method("hot", "cpu", catalogue)


def test_first_call_is_import_build_and_call_in_a_new_process(dense_case):
    spec = CaseSpec(case=dense_case("imports_slowly").case, target="slow_to_import:build")
    timer = FirstCall(SimpleNamespace(spec=spec, device=torch.device("cpu")))
    (sample,) = timer.take(1).samples_ns
    # The module sleeps 50 ms when it is imported, 30 ms in build, 20 ms in its first call and never again.
    assert sample >= 100_000_000
    assert all(part in timer.notes()[0].message for part in ("import", "build", "first_call"))


@pytest.mark.slow
def test_profiling_writes_a_trace_per_case(engine, tmp_path):
    record = engine("honest", timing="profiler", trace_folder=tmp_path, budget_s=3.0)
    assert record.rows[0].outcome.kernels
    assert (tmp_path / f"{record.rows[0].case.case_id}.trace.json").stat().st_size > 100


class FakeStream:
    """A CUDA stream by its name."""

    def __init__(self, name="capture"):
        self.name, self.device = name, torch.device("cuda", 0)

    def wait_stream(self, other):
        pass


class FakeGenerator:
    """Random numbers of a device: a capture takes the state for its own, and one that fails keeps it."""

    def __init__(self, state="before"):
        self.state = state

    def clone_state(self):
        return FakeGenerator(self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state


class FakeStreamContext:
    """`torch.cuda.stream`: only its end gives the stream back."""

    def __init__(self, streams, stream):
        self.streams, self.stream = streams, stream

    def __enter__(self):
        self.before, self.streams.current = self.streams.current, self.stream

    def __exit__(self, *_error):
        self.streams.current = self.before


class FakeStreams:
    """`torch.cuda`'s streams as far as a capture needs them; `torch.cuda.graph` itself is torch's own."""

    def __init__(self, monkeypatch, begin=None, end=None):
        self.current, self.numbers = FakeStream("own"), FakeGenerator()
        fakes = {
            "Stream": FakeStream,
            "current_stream": lambda device=None: self.current,
            "set_stream": self.switch,
            "stream": self.entered,
            "default_generators": (self.numbers,),
            "CUDAGraph": lambda: SimpleNamespace(capture_begin=self.begins(begin), capture_end=self.raising(end)),
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
        monkeypatch.setattr(graph, "ColdStage", lambda call: None)

    def switch(self, stream):
        self.current = stream

    def entered(self, stream):
        return FakeStreamContext(self, stream)

    def begins(self, error):
        def call(*_args, **_options):
            self.numbers.state = "captured"
            self.raising(error)()

        return call

    @staticmethod
    def raising(error):
        def call(*_args, **_options):
            if error is not None:
                raise error

        return call


class Captured:
    """A call that fails at its n-th time."""

    device = torch.device("cpu")
    working_set_bytes = 1

    def __init__(self, fails_at=None, error=None):
        self.calls, self.fails_at, self.error = 0, fails_at, error

    def fresh(self):
        def call():
            self.calls += 1
            if self.calls == self.fails_at:
                raise self.error

        return call

    def capturable(self):
        return self.fresh(), None


WAITS = RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.mark.parametrize(
    ("streams", "call", "why"),
    [
        ({"begin": WAITS}, Captured(), "operation not permitted when stream is capturing"),
        ({"end": WAITS}, Captured(), "operation not permitted when stream is capturing"),
        ({"end": WAITS}, Captured(4, WAITS), "operation not permitted when stream is capturing"),
        ({}, Captured(4, RuntimeError("")), "RuntimeError"),
        ({}, Captured(2, RuntimeError("fails while warm")), "fails while warm"),
    ],
    ids=["begin", "end", "call and end", "no message", "warm-up"],
)
def test_a_capture_that_fails_gives_the_stream_back(streams, call, why, monkeypatch):
    fake = FakeStreams(monkeypatch, **streams)
    own = fake.current
    with pytest.raises(TimerUnusableError, match=f"the call cannot be captured: {why}$"):
        graph.Graph(call)
    assert fake.current is own
    assert fake.numbers.state == "before"


def test_an_error_of_another_kind_gives_the_stream_back_too(monkeypatch):
    fake = FakeStreams(monkeypatch, end=WAITS)
    own = fake.current
    # What the call raises is behind what ending the capture raises.
    with pytest.raises(TimerUnusableError):
        graph.Graph(Captured(4, ValueError("wrong")))
    assert fake.current is own
    fake = FakeStreams(monkeypatch)
    with pytest.raises(ValueError, match="wrong"):
        graph.Graph(Captured(4, ValueError("wrong")))
    assert fake.current.name == "own"


def test_a_capture_that_works_gives_the_stream_back(monkeypatch):
    fake = FakeStreams(monkeypatch)
    own = fake.current
    call = Captured()
    graph.Graph(call)
    assert call.calls == graph.WARM_CALLS + 1
    assert fake.current is own


def test_runs_are_counted_where_numbers_are_given(engine):
    record = engine("honest", timing="warmup", warmup_runs=4, timing_runs=7)
    (timing,) = record.rows[0].outcome.timings
    assert (len(timing.warmup_ns), len(timing.samples_ns)) == (4, 7)
    assert [len(slot.samples_ns) for slot in timing.slots] == [1] * 7

"""The method of `--timing` on a device: timer, duration, precision. No torch."""

from dilabench.engine.call.specs import TimerSpec
from dilabench.engine.worker.warmup import WarmUpLimits
from dilabench.errors import ConfigError, unknown_name
from dilabench.machine import device_named
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Timer
from dilabench.request import RunRequest
from dilabench.validation import Model

METHODS = ("simple", "warmup", "profiler")
# The fewest interleaved timings of the parts of a call over ranks.
MIN_TURNS = 3
# With a given number of samples, only the budget ends sampling earlier.
UNLIMITED_S = 1e9
# For a suite with less sampling: verification has already called each case, so a tenth of the sampling time suffices
# for the warm-up, or a third at most on devices that need more. 1.5 times the usual rounds (measurement.md 5.1) are
# enough.
SHORT_WARM_UP, MOST_WARM_UP, SHORT_ROUNDS = 0.1, 1 / 3, 1.5


class Method(Model):
    """How a case is timed.

    `sampling_s`: longest time in the rounds per case when no budget is set or the budget allows more. `precision`:
    relative half width of the median's interval to stop at, after `min_rounds`: ten are the fewest of which an interval
    of 95 % can leave out the extremes. `usual_rounds`: of slots that are sized so that the time does for them.
    `max_turns`: largest number of rounds for the parts of a
    call over ranks; 0: none. `far_slower`: a case is skipped if one call takes this many times as long as that of a
    verified case.
    """

    timer: TimerSpec
    graph_timer: TimerSpec | None = None
    warm_up: WarmUpLimits
    precision: float
    min_samples: int = 5
    min_rounds: int = 10
    usual_rounds: int = 20
    max_rounds: int = 100
    slot_ns: int = 10_000_000
    max_slot_samples: int = 20
    sampling_s: float = 2.0
    far_slower: float | None = None
    max_turns: int = 20
    recheck: bool = True
    trace: bool = False


def default_timer(device: str, catalogue: Catalogue) -> Timer:
    """The timer of this kind of device. Raises ConfigError when no timer says that it is."""
    for timer in catalogue.timers:
        if device_named(device).word in timer.default_on:
            return timer
    raise ConfigError(f"no timer is the default on {device}; name one with --timing")


def choose_method(
    timing: str,
    device: str,
    catalogue: Catalogue,
    *,
    warmup_runs: int | None = None,
    timing_runs: int | None = None,
    sampling_s: float | None = None,
    far_slower: float | None = None,
) -> Method:
    """The method of a `--timing` value: simple, warmup, profiler, or a timer by name (timed as by warmup).

    `warmup_runs`: the exact number of calls before the first sample; `timing_runs`: of samples, one a round.
    `sampling_s`: sampling time of a suite that needs less than the device's default; warm-up and rounds shrink, too.
    `far_slower`: as in `Method`.

    Raises ConfigError for an unknown name or a timer that this device does not have.
    """
    default = default_timer(device, catalogue)
    name = default.name if timing in METHODS else timing
    if name not in catalogue.timers:
        raise unknown_name("timing", timing, [*METHODS, *catalogue.timers.names])
    timer = catalogue.timers.get(name)
    if device_named(device).word not in timer.devices:
        raise ConfigError(
            f"timer {name!r} works on {', '.join(sorted(timer.devices))}, not on {device}; use --timing warmup"
        )
    method = _method_of(timing, timer, timer is default, device, catalogue)
    if sampling_s is not None:
        method = _shortened(method, sampling_s)
    if far_slower is not None:
        # One timer is enough to find the fastest.
        method = method.model_copy(update={"far_slower": far_slower, "graph_timer": None})
    if warmup_runs is not None:
        limits = method.warm_up.model_copy(update={"runs": warmup_runs})
        method = method.model_copy(update={"warm_up": limits})
    if timing_runs is not None:
        counted = dict.fromkeys(("min_rounds", "max_rounds"), timing_runs)
        few = min(method.min_samples, timing_runs)
        changes = {**counted, "max_slot_samples": 1, "min_samples": few, "sampling_s": UNLIMITED_S}
        method = method.model_copy(update=changes)
    return method


def method_for(request: RunRequest, device: str, catalogue: Catalogue) -> Method:
    """The method that a request and its suite define. Raises like `choose_method`."""
    suite = catalogue.suites.get(request.suite) if request.suite in catalogue.suites else None
    return choose_method(
        request.timing,
        device,
        catalogue,
        warmup_runs=request.warmup_runs,
        timing_runs=request.timing_runs,
        sampling_s=suite.sampling_s if suite else None,
        far_slower=suite.far_slower if suite else None,
    )


def _shortened(method: Method, sampling_s: float) -> Method:
    """So long a sampling at most, after a shorter warm-up; the method itself where that is no less than its own."""
    if sampling_s >= method.sampling_s:
        return method
    limits = method.warm_up
    least = min(limits.min_s, MOST_WARM_UP * sampling_s)
    longest = max(least, min(limits.max_s, SHORT_WARM_UP * sampling_s))
    rounds = min(method.max_rounds, max(1, round(SHORT_ROUNDS * method.usual_rounds)))
    changes = {
        "sampling_s": sampling_s,
        "warm_up": limits.model_copy(update={"min_s": least, "max_s": longest}),
        "max_rounds": rounds,
    }
    return method.model_copy(update=changes)


def _method_of(timing: str, timer: Timer, is_default: bool, device: str, catalogue: Catalogue) -> Method:
    facts = device_named(device)
    again = next(
        (candidate for candidate in catalogue.timers if candidate.for_launch_bound and facts.word in candidate.devices),
        None,
    )
    shortest_s, longest_s = facts.warm_up_s
    method = Method(
        timer=_spec(timer),
        graph_timer=_spec(again) if again and is_default else None,
        warm_up=WarmUpLimits(min_s=shortest_s, max_s=longest_s),
        precision=facts.precision,
        sampling_s=facts.sampling_s,
        trace=timing == "profiler",
    )
    if timing == "simple":
        short = WarmUpLimits(min_s=0.0, max_s=0.1)
        return method.model_copy(
            update={"warm_up": short, "max_rounds": 1, "min_rounds": 1, "max_turns": MIN_TURNS, "recheck": False}
        )
    if timer.fresh_process:
        never = WarmUpLimits(min_s=0.0, max_s=0.0)
        # It makes its calls from the case's description, so no part can be removed.
        changes = {"warm_up": never, "max_rounds": 5, "max_slot_samples": 1, "max_turns": 0, "recheck": False}
        return method.model_copy(update=changes)
    return method


def _spec(timer: Timer) -> TimerSpec:
    """The fields of a timer's descriptor that a worker needs."""
    return TimerSpec(name=timer.name, target=timer.target, proves=timer.proves, fresh_process=timer.fresh_process)

"""Timers: ways to take time samples of a call. Each states what it proves in its descriptor.

A timer of your own is a class with the constructor and the methods of `SampleTimer`, registered through the hook
`dilabench_register_timers`. It lives inside the worker process, one object per case.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dilabench.choice.descriptors import load_target
from dilabench.engine.call.kept_call import KeptCall
from dilabench.engine.call.specs import CaseSpec
from dilabench.errors import PluginError
from dilabench.plugins.boundary import shown
from dilabench.record import Note, Verification
from dilabench.workload.spec import Workload


class Call(Protocol):
    """The call that a timer times."""

    @property
    def spec(self) -> CaseSpec:
        """The case and where its code is."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the call."""
        ...

    @property
    def workload(self) -> Workload:
        """The workload of the call."""
        ...

    @property
    def call_ns(self) -> int:
        """A first idea of how long a call takes."""
        ...

    def fresh(self) -> Callable[[], object]:
        """Do what belongs before one call and is not timed; returns that call, good for one use."""
        ...

    def device_barrier(self) -> None:
        """Queue a wait of this GPU for the GPUs of all ranks, so that they begin the call together. No effect without
        ranks.
        """
        ...

    def capturable(self) -> tuple[Callable[[], object], KeptCall]:
        """A call to capture in a graph, and the object in which its results stay."""
        ...

    def replayed(self, captured: KeptCall, replay: Callable[[], None]) -> Callable[[], object]:
        """As `fresh`, for a replay of a captured call."""
        ...

    def rotate(self, batch: int = 1) -> int:
        """From now on rotate enough input sets to exceed the GPU's L2 cache, and a set for each of the `batch` calls of
        a sample; return their number.
        """
        ...

    @property
    def is_cold(self) -> bool:
        """Return True if the rotated input sets are at least twice the L2 cache."""
        ...

    @property
    def working_set_bytes(self) -> int:
        """Bytes of one input set."""
        ...


@dataclass(frozen=True, slots=True)
class Samples:
    """Times of consecutive calls, and for GPU timers how long the host took to enqueue each of them.

    verification: the checks of calls that were made in other processes.
    """

    samples_ns: tuple[int, ...]
    enqueue_ns: tuple[int, ...] = ()
    verification: Verification | None = None


class TimerUnusableError(Exception):
    """This timer cannot time this call; the text says why. The case continues with its other timers."""


class ClockError(Exception):
    """The clock did not advance over calls that take time: no sample of it can be trusted."""


class SampleTimer(Protocol):
    """Takes samples of one call. The constructor may prepare (allocate, capture) and raise TimerUnusableError."""

    def __init__(self, call: Call) -> None: ...

    def take(self, count: int) -> Samples:
        """`count` consecutive samples in nanoseconds, each at least 1."""
        ...

    def notes(self) -> tuple[Note, ...]:
        """Notes on the samples so far."""
        ...


class HeldTimer:
    """A timer whose results must be valid `Samples`: any other result is an error of the timer."""

    def __init__(self, target: str, call: Call) -> None:
        self._timer: SampleTimer = load_target(target)(call)
        self._target = target

    def take(self, count: int) -> Samples:
        """As the timer's. Raises PluginError for what are no `count` positive whole numbers of nanoseconds."""
        samples = self._timer.take(count)
        if not isinstance(samples, Samples):
            raise PluginError(f"timer {self._target} returned {shown(samples)} from take; it must return Samples")
        times, enqueued = samples.samples_ns, samples.enqueue_ns
        whole = isinstance(times, tuple) and all(isinstance(time_ns, int) and 0 < time_ns < 2**62 for time_ns in times)
        if not whole or len(times) != count or len(enqueued) not in (0, count):
            raise PluginError(
                f"timer {self._target} took {shown(times)}, enqueued in {shown(enqueued)}; "
                f"{count} whole numbers of at least 1 ns were requested"
            )
        if not isinstance(samples.verification, Verification | None):
            raise PluginError(f"timer {self._target} gave the verification {shown(samples.verification)}")
        return samples

    def notes(self) -> tuple[Note, ...]:
        """As the timer's."""
        return self._timer.notes()

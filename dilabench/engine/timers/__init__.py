"""Timers: ways to take time samples of a call. Each states what it proves in its descriptor.

A timer of your own is a class with the constructor and the methods of `SampleTimer`, registered through the hook
`dilabench_register_timers`. It lives inside the worker process, one object per case.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dilabench.engine.call.timed_calls import KeptCall
from dilabench.engine.worker.protocol import CaseSpec
from dilabench.record import Note
from dilabench.workload.spec import Workload


class Call(Protocol):
    """What a timer gets to time."""

    @property
    def spec(self) -> CaseSpec:
        """The case and where its code is."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def workload(self) -> Workload:
        """What it computes."""
        ...

    @property
    def call_ns(self) -> int:
        """A first idea of how long a call takes."""
        ...

    def fresh(self) -> Callable[[], object]:
        """Do what belongs before one call and is not timed; returns that call, good for one use."""
        ...

    def capturable(self) -> tuple[Callable[[], object], KeptCall]:
        """A call whose results stay in the object beside it, to be captured in a graph."""
        ...

    def replayed(self, captured: KeptCall, replay: Callable[[], None]) -> Callable[[], object]:
        """As `fresh`, for a replay of a captured call."""
        ...

    def rotate(self) -> int:
        """From now on use enough input sets in turn to defeat the GPU's L2 cache; how many there are."""
        ...

    @property
    def is_cold(self) -> bool:
        """The input sets in turn are at least twice the L2 cache."""
        ...

    @property
    def working_set_bytes(self) -> int:
        """Bytes of one input set."""
        ...


@dataclass(frozen=True, slots=True)
class Samples:
    """Times of consecutive calls, and for GPU timers how long the host took to enqueue each of them."""

    samples_ns: tuple[int, ...]
    enqueue_ns: tuple[int, ...] = ()


class TimerUnusableError(Exception):
    """This timer cannot time this call; the text says why. The case goes on with its other timers."""


class ClockError(Exception):
    """The clock did not advance over calls that take time: no sample of it can be trusted."""


class SampleTimer(Protocol):
    """Takes samples of one call. The constructor may prepare (allocate, capture) and raise TimerUnusableError."""

    def __init__(self, call: Call) -> None: ...

    def take(self, count: int) -> Samples:
        """`count` consecutive samples in nanoseconds, each at least 1."""
        ...

    def notes(self) -> tuple[Note, ...]:
        """What a reader must know about the samples so far."""
        ...

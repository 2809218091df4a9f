"""Synthetic interleaved measurements: what a noisy machine does to two implementations timed in turns."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings

from dilabench.stats.decisions.paired import PairedRounds

settings.register_profile("dilabench", deadline=None, derandomize=True)
settings.load_profile("dilabench")


@dataclass(frozen=True)
class NoiseModel:
    """Log-time noise; every term is common to whatever runs at that moment, as on a real machine.

    session_sd: level of a process (placement, clocks). drift: largest linear change over a session, either way.
    ar_sd, phi: first-order autoregressive noise between consecutive samples. jitter_sd: one-sided noise of a sample.
    spikes: share of samples that something else interrupts, by 10 to 60 %.
    """

    session_sd: float
    drift: float
    ar_sd: float
    phi: float
    jitter_sd: float
    spikes: float

    def cells(
        self, rng: np.random.Generator, count: int, *, effect: float = 0.0, sessions: int = 1
    ) -> list[PairedRounds]:
        """`count` comparisons of 20 rounds x 5 samples, in random order within rounds; candidate slower by `effect`."""
        rounds, n = 20, 5
        shape = (count, sessions, rounds * 2 * n)
        log_ns = np.log(1e7) + rng.normal(0, self.session_sd, (count, sessions, 1))
        log_ns = log_ns + rng.uniform(-self.drift, self.drift, (count, sessions, 1)) * np.linspace(0, 1, shape[2])
        state = rng.normal(0, self.ar_sd, shape[:2])
        ar = np.empty(shape)
        for i in range(shape[2]):
            state = self.phi * state + np.sqrt(1 - self.phi**2) * rng.normal(0, self.ar_sd, shape[:2])
            ar[..., i] = state
        log_ns = log_ns + ar + np.abs(rng.normal(0, self.jitter_sd, shape))
        log_ns = log_ns + np.log1p(rng.uniform(0.1, 0.6, shape)) * (rng.random(shape) < self.spikes)
        slots = log_ns.reshape(count, sessions, rounds, 2, n)
        swapped = rng.random((count, sessions, rounds, 1, 1)) < 0.5
        slots = np.where(swapped, slots[..., ::-1, :], slots)
        slots[..., 1, :] += np.log1p(effect)
        samples_ns = np.exp(slots).round().astype(np.int64).tolist()
        return [
            PairedRounds([[(baseline, candidate) for baseline, candidate in session] for session in cell])
            for cell in samples_ns
        ]


@pytest.fixture
def cpu_noise() -> NoiseModel:
    """A loaded two-core machine: processes differ by 10 %, neighbours steal time."""
    return NoiseModel(session_sd=0.10, drift=0.08, ar_sd=0.02, phi=0.8, jitter_sd=0.04, spikes=0.08)


@pytest.fixture
def gpu_noise() -> NoiseModel:
    """A GPU: 0.3 % correlated noise, sessions 1 % apart, thermal drift."""
    return NoiseModel(session_sd=0.01, drift=0.03, ar_sd=0.003, phi=0.9, jitter_sd=0.003, spikes=0.01)


@pytest.fixture
def round_noise() -> Callable[..., PairedRounds]:
    """A comparison of given size with plain log-normal noise."""

    def make(
        seed: int,
        *,
        sizes: tuple[int, int] = (5, 5),
        sessions: int = 1,
        rounds: int = 20,
        sd: float = 0.02,
        effect: float = 0.0,
        level_ns: float = 1e7,
    ) -> PairedRounds:
        rng = np.random.default_rng(seed)
        sides = [(np.log(level_ns), sizes[0]), (np.log(level_ns) + np.log1p(effect), sizes[1])]
        return PairedRounds(
            [
                [tuple(np.exp(rng.normal(mean, sd, n)).tolist() for mean, n in sides) for _ in range(rounds)]
                for _ in range(sessions)
            ]
        )

    return make

"""Memory gate, calibration, derived rates, cheap imports and speed of the analysis."""

import subprocess
import sys

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from dilabench.errors import ConfigError
from dilabench.stats.decisions.decide import Policy, binomial_interval, detection_rate, judge_many
from dilabench.stats.decisions.history import noise_floor
from dilabench.stats.decisions.memory import MemoryCode, judge_memory
from dilabench.stats.decisions.paired import estimate_many
from dilabench.stats.decisions.verdicts import Code
from dilabench.units import gigabytes_per_second, speedup, tflops_per_second, tokens_per_second

MIB = 2**20


@pytest.mark.parametrize(
    ("baseline", "change", "code"),
    [
        (10 * MIB, 2 * MIB, MemoryCode.SAME),
        (10 * MIB, 2 * MIB + 1, MemoryCode.LARGER),
        (10 * MIB, -2 * MIB - 1, MemoryCode.SMALLER),
        (1000 * MIB, 10 * MIB, MemoryCode.SAME),
        (1000 * MIB, 10 * MIB + 1, MemoryCode.LARGER),
        (0, 0, MemoryCode.SAME),
    ],
)
def test_memory_gate_is_exact(baseline, change, code):
    verdict = judge_memory(baseline, baseline + change)
    assert verdict.code is code
    assert verdict.fails_gate is (code is MemoryCode.LARGER)


def test_negative_peaks_are_refused():
    with pytest.raises(ConfigError):
        judge_memory(-1, 5)


@given(st.integers(1, 60), st.data())
def test_binomial_interval_is_scipys(trials, data):
    hits = data.draw(st.integers(0, trials))
    ours, theirs = binomial_interval(hits, trials), scipy.stats.binomtest(hits, trials).proportion_ci()
    assert (ours.low, ours.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))


def test_noise_floor_of_known_sessions(cpu_noise):
    assert noise_floor([0.01, -0.01, 0.01]) == pytest.approx(0.01)
    estimates = estimate_many(cpu_noise.cells(np.random.default_rng(0), 100))
    floor = noise_floor([d for e in estimates for d in e.session_log_ratios])
    assert 0.001 < floor < 0.02
    with pytest.raises(ConfigError):
        noise_floor([])


def test_detection_rate_counts_one_code(round_noise):
    verdicts = judge_many([round_noise(s, effect=e) for s, e in [(1, 0.3), (2, 0.3), (3, 0.0)]], Policy())
    rate = detection_rate(verdicts)
    assert (rate.code, rate.hits, rate.trials, rate.rate) == (Code.SLOWER, 2, 3, pytest.approx(2 / 3))


def test_rates():
    assert tokens_per_second(4096, 2_000_000) == pytest.approx(2_048_000)
    assert tflops_per_second(5e12, 1e9) == pytest.approx(5.0)
    assert gigabytes_per_second(3e9, 1e9) == pytest.approx(3.0)
    assert speedup(200, 100) == 2
    with pytest.raises(ConfigError):
        tokens_per_second(1, 0)


def test_verdict_types_cost_no_numpy_and_nothing_imports_torch():
    code = (
        "import sys, dilabench.stats.decisions.verdicts\n"
        "import dilabench.stats.decisions.memory\n"
        "assert 'numpy' not in sys.modules and 'scipy' not in sys.modules\n"
        "import dilabench.stats.decisions.decide, dilabench.stats.decisions.history\n"
        "import dilabench.stats.decisions.steps, dilabench.stats.scaling\n"
        "assert 'torch' not in sys.modules and 'scipy.stats' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

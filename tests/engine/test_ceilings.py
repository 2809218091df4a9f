"""The highest rates of a device."""

import pytest
import torch

from dilabench.engine.device import device as devices
from dilabench.engine.device.device import LONGEST_S, REPEATS, measure_ceilings
from dilabench.metadata import matmul_key
from tests.conftest import half_are_slow

CPU = torch.device("cpu")
SLOW, FAST = 1e9, 1e12


@pytest.fixture
def products(monkeypatch):
    """Products take the time of a rate by dtype; the list gets (rows, seconds) of each measured product."""

    def at(rates):
        multiplied, measured = [], []
        monkeypatch.setattr(torch, "matmul", lambda left, _, out: multiplied.append(left))

        def seconds(work, _device):
            multiplied.clear()
            work()
            if not multiplied:
                return 1.0
            (left,) = multiplied
            measured.append((len(left), 2 * len(left) ** 3 / rates[left.dtype]))
            return measured[-1][1]

        monkeypatch.setattr(devices, "_best_seconds", seconds)
        return measured

    return at


@pytest.mark.parametrize(("half", "rates"), half_are_slow(["float16", "bfloat16"], [(SLOW, FAST), (FAST, SLOW)]))
def test_half_precision_reaches_the_rate_of_float32_on_a_cpu(half, rates, products):
    """Processors without instructions for half precision multiply it in float32."""
    own, wide = rates
    products({getattr(torch, half): own, torch.float32: wide})
    flops = {dtype: measure_ceilings(CPU, [dtype])[matmul_key(dtype)] for dtype in (half, "float32")}
    assert flops == pytest.approx({half: max(own, wide), "float32": wide})


@pytest.mark.parametrize(("dtype", "rate"), half_are_slow(["float16", "bfloat16", "float32", "float64"], [SLOW, FAST]))
def test_a_large_product_is_multiplied_only_by_a_device_that_is_fast_enough(dtype, rate, products):
    measured = products({getattr(torch, dtype): rate, torch.float32: rate})
    measure_ceilings(CPU, [dtype])
    facts = devices.device_of(CPU).facts
    large = facts.wide_matmul_size if dtype in {"float32", "float64"} else facts.matmul_size
    assert (large in {size for size, _ in measured}) is (rate == FAST)
    assert max(REPEATS * seconds for _, seconds in measured) <= LONGEST_S

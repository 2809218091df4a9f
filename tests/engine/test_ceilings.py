"""The highest rates of a device."""

import pytest
import torch

from dilabench.engine.device import device as devices
from dilabench.engine.device.device import measure_ceilings
from dilabench.metadata import matmul_key


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(("half_s", "wide_s"), [(1000.0, 1.0), (1.0, 1000.0)], ids=["slow in half", "fast in half"])
def test_half_precision_reaches_the_rate_of_float32_on_a_cpu(half, half_s, wide_s, monkeypatch):
    """Processors without instructions for half precision multiply it in float32."""
    multiplied = []
    monkeypatch.setattr(torch, "matmul", lambda left, _, out: multiplied.append(left.dtype))

    def seconds(work, _device):
        multiplied.clear()
        work()
        return wide_s if multiplied == [torch.float32] else half_s

    monkeypatch.setattr(devices, "_best_seconds", seconds)
    cpu = torch.device("cpu")
    flops = {dtype: measure_ceilings(cpu, [dtype])[matmul_key(dtype)] for dtype in (half, "float32")}
    sizes = devices.device_of(cpu).facts
    own, wide = 2 * sizes.matmul_size**3 / half_s, 2 * sizes.wide_matmul_size**3 / wide_s
    assert flops == {half: max(own, wide), "float32": wide}

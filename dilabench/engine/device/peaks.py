"""What this device can do at best: a matrix product per dtype and a copy, measured here and now."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dilabench.metadata import COPY_KEY, TENSOR_CORE_DTYPE, matmul_key

if TYPE_CHECKING:
    import torch

    from dilabench.engine.device.device import Device

REPEATS = 5
# After so long it is not repeated: many a CPU takes seconds for a product in float16.
ENOUGH_S = 1.0


def measure_ceilings(device: "torch.device", dtypes: Sequence[str]) -> dict[str, float]:
    """FLOP/s of a square matrix product in each dtype, bytes/s of a copy (read and written bytes count).

    Beside float32 that of tensor cores, where there are some, which bounds it too (`metadata.peak_flops`).
    """
    import torch

    from dilabench.engine.call.inputs import TORCH_DTYPE
    from dilabench.engine.device.device import device_of

    ceilings = {}
    hardware = device_of(device)
    more = {TENSOR_CORE_DTYPE} if "float32" in dtypes and hardware.has_tensor_cores else set()
    for dtype in sorted({*dtypes, *more}):
        size = hardware.facts.wide_matmul_size if dtype in {"float64", "float32"} else hardware.facts.matmul_size
        left = torch.randn(size, size, device=device).to(TORCH_DTYPE[dtype])
        out = torch.empty_like(left)
        seconds = _best_seconds(lambda left=left, out=out: torch.matmul(left, left, out=out), hardware)  # type: ignore[misc]
        ceilings[matmul_key(dtype)] = 2.0 * size**3 / seconds
    source = torch.ones(hardware.facts.copy_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    ceilings[COPY_KEY] = 2.0 * source.nbytes / _best_seconds(lambda: target.copy_(source), hardware)
    return ceilings


def _best_seconds(work: Callable[[], object], device: "Device") -> float:
    work()
    best, spent = float("inf"), 0.0
    for _ in range(REPEATS):
        device.synchronize()
        started = time.perf_counter_ns()
        work()
        device.synchronize()
        seconds = (time.perf_counter_ns() - started) * 1e-9
        best, spent = min(best, seconds), spent + seconds
        if spent > ENOUGH_S:
            break
    return max(best, 1e-9)

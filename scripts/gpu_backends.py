"""Check and time every dense backend on a CUDA device: `python3 scripts/gpu_backends.py [NAME...] [--no-time]`.

Each backend runs in a process of its own. The first table says how many trials passed (forward, lse and backward from
the out and lse of a larger softmax, over shapes, masks, dtypes and strides) and shows those that did not; the second
is the median of CUDA-event times of dense attention.
"""

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch

from dilabench.backends.check import Trial, findings
from dilabench.machine import detect
from dilabench.plugins.catalogue import load_target
from dilabench.plugins.descriptors import Backend
from dilabench.plugins.manager import discover
from dilabench.plugins.requirements import unmet

CHILD_SECONDS = 600
SHOWN_FAILURES = 12
SHAPES = ((4, 8192, 24, 128), (2, 16384, 16, 64))
MASKS = ((False, (-1, -1)), (True, (-1, -1)), (True, (40, -1)), (False, (33, 0)), (False, (20, 15)))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main() -> int:
    """Check all backends, or the named ones; exit code 5 when a trial failed."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--no-time", action="store_true")
    arguments.add_argument("--no-check", action="store_true")
    arguments.add_argument(
        "--quick", action="store_true", help="fewer trials (flash4 and flex compile for each class of shapes)"
    )
    arguments.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    backends = discover().catalogue.backends
    if options.child:
        backend = backends.get(options.names[0])
        failed = not options.no_check and not _check(backend, options.quick)
        if not options.no_time:
            _time(backend)
        return 5 if failed else 0
    machine, worst = detect("cuda"), 0
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    for name in options.names or [name for name in backends.names if name != "math"]:
        reasons = unmet(backends.get(name).requires, machine)
        if reasons:
            print(f"{name:15} skipped: {'; '.join(reasons)}", flush=True)
            continue
        flags = [flag for flag in ("--quick", "--no-time", "--no-check") if flag in sys.argv]
        worst = max(worst, _run_child(name, flags))
    return worst


def _run_child(name: str, flags: list[str]) -> int:
    try:
        return subprocess.run([sys.executable, __file__, name, "--child", *flags], timeout=CHILD_SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"{name:15} stopped after {CHILD_SECONDS} s", flush=True)
        return 5


def _entries(backend: Backend) -> tuple[Callable, Callable]:
    assert backend.backward_target is not None
    return load_target(backend.target), load_target(backend.backward_target)


def _check(backend: Backend, quick: bool) -> bool:
    attend, attend_backward = _entries(backend)
    passed = failed = 0
    for trial in _trials(backend, quick):
        why = _why_wrong(attend, attend_backward, trial)
        passed += why is None
        failed += why is not None
        if why is not None and failed <= SHOWN_FAILURES:
            print(f"{backend.name:15} wrong: {trial}: {why}", flush=True)
        if (passed + failed) % 10 == 0:
            print(f"{backend.name:15} {passed} of {passed + failed} trials ok so far", flush=True)
    print(f"{backend.name:15} {passed} of {passed + failed} trials ok", flush=True)
    return not failed


def _why_wrong(attend: Callable, attend_backward: Callable, trial: Trial) -> str | None:
    try:
        wrong = [f for f in findings(attend, attend_backward, trial, torch.device("cuda")) if not f.passed]
    # A trial that a kernel refuses is a line of the table, whatever the library raises.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
    return ", ".join(f"{f.name} {f.error:.2e} > {f.tolerance:.2e}" for f in wrong) or None


def _trials(backend: Backend, quick: bool) -> Iterator[Trial]:
    supports = backend.supports.on_cuda or backend.supports
    dtypes = [dtype for name, dtype in DTYPES.items() if name in supports.dtypes][: 1 if quick else None]
    masks = [mask for mask in MASKS if _takes(backend, *mask)]
    for dtype, (causal, window) in itertools.product(dtypes, masks):
        layouts = ("diagonal",) if quick else ("contiguous", "diagonal", "every_other")
        for head_dim, layout in itertools.product((64,) if quick else (24, 64, 80, 128), layouts):
            yield Trial(
                length=131,
                more_keys=77,
                heads=6,
                kv_heads=3,
                head_dim=head_dim,
                causal=causal,
                window=window,
                layout=layout,
                dtype=dtype,
            )
    half = dtypes[0]
    yield Trial(length=131, heads=5, kv_heads=5, head_dim=20, dtype=half)
    yield Trial(length=1024, more_keys=512, heads=8, kv_heads=2, head_dim=64, dtype=half)
    yield Trial(length=1, more_keys=0, heads=5, kv_heads=5, head_dim=64, dtype=half)
    yield Trial(length=1, more_keys=300, heads=4, kv_heads=2, head_dim=64, causal=False, dtype=half)
    yield Trial(length=300, more_keys=1, heads=4, kv_heads=2, head_dim=64, causal=False, dtype=half)
    yield Trial(batch=70000, length=3, more_keys=2, heads=2, kv_heads=2, head_dim=64, dtype=half)


def _takes(backend: Backend, causal: bool, window: tuple[int, int]) -> bool:
    looks_ahead = not causal and window not in {(-1, -1), (33, 0)}
    return (backend.supports.window or window == (-1, -1)) and not (looks_ahead and backend.supports.check is not None)


def _time(backend: Backend) -> None:
    attend, attend_backward = _entries(backend)
    print(f"{backend.name:15} dense attention, bfloat16, medians", flush=True)
    for (B, N, H, D), causal in itertools.product(SHAPES, (False, True)):
        q, k, v, dout = (torch.randn(B, N, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        options = {"causal": causal, "scale": D**-0.5}
        out, lse = attend(q, k, v, **options)
        forward_ms = _median_ms(lambda: attend(q, k, v, **options))  # noqa: B023
        backward_ms = _median_ms(lambda: attend_backward(dout, q, k, v, out, lse, **options))  # noqa: B023
        flops = 4 * D * B * H * (N * (N + 1) // 2 if causal else N * N)
        shape = f"{B}x{N} H{H} D{D} {'causal' if causal else 'full':6}"
        rates = f"{flops / forward_ms / 1e9:4.0f} {2.5 * flops / backward_ms / 1e9:4.0f} TFLOP/s"
        print(f"    {shape}  forward, backward {forward_ms:7.3f} {backward_ms:7.3f} ms {rates}", flush=True)
    _name_kernels(attend, attend_backward)


def _median_ms(call: Callable[[], object], repeats: int = 9) -> float:
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def _name_kernels(attend: Callable, attend_backward: Callable) -> None:
    q, k, v, dout = (torch.randn(2, 1024, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = attend(q, k, v, causal=True, scale=0.125)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        attend(q, k, v, causal=True, scale=0.125)
        attend_backward(dout, q, k, v, out, lse, causal=True, scale=0.125)
        torch.cuda.synchronize()
    names = sorted({event.key[:110] for event in profile.key_averages() if event.self_device_time_total > 0})
    print("    kernels: " + "\n             ".join(names), flush=True)


if __name__ == "__main__":
    sys.exit(main())

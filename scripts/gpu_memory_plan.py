#!/usr/bin/env python3
"""Measured peaks against the formulas of `dilabench.memory_plan` on a GPU: one line per case, exit 1 beyond 10 %.

    python scripts/gpu_memory_plan.py [--lengths 32K,128K] [--heads 8] [--dim 64] [--json FILE]

Measured: torch.cuda.max_memory_allocated over inputs and one call after a first call, above what was there before.
"""

import argparse
import gc
import json
import sys
from pathlib import Path

import torch

from dilabench.bench.call import PreparedCall
from dilabench.bench.commands import case_spec
from dilabench.bench.inputs import InputShelf
from dilabench.bench.memory import measure_memory
from dilabench.machine import detect
from dilabench.memory_plan import plan_memory
from dilabench.plugins.manager import discover
from dilabench.results import Case, Optimizations
from dilabench.spec import WorkloadRequest
from dilabench.units import format_bytes, parse_count

LIMIT = 0.10
IMPLEMENTATIONS = ("dense", "gather", "strided", "fused", "gather-multihead", "strided-multihead")
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "grouped queries": {"num_kv_heads": 2},
    "batch 3": {"batch_size": 3},
    "short tail": {"seq_len": 1000},
    "not dividing": {"segment_lengths": (2000, 4000, 8000), "dilation_rates": (1, 3, 6)},
    "window": {"window": (1000, 0)},
    "not causal": {"causal": False},
}


def main() -> int:
    """Every case that runs here; the exit code says whether a formula was off by more than 10 %."""
    options = _options()
    machine, catalogue = detect("cuda"), discover().catalogue
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    lines, worst = [], 0.0
    for case in _cases(options, machine.auto_dtype, catalogue):
        name = f"{case.implementation:18} {case.backend or '-':15} {case.workload.label():42} {case.workload.mode:8}"
        reasons = catalogue.reasons_against(case, machine)
        plan = plan_memory(case, "cuda")
        if reasons or plan is None:
            why = "; ".join(reasons) or "no formula"
            if not reasons:
                print(f"{name} {why}", flush=True)
            continue
        try:
            measured = _measured(case, catalogue, device)
        # A case that cannot run here is told and left out; the others still count.
        except Exception as error:  # noqa: BLE001
            print(f"{name} FAILED {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        ratio = plan.peak_bytes / measured
        worst = max(worst, abs(ratio - 1))
        mark = "" if abs(ratio - 1) <= LIMIT else "  <-- beyond 10 %"
        unit = case.workload.tokens * case.workload.num_heads * case.workload.head_dim * 2
        print(
            f"{name} measured {format_bytes(measured):>10} ({measured / unit:5.2f} units)"
            f"  formula {format_bytes(plan.peak_bytes):>10} ({plan.peak_bytes / unit:5.2f})  ratio {ratio:.3f}{mark}",
            flush=True,
        )
        lines.append({"case": case.model_dump(mode="json"), "measured": measured, "formula": plan.peak_bytes})
    print(f"{len(lines)} cases on {torch.cuda.get_device_name(device)}, largest deviation {worst:.1%}")
    if options.json:
        Path(options.json).write_text(json.dumps(lines, indent=1))
    return int(worst > LIMIT)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="32K,128K")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--json")
    return parser.parse_args()


def _cases(options, dtype, catalogue):  # type: ignore[no-untyped-def]
    for length in map(parse_count, options.lengths.split(",")):
        for label, fields in VARIANTS.items():
            for mode in ("forward", "both"):
                for name in IMPLEMENTATIONS:
                    shape = {"batch_size": 1, "num_heads": options.heads, "head_dim": options.dim, "mode": mode}
                    changed = {**fields, "seq_len": length + int(str(fields.get("seq_len", 0)))}
                    if name == "dense":
                        changed = {k: v for k, v in changed.items() if k not in {"segment_lengths", "dilation_rates"}}
                        changed["pattern"] = "dense"
                    workload = WorkloadRequest.model_validate({**shape, **changed}).resolve(dtype)
                    implementation = catalogue.implementations.get(name)
                    backends = catalogue.backends.names if implementation.uses_backend else (None,)
                    for backend in backends:
                        yield Case(implementation=name, backend=backend, workload=workload)
                    cuts = (
                        label == "plain" and length % 65536 == 0 and name != "dense" and implementation.takes == "heads"
                    )
                    if cuts:
                        for switched in ({"query_chunk": 65536}, {"query_chunk": 65536, "offload_inputs": True}):
                            backend = "sdpa-flash" if implementation.uses_backend else None
                            yield Case(
                                implementation=name,
                                backend=backend,
                                workload=workload,
                                optimizations=Optimizations(**switched),
                            )


def _measured(case: Case, catalogue, device: torch.device) -> int:  # type: ignore[no-untyped-def]
    gc.collect()
    torch.cuda.empty_cache()
    call = PreparedCall(case_spec(case, catalogue, 0), device, InputShelf(device))
    return measure_memory(call, isolated=True).peak_bytes


if __name__ == "__main__":
    sys.exit(main())

"""The run record behind docs/results/h200-dilated.md: issue targets of dilated attention, interleaved in one run.

    python scripts/gpu_records.py FOLDER [--backends flash4,sdpa-cudnn] [--implementations strided,fused]
                                  [--budget 200s] [--only NAME] [--except NAME] [--modes forward,backward]

Every row is verified before it is timed, as in any `dilabench run`.
"""

import argparse
from pathlib import Path
from typing import Any

from dilabench.cli.run.execution import Execution, new_header
from dilabench.machine import detect
from dilabench.metadata import PRESET
from dilabench.plugins.manager import discover
from dilabench.record import PlannedCase
from dilabench.request import run_request
from dilabench.store.run_files import RunFolder
from dilabench.suites.planner import Planner
from dilabench.units import parse_duration
from dilabench.validation import validated
from dilabench.workload.spec import WorkloadRequest

WIDE = (2048, 4096, 8192, 16384, 32768)
LONGNET_128K = {
    "batch_size": 1,
    "seq_len": 131072,
    "num_heads": 16,
    "segment_lengths": WIDE,
    "dilation_rates": (1, 2, 4, 8, 16),
}
LONGNET_32K = {
    "batch_size": 1,
    "seq_len": 32768,
    "num_heads": 12,
    "head_dim": 64,
    "segment_lengths": WIDE,
    "dilation_rates": (1, 2, 4, 6, 12),
}
SHORT = {
    "batch_size": 2,
    "seq_len": 8192,
    "num_heads": 8,
    "head_dim": 64,
    "segment_lengths": (2048, 4096, 8192),
    "dilation_rates": (1, 2, 4),
}
MILLION = {**LONGNET_128K, "seq_len": 1048576, "num_heads": 8, "head_dim": 64}
# Offsets of its last rows do not fit 32 bits: N·H·D is 1.25 times 2^31.
HUGE = {**LONGNET_128K, "seq_len": 1310720, "head_dim": 128}
DENSE = {"pattern": "dense", "batch_size": 4, "seq_len": 8192, "num_heads": 24, "head_dim": 128}
DENSE_64 = {"pattern": "dense", "batch_size": 2, "seq_len": 16384, "num_heads": 16, "head_dim": 64}

BOTH_WAYS = (False, True)


def workloads() -> list[tuple[str, dict[str, Any]]]:
    """(name, fields of WorkloadRequest), the most telling first."""
    cells: list[tuple[str, dict[str, Any]]] = []
    for mode in ("forward", "backward"):
        for head_dim in (128, 64):
            cells += [
                ("longnet_128k", {**LONGNET_128K, "head_dim": head_dim, "mode": mode, "causal": causal})
                for causal in BOTH_WAYS
            ]
        if mode == "forward":
            cells += [("short", {**SHORT, "mode": mode, "causal": causal}) for causal in BOTH_WAYS]
            cells += [("longnet_32k", {**LONGNET_32K, "mode": mode, "causal": causal}) for causal in BOTH_WAYS]
    cells += [("million", {**MILLION, "mode": mode, "causal": True}) for mode in ("forward", "backward")]
    cells += [("huge", {**HUGE, "mode": mode, "causal": True}) for mode in ("forward", "backward")]
    for mode in ("forward", "backward"):
        cells += [("dense_d128", {**DENSE, "mode": mode, "causal": True})]
        cells += [("dense_d64", {**DENSE_64, "mode": mode, "causal": True})]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backends", default="flash4,sdpa-cudnn")
    parser.add_argument("--implementations", default="strided,fused")
    parser.add_argument("--modes", default="forward,backward")
    parser.add_argument("--budget", default="200s")
    parser.add_argument("--only", action="append")
    parser.add_argument("--except", dest="left_out", action="append", default=[])
    arguments = parser.parse_args()
    found = discover()
    request = run_request(
        found.catalogue,
        suite="implementations",
        run={
            "backends": arguments.backends.split(","),
            "budget_s": parse_duration(arguments.budget),
            "lengths": [],
            "device": "cuda",
        },
    )
    machine = detect("cuda")
    planner = Planner(found.catalogue, machine, request)
    planned: list[PlannedCase] = []
    for name, fields in workloads():
        if fields["mode"] not in arguments.modes.split(",") or name in arguments.left_out:
            continue
        if arguments.only and name not in arguments.only:
            continue
        asked = validated(WorkloadRequest, {**fields, "dtype": "bfloat16"})
        implementations = ["dense"] if name.startswith("dense") else arguments.implementations.split(",")
        for implementation in implementations:
            shelf = found.catalogue.implementations
            planned += planner.plan(shelf.get(implementation), asked, PRESET.entry(name))
    header = new_header(found, machine, request)
    Execution(
        found=found,
        machine=machine,
        request=request,
        planned=tuple(planned),
        header=header,
        folder=RunFolder.create(arguments.folder, request.suite, header.run_id),
        formats=(found.catalogue.reporters.get("table"),),
        keep=False,
    ).run()


if __name__ == "__main__":
    main()

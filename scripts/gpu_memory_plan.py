#!/usr/bin/env python3
"""Measured peaks against the formulas of `dilabench.predict.memory` on a GPU; exit 1 when one is off by more than 10 %.

    python scripts/gpu_memory_plan.py [--groups math,flex,...] [--seconds 45] [--json FILE]

Measured: torch.cuda.max_memory_allocated over inputs, tables and one call after a first call, above what was there
before. Rows of `rings` are one rank of several, alone on the device: what would arrive is zeros. A row that fails is
told and left out; after `--seconds` no row is begun. JSON is written after every row.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dilabench.backends.load import load_backend
from dilabench.contracts import BuildContext
from dilabench.distributed.single_rank import SingleRank
from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.worker.protocol import case_spec
from dilabench.machine import detect
from dilabench.plugins.catalogue import Catalogue, load_target
from dilabench.plugins.manager import discover
from dilabench.predict.memory import plan_memory
from dilabench.record import Case, Optimizations
from dilabench.units import format_bytes
from dilabench.workload.spec import DTYPE_BYTES, Workload, WorkloadRequest

LIMIT = 0.10
Fields = dict[str, Any]
BRANCHES: Fields = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
DENSE: Fields = {"pattern": "dense"}
SPARSE: Fields = {"pattern": "block_sparse"}
SHAPES: dict[str, Fields] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "batch": {"batch_size": 3},
    "tail": {"seq_len": 33768},
    "odd rates": {"segment_lengths": (2000, 4000, 8000), "dilation_rates": (1, 3, 6)},
    "window": {"window": (1000, 0)},
    "full": {"causal": False},
}
KNOWN = ("dense", "gather", "strided", "fused", "gather-multihead", "strided-multihead")
RINGS = ("ring", "ring-overlap", "zigzag-ring", "zigzag-allgather", "ring-allgather", "ulysses", "ring-multihead")


class Planned(NamedTuple):
    """A row to measure. `ranks` above 1: the last of so many ranks."""

    group: str
    implementation: str
    backend: str | None
    shape: str
    fields: Fields
    ranks: int = 1
    switched: Fields = {}  # noqa: RUF012


class Measured(NamedTuple):
    """Bytes of a call in a mode."""

    case: Case
    measured: int

    @property
    def formula(self) -> int | None:
        """What the plan says; None where there is none."""
        plan = plan_memory(self.case, "cuda", discover().catalogue)
        return plan.peak_bytes if plan else None


def main() -> int:
    """Every row that runs here within the time."""
    options = _options()
    started = time.monotonic()
    machine, catalogue = detect("cuda"), discover().catalogue
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    # A process's first matrix products give cuBLAS 64 MiB to work in, which belong to no case.
    ones = torch.ones(64, 64, device=device)
    torch.addmm(ones, ones, ones @ ones)
    done: list[dict[str, Any]] = []
    left: list[str] = []
    for row in _rows(options.groups.split(",")):
        name = f"{row.group}: {row.implementation} {row.backend or ''} {row.shape}"
        if time.monotonic() - started > options.seconds:
            left.append(f"{name} (no time)")
            continue
        began = time.monotonic()
        try:
            found = list(_measured(row, machine, catalogue, device))
        # A row that cannot run here is told and left out; the others still count.
        except Exception as error:  # noqa: BLE001
            left.append(f"{name} ({type(error).__name__}: {str(error).splitlines()[0][:100]})")
            print(f"FAILED {left[-1]}", flush=True)
            continue
        done += [_entry(row, one) for one in found]
        print(f"{name}: {len(found)} peaks in {time.monotonic() - began:.1f} s", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps({"rows": done, "left_out": left}, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": done, "left_out": left}, indent=1))
    return _told(done, left, torch.cuda.get_device_name(device), time.monotonic() - started)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="reference,block-sparse,rings,flex,math", help="also: known")
    parser.add_argument("--seconds", type=float, default=45.0, help="after this no row is begun")
    parser.add_argument("--json")
    return parser.parse_args()


def _rows(groups: list[str]) -> Iterator[Planned]:
    """Quick rows first; those that compile come last."""
    makers: dict[str, Callable[[], Iterator[Planned]]] = {
        "math": _math,
        "reference": _reference,
        "block-sparse": _block_sparse,
        "rings": _rings,
        "flex": _flex,
        "known": _known,
    }
    unknown = set(groups) - set(makers)
    if unknown:
        raise SystemExit(f"unknown groups {sorted(unknown)}; there are {', '.join(makers)}")
    for group in groups:
        yield from makers[group]()


def _math() -> Iterator[Planned]:
    for name, base in (("dense", DENSE), ("strided", BRANCHES), ("gather", BRANCHES)):
        for shape, fields in SHAPES.items():
            if shape in {"plain", "grouped", "batch", "window"}:
                yield Planned("math", name, "math", shape, {**base, "seq_len": 16384, **fields})


def _reference() -> Iterator[Planned]:
    yield Planned("reference", "reference", None, "dense", {**DENSE, "seq_len": 8192})
    yield Planned("reference", "reference", None, "plain", {**BRANCHES, "seq_len": 8192})
    yield Planned("reference", "reference", None, "sparse", {**SPARSE, "seq_len": 8192})


def _block_sparse() -> Iterator[Planned]:
    shapes: dict[str, Fields] = {
        "D64": {},
        "D128": {"head_dim": 128},
        "D80 padded": {"head_dim": 80},
        "grouped": {"num_kv_heads": 2},
        "random blocks of 64": {"mask": "random", "block_size": 64, "sparsity": 0.5},
        "over branches": BRANCHES,
    }
    for shape, fields in shapes.items():
        yield Planned("block-sparse", "block-sparse", None, shape, {**SPARSE, "seq_len": 32768, **fields})
    yield Planned("block-sparse", "block-sparse-flash4", None, "D128", {**SPARSE, "seq_len": 32768, "head_dim": 128})


def _rings() -> Iterator[Planned]:
    for name in RINGS:
        yield Planned("rings", name, "sdpa-flash", "dense", {**DENSE, "seq_len": 65536}, ranks=4)
        crossing = {"segment_lengths": (8192, 65536), "dilation_rates": (1, 4)}
        if not name.startswith("zigzag"):
            yield Planned("rings", name, "sdpa-flash", "branches", {**crossing, "seq_len": 65536}, ranks=4)
    packed = {**DENSE, "seq_len": 65536, "layout": "packed"}
    yield Planned("rings", "ring-varlen", "sdpa-flash", "packed", packed, ranks=4)


def _flex() -> Iterator[Planned]:
    for name in ("flex", "flex-permuted"):
        yield Planned("flex", name, None, "plain", {**BRANCHES, "seq_len": 16384})
    yield Planned("flex", "dense", "flex", "plain", {**DENSE, "seq_len": 16384})
    yield Planned("flex", "block-sparse-flex", None, "D64", {**SPARSE, "seq_len": 16384})


def _known() -> Iterator[Planned]:
    """What was held to a GPU before the others; minutes, so ask for more `--seconds`."""
    backends = [backend.name for backend in discover().catalogue.backends if backend.name not in {"math", "flex"}]
    for shape, fields in SHAPES.items():
        for name in KNOWN:
            base = DENSE if name == "dense" else BRANCHES
            changed = {key: value for key, value in fields.items() if name != "dense" or key not in BRANCHES}
            for backend in backends if name != "fused" else (None,):
                yield Planned("known", name, backend, shape, {"seq_len": 32768, **base, **changed})
    for name in ("gather", "strided", "fused"):
        for switched in ({"query_chunk": 65536}, {"query_chunk": 65536, "offload_inputs": True}):
            backend = None if name == "fused" else "sdpa-flash"
            yield Planned("known", name, backend, "chunks", {"seq_len": 131072, **BRANCHES}, switched=switched)


def _measured(row: Planned, machine: Any, catalogue: Catalogue, device: torch.device) -> Iterator[Measured]:
    """Forward alone, and forward with backward, from one preparation. Raises RuntimeError for what cannot run here."""
    shape = {"batch_size": 1, "num_heads": 8, "head_dim": 64, "mode": "both"}
    workload = WorkloadRequest.model_validate({**shape, **row.fields}).resolve(machine.auto_dtype)
    case = Case(
        implementation=row.implementation,
        backend=row.backend,
        workload=workload,
        world_size=row.ranks,
        optimizations=Optimizations(**row.switched),
    )
    reasons = catalogue.reasons_against(case.model_copy(update={"world_size": 1}), machine)
    if reasons:
        raise RuntimeError("; ".join(reasons))
    # Which rank needs most depends on the sharding: the last of a causal ring, the first of a zigzag.
    peaks = [_peaks(case, rank, catalogue, device) for rank in sorted({0, row.ranks - 1})]
    alone = case.model_copy(update={"workload": workload.replace(mode="forward")})
    yield Measured(alone, max(forward for forward, _ in peaks))
    if not row.switched.get("offload_inputs"):
        yield Measured(case, max(both for _, both in peaks))


def _peaks(case: Case, rank: int, catalogue: Catalogue, device: torch.device) -> tuple[int, int]:
    """Bytes of a rank's forward alone and of both passes."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    if case.world_size > 1:
        forward, both, dout = _rank(case, rank, catalogue, device)
    else:
        call = PreparedCall(case_spec(case, catalogue, 0), device, InputStore(device))
        forward, both, dout = (lambda: call._forward(call.inputs(0))), call.fresh, call.output_gradient()
    forward()
    both()()
    dout_bytes = dout.nbytes if dout.device == device else 0
    return _peak(forward, device) - before - dout_bytes, _peak(lambda: both()(), device) - before


def _rank(
    case: Case, rank: int, catalogue: Catalogue, device: torch.device
) -> tuple[Callable[[], object], Callable[[], Callable[[], object]], torch.Tensor]:
    """The calls of one rank, on shards of its own."""
    workload, implementation = case.workload, catalogue.implementations.get(case.implementation)
    loaded = load_backend(catalogue.backends.get(case.backend or ""))
    world = SingleRank.of(rank, case.world_size, device)
    function = load_target(implementation.target)(workload, BuildContext(device=device, backend=loaded, world=world))
    leaves = _shards(workload, function.shards.rows[world.rank], implementation.takes, device)
    targets = [*leaves, *(function.parameters() if isinstance(function, torch.nn.Module) else ())]
    q, k, v = leaves if len(leaves) == 3 else leaves * 3
    dout = torch.randn_like(q)

    def forward() -> object:
        with torch.no_grad():
            return function(q, k, v)

    return forward, lambda: lambda: torch.autograd.grad(function(q, k, v), targets, dout, allow_unused=True), dout


def _shards(workload: Workload, rows: int, takes: str, device: torch.device) -> list[torch.Tensor]:
    lead = (rows,) if workload.layout == "packed" else (workload.batch_size, rows)
    dtype, heads = getattr(torch, workload.dtype), (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads)
    shapes = [(*lead, count, workload.head_dim) for count in heads]
    if takes == "embeddings":
        shapes = [(*lead, workload.num_heads * workload.head_dim)]
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def _peak(call: Callable[[], object], device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device)


def _entry(row: Planned, one: Measured) -> dict[str, Any]:
    workload = one.case.workload
    local = workload.tokens * workload.num_heads * workload.head_dim * DTYPE_BYTES[workload.dtype] // row.ranks
    return {
        "group": row.group,
        "shape": row.shape,
        "case": one.case.model_dump(mode="json"),
        "unit_bytes": local,
        "measured_bytes": one.measured,
        "formula_bytes": one.formula,
        "ratio": None if one.formula is None else one.formula / one.measured,
    }


def _told(done: list[dict[str, Any]], left: list[str], gpu: str, seconds: float) -> int:
    """The table; what was left out; the exit code."""
    print(
        f"\n{'implementation':20}{'backend':12}{'shape':20}{'mode':9}{'measured':>10}{'units':>8}{'formula':>8}  ratio"
    )
    for entry in done:
        case, unit = entry["case"], entry["unit_bytes"]
        ratio, formula = entry["ratio"], entry["formula_bytes"]
        told = "no formula" if ratio is None else f"{ratio:.3f}{'' if abs(ratio - 1) <= LIMIT else '  <-- off'}"
        print(
            f"{case['implementation']:20}{case['backend'] or '-':12}{entry['shape']:20}{case['workload']['mode']:9}"
            f"{format_bytes(entry['measured_bytes']):>10}{entry['measured_bytes'] / unit:8.2f}"
            f"{'-' if formula is None else f'{formula / unit:.2f}':>8}  {told}"
        )
    for name in left:
        print(f"left out: {name}")
    off = [abs(entry["ratio"] - 1) for entry in done if entry["ratio"] is not None]
    worst = max(off, default=0.0)
    print(f"{len(off)} of {len(done)} peaks with a formula on {gpu} in {seconds:.0f} s, largest deviation {worst:.1%}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

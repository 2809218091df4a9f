"""Traces against the peaks in the records of docs/results: what GPUs that no test has were seen to need."""

from collections import defaultdict
from pathlib import Path

import pytest

from dilabench.plugins.manager import discover
from dilabench.predict.memory import plan_memory
from dilabench.record import Case, Measured
from dilabench.store.run_files import read_record
from dilabench.workload.spec import WorkloadRequest
from tests.conftest import slow

WITHIN = 0.06
# (file, implementation, tokens, mode) of peaks that today's code does not have. The first lacks what was garbage of an
# earlier call when it was measured and went meanwhile; `bench.memory` collects it first since. In the others parts of
# a batch beyond a kernel's reach stayed until the next ones had been made; `backends.adapt` frees them since.
OUTDATED = (
    {("h200-extreme", "fused", 8192, "both")}
    | {
        # Measured before the kernel's batch was cut at 2^31 elements, where its gradients are wrong.
        ("h200-extreme-gather-dense", "gather", 4194304, "both"),
    }
    | {("h200-extreme", "strided", tokens, "both") for tokens in (8388608, 10485760, 11534336)}
    # In two passes, without float32 sums of dq; `h200-block-sparse-backward`, `h200-gigapath` and `h200-not-nested`
    # have those of today.
    | {("h200-block-sparse", "block-sparse", 32768, "backward")}
    | {("h200-dilated-backward", "fused", 131072, "backward"), ("h200-extreme", "fused", 65536, "both")}
    # With copies of q, k, v and dout that a length off the dilation rates no longer needs (`h200-gigapath`).
    | {("h200-field", "fused", 65000, "both")}
    # With all rows of each branch's own result, of which it keeps those that the branch covers since.
    | {("h100-gigapath-large-before", "fused", 70001, "both")}
    # Without the tiles of counts that mask and score are read from since.
    | {("h200-flex", "flex", 32768, "forward")}
    # With the three bfloat16 parts that float32 came to the kernels in for a time.
    | {("h100-float32", "fused", 8192, "forward"), ("h100-float32", "fused", 8192, "both")}
    | {("h100-float32-one-item", "fused", 8192, "forward"), ("h100-float32-one-item-both", "fused", 8192, "both")}
    # With the gradients of gathered keys, which are given back to the allocator once they are sent since.
    | {("h200-ring-four-gpus", "zigzag-allgather", 16384, "both")}
    # With flat copies before and after each exchange, which go from and to their places since.
    | {
        ("h200-field-two-gpus", "ulysses", 8192, "both"),
        ("h200-two-gpus-peers", "ulysses", 8192, "both"),
        ("h200-ring-four-gpus", "ulysses", 16384, "both"),
    }
    # With a second gradient of out, which took the batch axis of packed shards away and is no longer made.
    | {
        ("h200-packed-four-gpus", "ring-varlen", 131072, "both"),
        ("h200-packed-four-gpus", "ulysses", 131072, "both"),
    }
    # With further tensors for merged results, which are written onto the first part since; `zigzag-allgather` also with
    # a copy of own rows among gathered ones.
    | {
        (name, implementation, tokens, "both")
        for name in ("h200-field-two-gpus", "h200-ring-flash4-by-command", "h200-two-gpus", "h200-two-gpus-16k")
        for implementation in ("zigzag-ring", "zigzag-allgather")
        for tokens in (8192, 16384)
    }
    | {("h200-two-gpus-peers", "zigzag-ring", 8192, "both"), ("h200-four-gpus-qwen", "zigzag-ring", 16384, "forward")}
    | {("h200-four-gpus-medium-backward", "zigzag-allgather", 8192, "backward")}
    | {
        (name, "zigzag-allgather", tokens, mode)
        for name in ("h200-four-gpus", "h200-four-gpus-qwen")
        for tokens in (8192, 16384, 32768)
        for mode in ("forward", "backward", "both")
    }
)
CATALOGUE = discover().catalogue
ROOT = Path(__file__).parents[3]
# What pages show, and what only tests read.
RECORDS = ROOT / "docs" / "results", ROOT / "tests" / "golden" / "records"


def recorded():
    """(file, case, device, peak) of every measured row without optimizations that keep memory between calls."""
    for path in sorted((path for folder in RECORDS for path in folder.glob("*.json.xz")), key=lambda path: path.name):
        record, name = read_record(path), path.name.partition(".")[0]
        for row in record.rows:
            workload = row.case.workload
            switched = row.case.optimizations
            plain = not (switched.buffer_pool_bytes or switched.cuda_graph or switched.compile)
            outdated = (name, row.case.implementation, workload.seq_len, workload.mode) in OUTDATED
            known = row.case.implementation in CATALOGUE.implementations
            if plain and known and not outdated and isinstance(row.outcome, Measured) and row.outcome.memory:
                yield name, row.case, record.device, row.outcome.memory.peak_bytes


ROWS = list(recorded())
ON_CUDA = [(name, case, peak) for name, case, device, peak in ROWS if device == "cuda"]


def between_lengths():
    """Places in ON_CUDA of rows that have a shorter and a longer one of the same file, alike in everything else."""
    alike = defaultdict(list)
    for place, (name, case, _) in enumerate(ON_CUDA):
        other = {"implementation", "backend", "optimizations", "world_size"}
        fields = case.model_dump_json(include=other) + case.workload.model_dump_json(exclude={"seq_len"})
        alike[name, fields].append((case.workload.seq_len, place))
    return {place for lengths in alike.values() for _, place in sorted(lengths)[1:-1]}


def seen_before():
    """Places in ON_CUDA of rows whose implementation, backend, kind of pattern, mode and dtype an earlier file has."""
    known = {}
    for place, (name, case, _) in enumerate(ON_CUDA):
        workload = case.workload
        kind = workload.pattern.kind, workload.mode, workload.dtype, workload.layout, case.world_size
        if known.setdefault((case.implementation, case.backend, *kind), name) != name:
            yield place


# Rows that say little more than another does; they are slow.
REPEATED = between_lengths() | set(seen_before())
# Their lengths, or their many rows, take long to trace.
LONG = {
    "h100-float32",
    "h100-float32-one-item-both",
    "h200-backends",
    "h200-extreme",
    "h200-extreme-gather-dense",
    "h200-flashinfer",
    "h200-four-gpus",
    "h200-four-gpus-packed",
    "h200-four-gpus-qwen",
    "h200-nsa",
    "h200-nsa-64k",
    "h200-packed-documents-flex",
    "h200-vsa",
}


def names(repeated):
    return sorted({name for place, (name, _, _) in enumerate(ON_CUDA) if (place in REPEATED) == repeated})


@pytest.mark.parametrize(
    ("name", "repeated"),
    [
        *(slow(name, False) if name in LONG else (name, False) for name in names(False)),
        *(slow(name, True) for name in names(True)),
    ],
)
def test_traces_hold_against_recorded_peaks(name, repeated):
    rows = [row for place, row in enumerate(ON_CUDA) if row[0] == name and (place in REPEATED) == repeated]
    for _, case, peak in rows:
        plan = plan_memory(case, "cuda", CATALOGUE)
        if plan is not None:
            text = f"{case.implementation} {case.backend} {case.workload.mode} {case.workload.label()}"
            assert plan.peak_bytes == pytest.approx(peak, rel=WITHIN), text


# MiB, as measured on an H200 (torch 2.11, cuDNN 9.19).
@pytest.mark.parametrize(("implementation", "peak_mib"), [("dense", 291.0), ("gather", 415.6), ("strided", 292.0)])
def test_cudnn_with_shared_keys_expands_their_gradients(implementation, peak_mib):
    fields = {"batch_size": 1, "seq_len": 32768, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "mode": "both"}
    pattern = {"pattern": "dense"} if implementation == "dense" else {}
    workload = WorkloadRequest.model_validate({**fields, **pattern}).resolve("bfloat16")
    plan = plan_memory(Case(implementation=implementation, backend="sdpa-cudnn", workload=workload), "cuda", CATALOGUE)
    assert plan.peak_bytes / 2**20 == pytest.approx(peak_mib, rel=WITHIN)


@pytest.mark.slow
def test_records_are_there_for_every_dense_kernel_and_for_algorithms_over_ranks():
    found = set()
    for _, case, _ in ON_CUDA:
        pair = case.implementation, case.backend
        if pair not in found and plan_memory(case, "cuda", CATALOGUE):
            found.add(pair)
    backends = ("math", "flex", "flash4", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "xformers")
    assert {("dense", backend) for backend in backends} <= found
    # None of `zigzag-allgather` is as new as the place of its merges: the next record of suite `ring` brings one.
    over_ranks = ("zigzag-ring", "balanced-allgather", "ulysses")
    assert {(name, "sdpa-cudnn") for name in over_ranks} | {("ring", "flash4"), ("ring-overlap", "flash4")} <= found
    assert {("fused", None), ("strided", "math"), ("strided", "flex"), ("gather", "sdpa-cudnn")} <= found

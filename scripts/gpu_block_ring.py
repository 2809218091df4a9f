"""Block-sparse attention over the GPUs of one host: is it right, does only what is needed travel, how fast is it?

    torchrun --standalone --nproc-per-node 4 scripts/gpu_block_ring.py --out "$OUT/block_ring.json"

Every case is held to float64 first (error at most twice that of one device), then forward and backward are timed
against one device with the same kernels. Counted bytes must equal the formula. Times are the maximum over ranks of each
sample, then the median. Exit code 5 when anything is wrong. Without GPUs: `--device cpu --shrink 64` under torchrun.
"""

# ruff: noqa: ARG001 (what stands in for a kernel takes what that takes)
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from gpu_ring_trial import gradients_of, peak, random_inputs, say, timed
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.distributed.launch import world_from_environment
from dilabench.distributed.shardings import BLOCKS, RING_OVERLAP, ZIGZAG_RING
from dilabench.distributed.single_rank import SingleRank
from dilabench.distributed.whole import Whole
from dilabench.distributed.world import World
from dilabench.impls import reference
from dilabench.impls.block_sparse import block_sparse
from dilabench.impls.ring import block_sparse as block_ring
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.workload.spec import Workload
from dilabench.workload.work import sparsity_of

NAME = "block-sparse-ring"
PARTS = ("out", "lse", "dq", "dk", "dv")
# mask, causal: the rows to time, the most telling first.
TIMED = (("random", True), ("local_window", True), ("random", False), ("local_window", False))


def main() -> int:
    """Verify, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45.0, help="start no new row after this long")
    parser.add_argument("--skip-verify", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shrink", type=int, default=1, help="divide the timed length by this, for a trial")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), "block_ring.json"))
    options = parser.parse_args()
    started = time.monotonic()
    world = world_from_environment(options.device, timeout_s=120.0)
    report: dict[str, Any] = {"ranks": world.size, "device": device_name(world), "verified": [], "timed": []}
    with world:
        try:
            for what, workload in () if options.skip_verify else verified_cases(world, options.out.parent):
                report["verified"].append(verify(world, what, workload))
                say(world, told_verified(report["verified"][-1]))
            for mask, causal in TIMED:
                if any(world.share(time.monotonic() - started > options.seconds)):
                    say(world, f"{mask} causal={causal}: no time left")
                    continue
                report["timed"].append(measure(world, timed_case(options, mask, causal)))
                say(world, told_timed(report["timed"][-1], world.size))
        finally:
            report["seconds"] = round(time.monotonic() - started, 1)
            if world.rank == 0:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(report, indent=1))
    right = all(row["passed"] for row in (*report["verified"], *report["timed"]))
    say(world, f"{'all right' if right else 'WRONG'} in {report['seconds']} s")
    return 0 if right else 5


def workload_of(pattern: dict[str, Any], **fields: Any) -> Workload:
    """A block-sparse workload, forward and backward."""
    base = {"batch_size": 1, "num_heads": 4, "num_kv_heads": 2, "mode": "both"}
    return Workload.model_validate({**base, **fields, "pattern": {"kind": "block_sparse", **pattern}})


def verified_cases(world: World, folder: Path) -> list[tuple[str, Workload]]:
    """Small masks through the kernels for D = 128 and the plain ones; odd in what goes wrong over ranks."""
    cuda = world.device.type == "cuda"
    size, dtype = (128, "bfloat16") if cuda else (32, "float32")
    whole = {"seq_len": 24 * size, "head_dim": size, "dtype": dtype}
    random = {"mask": "random", "block_size": size, "sparsity": 0.7}
    small_blocks = {**random, "block_size": size // 2}
    near = {**random, "mask": "local_window", "sparsity": 0.9}
    custom = {"mask": "custom", "mask_file": mask_with_holes(world, folder, 24), "block_size": size, "sparsity": 0.0}
    return [
        ("random", workload_of(random, **whole)),
        ("random, full", workload_of(random, **whole, causal=False)),
        ("local window", workload_of(near, **whole)),
        ("local window, full", workload_of(near, **whole, causal=False)),
        ("a mask per head", workload_of({**small_blocks, "per_head": True}, **{**whole, "head_dim": size // 2})),
        ("ragged, batch of two", workload_of(random, **{**whole, "seq_len": 23 * size + 3, "batch_size": 2})),
        ("ragged, full", workload_of(random, **{**whole, "seq_len": 23 * size + 3}, causal=False)),
        ("empty rows and columns", workload_of(custom, **whole, causal=False)),
    ]


def mask_with_holes(world: World, folder: Path, blocks: int) -> str:
    """A mask file beside the report, which all ranks of this host see: some rows and columns of blocks are empty."""
    path = folder / "mask_with_holes.npy"
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mask = np.random.default_rng(5).random((blocks, blocks)) < 0.3
        mask[[1, blocks - 1]], mask[:, [2, blocks // 2]] = False, False
        np.save(path, mask)
    world.barrier()
    return str(path)


def timed_case(options: argparse.Namespace, mask: str, causal: bool) -> Workload:
    """N = 131072, H = 16, D = 128 in blocks of 128 at 90 % sparsity."""
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    shape = {"seq_len": 131072 // options.shrink, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "dtype": dtype}
    return workload_of({"mask": mask, "block_size": 128, "sparsity": 0.9}, **shape, causal=causal)


def over_ranks(workload: Workload, world: World) -> ShardedAttention:
    """The implementation that is on trial."""
    return block_ring.build(workload, BuildContext(device=world.device, world=world))


def verify(world: World, what: str, workload: Workload) -> dict[str, Any]:
    """Largest and mean error of each part next to those of one device, and bytes against the formula."""
    context = BuildContext(device=world.device)
    inputs = random_inputs(workload, world.device, seed=1)
    found = results_of(Whole(over_ranks(workload, world)), inputs)
    single = results_of(block_sparse.build(workload, context), inputs)
    exact = results_of(reference.build(workload.replace(dtype="float64"), context), [x.double() for x in inputs])
    ratios = {part: ratio_of(*several) for part, *several in zip(PARTS, found, single, exact, strict=True)}
    ratio = max(world.share(max(ratios.values())))
    traffic = bytes_of(world, workload, inputs)
    passed = ratio <= 2.0 and traffic["counted"] == traffic["formula"]
    return {"workload": what, "label": workload.label(), "ratio": ratio, "ratios": ratios, **traffic, "passed": passed}


def results_of(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    """out, lse, dq, dk, dv of whole tensors."""
    out, *gradients = gradients_of(function, inputs)
    with torch.no_grad():
        return [out, function.with_lse(*inputs[:3])[1], *gradients]


def ratio_of(found: Tensor, single: Tensor, exact: Tensor) -> float:
    """Error over that of one device, by the worst place and by the mean; inf where not the same places are finite."""
    finite = torch.isfinite(exact)
    if not all(torch.equal(torch.isfinite(x), finite) for x in (found, single)):
        return float("inf")
    mine, theirs, size = ((x[finite].double() - exact[finite]).abs() for x in (found, single, torch.zeros_like(exact)))
    floor = torch.finfo(found.dtype).eps * float(size.max()) / 4
    by_mean = float(mine.mean()) / max(float(theirs.mean()), floor / 64)
    return max(float(mine.max()) / max(float(theirs.max()), floor), by_mean)


def bytes_of(world: World, workload: Workload, inputs: list[Tensor]) -> dict[str, Any]:
    """What the rank with most received, by mode: counted, by the formula, and what a ring of all keys would move."""
    function = over_ranks(workload, world)
    q, k, v, dout = (function.shards.take(x, world.rank) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    world.traffic.clear()
    out = function(*leaves)
    forward = world.traffic.counters()["received_bytes"]
    torch.autograd.grad(out, leaves, dout)
    both = world.traffic.counters()["received_bytes"]
    world.traffic.clear()
    modes = ("forward", "backward", "both")
    counted = [max(column) for column in zip(*world.share((forward, both - forward, both)), strict=True)]
    dense = workload.replace(pattern={"kind": "dense"})
    ring = ZIGZAG_RING if workload.causal else RING_OVERLAP
    return {
        "counted": dict(zip(modes, counted, strict=True)),
        "formula": {mode: BLOCKS.received_bytes(workload.replace(mode=mode), world.size) for mode in modes},
        "full_ring": {mode: ring.received_bytes(dense.replace(mode=mode), world.size) for mode in modes},
    }


def measure(world: World, workload: Workload) -> dict[str, Any]:
    """One row: one device, all devices, and all devices without communication and without computation."""
    inputs = random_inputs(workload, world.device, seed=2)
    alone = block_sparse.build(workload, BuildContext(device=world.device))
    whole = over_ranks(workload, world)
    traffic = bytes_of(world, workload, inputs)
    shards = [whole.shards.take(x, world.rank) for x in inputs]
    wanted = [whole.shards.take(x, world.rank) for x in gradients_of(alone, inputs)]
    apart = [relative(a, b) for a, b in zip(gradients_of(whole, shards), wanted, strict=True)]
    del wanted
    single = timed(world, alone, inputs)
    parallel = timed(world, whole, shards)
    peak_bytes = peak(world)
    compute = timed(world, over_ranks(workload, SingleRank.silenced(world)), shards)
    communication = timed(world, without_kernels(whole), shards)
    difference = max(world.share(max(apart)))
    # Both sides are rounded to the dtype, and dK and dV once more on their way home.
    allowed = 2 * max(torch.finfo(inputs[0].dtype).eps, 1e-5)
    return {
        "pattern": workload.pattern.model_dump(exclude_none=True),
        "workload": workload.label(),
        "sparsity": sparsity_of(workload),
        "single": single,
        **parallel,
        "efficiency": single["total_ms"] / (world.size * parallel["total_ms"]),
        "balance": BLOCKS.load_balance(workload, world.size),
        "compute_only": compute,
        "communication_only": communication,
        "difference_from_one_device": difference,
        "peak_bytes": peak_bytes,
        **traffic,
        "passed": difference <= allowed and traffic["counted"] == traffic["formula"],
    }


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def without_kernels(function: ShardedAttention) -> ShardedAttention:
    """The same exchanges, with nothing computed: results are whatever lies in memory."""

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, *, scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)

    def attend_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: BlockPlan, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    exchange = function._algorithm
    assert isinstance(exchange, block_ring.BlockExchange), "every rank holds rows of what is timed"
    algorithm = replace(exchange, attend=attend, attend_backward=attend_backward)
    return ShardedAttention(function.workload, function.shards, function.world, algorithm)


def told_verified(row: dict[str, Any]) -> str:
    """A line on a case that was held to float64."""
    verdict = "right" if row["passed"] else f"WRONG {row['ratios']}"
    return f"{verdict}: {row['workload']:<24} error {row['ratio']:.2f} of one device's, {told_bytes(row)}"


def told_bytes(row: dict[str, Any]) -> str:
    """Counted bytes, by the formula, and of a full ring."""
    texts = []
    for mode in ("forward", "both"):
        full = row["full_ring"][mode]
        beside = f", full ring {full / 2**20:.2f}" if full else ""
        counted, formula = row["counted"][mode], row["formula"][mode]
        texts.append(f"{mode} {counted / 2**20:.2f} MiB (formula {formula / 2**20:.2f}{beside})")
    return "received " + ", ".join(texts)


def told_timed(row: dict[str, Any], ranks: int) -> str:
    """A line on a row that was timed."""
    times = (row["single"], row, row["compute_only"], row["communication_only"])
    one, several, compute, communication = (
        f"{part['forward_ms']:.2f} + {part['backward_ms']:.2f} = {part['total_ms']:.2f}" for part in times
    )
    facts = (
        f"{row['pattern']['mask']} {row['workload']} at {row['sparsity']:.1%}: one {one} ms",
        f"{ranks} ranks {several} ms",
        f"efficiency {row['efficiency']:.1%} (λ {row['balance']:.3f})",
        f"compute alone {compute}, communication alone {communication}",
        told_bytes(row),
        f"difference {row['difference_from_one_device']:.1e}{'' if row['passed'] else '  WRONG'}",
    )
    return ", ".join(facts)


def device_name(world: World) -> str:
    """What it ran on."""
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())

"""Check, then time block-sparse attention on one GPU: ``python scripts/gpu_block_sparse.py --out FILE [--sweep]``.

Every kernel is first compared with float64 (small shapes in full, the timed shape on sampled rows), then timed against
dense attention: CUDA events, candidates interleaved round by round, median. Rates are effective TFLOP/s: FLOPs of the
visible pairs over time. ``--tiles FILE`` keeps the best tile shapes of a sweep for a later call on the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dilabench.contracts import BuildContext
from dilabench.impls.block_sparse import flash4 as block_sparse_flash4
from dilabench.impls.block_sparse import flex as block_sparse_flex
from dilabench.kernels.block_sparse.backward import block_sparse_backward
from dilabench.kernels.block_sparse.forward import block_sparse_forward
from dilabench.kernels.block_sparse.forward_sm90 import block_sparse_forward_sm90
from dilabench.kernels.block_sparse.plan import BlockPlan
from dilabench.kernels.tuning import TileConfig
from dilabench.patterns.block_masks import block_mask
from dilabench.workload.spec import Workload, WorkloadRequest
from dilabench.workload.work import attended_pairs

SPARSITIES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98)
FORWARD_TILES = [TileConfig(*tile) for tile in ((64, 64, 4, 2), (128, 64, 4, 2), (64, 128, 4, 2), (128, 64, 8, 3))]
QUERY_TILES = [TileConfig(*tile) for tile in ((64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (128, 128, 8, 2))]
KEY_TILES = [TileConfig(*tile) for tile in ((64, 64, 4, 2), (64, 128, 8, 2), (64, 64, 4, 3), (128, 128, 8, 2))]
DEVICE = torch.device("cuda")
Timed = dict[str, Callable[[], Any]]
STARTED = time.monotonic()


def workload(sparsity: float, causal: bool, block: int = 128, mask: str = "local_window", **fields: Any) -> Workload:
    """The issue's shape with changes."""
    shape = {"batch_size": 1, "seq_len": 32768, "num_heads": 16, "head_dim": 128, **fields}
    pattern = {"pattern": "block_sparse", "mask": mask, "block_size": block, "sparsity": sparsity}
    return WorkloadRequest.model_validate({**shape, **pattern, "causal": causal}).resolve("bfloat16")


def plan_of(w: Workload) -> BlockPlan:
    return BlockPlan(block_mask(w.pattern, w.seq_len, w.causal, w.num_heads), w.pattern.block_size, w.seq_len, w.causal)


def tensors(w: Workload, seed: int = 0) -> list[Tensor]:
    """q, k, v, dout: random bf16 on the GPU."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [
        torch.randn(w.batch_size, w.seq_len, heads, w.head_dim, device=DEVICE, generator=generator).bfloat16()
        for heads in (w.num_heads, w.num_kv_heads, w.num_kv_heads, w.num_heads)
    ]


def exact(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of the rows in float64, head by head over all keys."""
    outs, lses = [], []
    key = torch.arange(plan.rows, device=q.device)
    for head in range(q.shape[2]):
        kv = head // (q.shape[2] // k.shape[2])
        mask = torch.from_numpy(np.array(plan.mask[head % plan.mask_heads])).to(q.device)
        seen = mask[(rows // plan.block_size)[:, None], (key // plan.block_size)[None]]
        if plan.left >= 0:
            seen &= key[None] >= rows[:, None] - plan.left
        if plan.right >= 0:
            seen &= key[None] <= rows[:, None] + plan.right
        scores = q[:, rows, head].double() @ k[:, :, kv].double().mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        outs.append(p @ v[:, :, kv].double())
        lses.append(lse)
    return torch.stack(outs, 2), torch.stack(lses, 1)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def check_small() -> Iterator[dict[str, Any]]:
    """Kernels against float64 in full: empty rows and columns, ragged ends, windows, shared keys, a mask per head."""
    cases = [
        (2, 2048, 4, 4, 128, 128, False, (-1, -1), 1),
        (2, 2048, 4, 2, 128, 128, True, (-1, -1), 4),
        (1, 2000, 4, 4, 128, 128, True, (-1, -1), 1),
        (2, 2000, 4, 1, 64, 64, False, (-1, -1), 4),
        (1, 1999, 5, 5, 64, 128, False, (300, 77), 1),
        (1, 1024, 2, 2, 128, 256, True, (200, 0), 2),
        (1, 777, 3, 3, 32, 48, True, (-1, -1), 3),
        (1, 1024, 2, 2, 256, 128, False, (-1, -1), 1),
    ]
    for batch, length, heads, kv_heads, dim, block, causal, window, mask_heads in cases:
        blocks = -(-length // block)
        mask = np.random.default_rng(1).random((mask_heads, blocks, blocks)) < 0.4
        mask[:, 1], mask[:, :, 2] = False, False
        plan = BlockPlan(mask, block, length, causal, window)
        generator = torch.Generator(DEVICE).manual_seed(3)
        q, k, v, dout = (
            torch.randn(batch, length, h, dim, device=DEVICE, generator=generator).to(torch.bfloat16)
            for h in (heads, kv_heads, kv_heads, heads)
        )
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        want, want_lse = exact(*wide, plan, torch.arange(length, device=DEVICE))
        gradients = torch.autograd.grad(want, wide, dout.double())
        out, lse = block_sparse_forward(q, k, v, plan, scale=dim**-0.5)
        plain, _ = block_sparse_forward(q, k, v, plan, scale=dim**-0.5, config=TileConfig(64, 64, 4, 2))
        mine = block_sparse_backward(dout, q, k, v, out, lse, plan, scale=dim**-0.5)
        seen = torch.isfinite(want_lse)
        errors = {"out": relative(out, want), "plain_out": relative(plain, want)}
        errors["lse"] = (lse.double() - want_lse)[seen].abs().max().item()
        errors |= {name: relative(a, b) for name, a, b in zip(("dq", "dk", "dv"), mine, gradients, strict=True)}
        right = torch.equal(torch.isfinite(lse), seen) and not out.transpose(1, 2)[~seen].any()
        again = block_sparse_backward(dout, q, k, v, out, lse, plan, scale=dim**-0.5)
        same = all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))
        case = f"B{batch} N{length} H{heads}/{kv_heads} D{dim} block {block} causal={causal} {window} x{mask_heads}"
        passed = right and same and max(v for n, v in errors.items() if n != "lse") < 1e-2 and errors["lse"] < 2e-3
        yield {"case": case, "passed": passed, "empty_rows": int((~seen).sum()), "repeat_bitwise": same, **errors}


def median_ms(candidates: Timed, rounds: int = 7) -> dict[str, float]:
    """Median GPU milliseconds of each, interleaved round by round; one that fails is left out with its error."""
    alive = dict(candidates)
    for name, call in candidates.items():
        try:
            call()
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - a foreign kernel may fail in any way; the others are still timed
            print(f"  {name} failed:\n{traceback.format_exc(limit=-3)}", flush=True)
            del alive[name]
    samples: dict[str, list[float]] = {name: [] for name in alive}
    for _ in range(rounds):
        for name, call in alive.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end))
    return {name: statistics.median(times) for name, times in samples.items()}


def through_autograd(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Callable[[], Any]:
    """The backward pass alone, of a graph that is made once."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def cudnn(causal: bool) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            parts = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=causal).transpose(1, 2)

    return call


def flash4(causal: bool) -> Callable[..., Tensor] | None:
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError:
        return None
    return lambda q, k, v: flash_attn_func(q, k, v, causal=causal)[0]


def dense_candidates(causal: bool) -> dict[str, Callable[..., Tensor]]:
    found = {"dense sdpa-cudnn": cudnn(causal), "dense flash4": flash4(causal)}
    return {name: call for name, call in found.items() if call is not None}


def others(w: Workload, flex: bool) -> dict[str, Callable[..., Tensor]]:
    """FlexAttention and, where installed, FlashAttention 4 over the same blocks."""
    context = BuildContext(device=DEVICE)
    found: dict[str, Callable[..., Tensor]] = {}
    if flex and w.pattern.block_size % 128 == 0:
        found["flex"] = block_sparse_flex.build(w, context)
    if flash4(w.causal) is not None and w.pattern.block_size == 128:
        found["flash4"] = block_sparse_flash4.build(w, context)
    return found


def sweep(causal: bool) -> dict[str, dict[str, float]]:
    """Tile shapes at 90 % sparsity."""
    w = workload(0.9, causal)
    plan, (q, k, v, dout) = plan_of(w), tensors(w)
    scale = w.softmax_scale
    out, lse = block_sparse_forward(q, k, v, plan, scale=scale)
    forward: Timed = {}
    for config in FORWARD_TILES:
        forward[name_of(config)] = partial(block_sparse_forward, q, k, v, plan, scale=scale, config=config)
    for kind in (False, True):
        call = partial(block_sparse_forward_sm90, q, k, v, plan, scale=scale, persistent=kind)
        forward["hopper persistent" if kind else "hopper"] = call
    query: Timed = {name_of(c): partial(run_backward, c, None, dout, q, k, v, out, lse, plan) for c in QUERY_TILES}
    key: Timed = {name_of(c): partial(run_backward, None, c, dout, q, k, v, out, lse, plan) for c in KEY_TILES}
    return {"forward": median_ms(forward), "backward_query": median_ms(query), "backward_key": median_ms(key)}


def name_of(config: TileConfig) -> str:
    return f"{config.block_m}x{config.block_n} {config.num_warps}w {config.num_stages}s"


def run_backward(query: TileConfig | None, key: TileConfig | None, *parts: Any) -> Any:
    *tensors_, plan = parts
    scale = tensors_[1].shape[-1] ** -0.5
    return block_sparse_backward(*tensors_, plan, scale=scale, query_config=query, key_config=key)


def curve(w: Workload, tiles: dict[str, TileConfig], dense: dict[str, dict[str, float]], flex: bool) -> dict[str, Any]:
    """One point: times, effective rates and errors on sampled rows."""
    plan, (q, k, v, dout) = plan_of(w), tensors(w)
    scale = w.softmax_scale
    out, lse = block_sparse_forward(q, k, v, plan, scale=scale)
    rows = torch.tensor([0, 1, 127, 128, w.seq_len // 2, w.seq_len - 129, w.seq_len - 1], device=DEVICE)
    want, want_lse = exact(q, k, v, plan, rows)
    errors = {"block-sparse": relative(out[:, rows], want), "lse": (lse[:, :, rows] - want_lse).abs().max().item()}
    queries, keys = tiles.get("backward_query"), tiles.get("backward_key")
    forward: Timed = {"block-sparse": partial(block_sparse_forward, q, k, v, plan, scale=scale)}
    backward: Timed = {"block-sparse": partial(run_backward, queries, keys, dout, q, k, v, out, lse, plan)}
    mine = backward["block-sparse"]()
    for name, call in others(w, flex).items():
        try:
            errors[name] = relative(call(q, k, v)[:, rows], want)
            forward[name] = partial(no_grad, call, q, k, v)
            backward[name] = through_autograd(call, q, k, v, dout)
            errors[f"{name} gradients against ours"] = max(
                relative(a, b.double()) for a, b in zip(backward[name](), mine, strict=True)
            )
        except Exception:  # noqa: BLE001 - a foreign kernel may fail in any way; the others are still timed
            print(f"  {name} failed:\n{traceback.format_exc(limit=-3)}", flush=True)
    del mine
    times = {"forward": median_ms(forward), "backward": median_ms(backward)}
    flops = 4 * w.head_dim * attended_pairs(w)
    point: dict[str, Any] = {
        "mask": w.pattern.mask,
        "causal": w.causal,
        "block_size": w.pattern.block_size,
        "sparsity": w.pattern.sparsity,
        "density": float(plan.mask.mean()),
        "errors": errors,
        "ms": times,
    }
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        best = min(dense[direction].values())
        point[f"{direction}_tflops"] = {n: flops * factor / t / 1e9 for n, t in times[direction].items()}
        point[f"{direction}_speedup"] = {n: best / t for n, t in times[direction].items()}
    return point


def no_grad(call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return call(*inputs)


def dense_times(causal: bool) -> dict[str, dict[str, float]]:
    w = workload(0.0, causal)
    q, k, v, dout = tensors(w)
    forward: Timed = {}
    backward: Timed = {}
    for name, call in dense_candidates(causal).items():
        forward[name] = partial(no_grad, call, q, k, v)
        backward[name] = through_autograd(call, q, k, v, dout)
    return {"forward": median_ms(forward), "backward": median_ms(backward)}


def show(point: dict[str, Any]) -> str:
    head = f"{point['mask']} causal={point['causal']} block {point['block_size']} sparsity {point['sparsity']}"
    parts = [head]
    for direction in ("forward", "backward"):
        texts = [
            f"{name} {ms:.3f} ms {point[f'{direction}_tflops'][name]:.0f} TF x{point[f'{direction}_speedup'][name]:.2f}"
            for name, ms in point["ms"][direction].items()
        ]
        parts.append(f"  {direction}: " + " | ".join(texts))
    return "\n".join([*parts, f"  errors { ({n: f'{e:.1e}' for n, e in point['errors'].items()}) }"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tiles", type=Path, help="file that keeps the best tile shapes between calls")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no new part after this")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--skip-checks", action="store_true")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "points": []}

    def in_time() -> bool:
        arguments.out.write_text(json.dumps(record, indent=1))
        return time.monotonic() - STARTED < arguments.seconds

    failed = False
    if not arguments.skip_checks:
        record["checks"] = list(check_small())
        for check in record["checks"]:
            failed |= not check["passed"]
            print(check, flush=True)
    tiles: dict[str, TileConfig] = {}
    if arguments.tiles and arguments.tiles.exists():
        tiles = {name: TileConfig(**fields) for name, fields in json.loads(arguments.tiles.read_text()).items()}
    if arguments.sweep and in_time():
        record["sweep"] = {f"causal={causal}": sweep(causal) for causal in (False, True)}
        print(json.dumps(record["sweep"], indent=1), flush=True)
        known = {name_of(c): c for c in (*QUERY_TILES, *KEY_TILES)}
        for direction in ("backward_query", "backward_key"):
            times = record["sweep"]["causal=False"][direction]
            tiles[direction] = known[min(times, key=lambda name: times[name])]
        if arguments.tiles:
            arguments.tiles.write_text(json.dumps({name: asdict(config) for name, config in tiles.items()}))
    record["dense"] = {}
    for causal in (False, True):
        if not in_time():
            break
        dense = record["dense"][f"causal={causal}"] = dense_times(causal)
        print("dense", causal, dense, time.monotonic() - STARTED, flush=True)
        points = [workload(s, causal) for s in SPARSITIES]
        points += [workload(0.9, causal, mask="random"), workload(0.5, causal, mask="random")]
        points += [workload(0.9, causal, block=block) for block in (64, 256)]
        for w in points:
            if in_time():
                flex = arguments.flex and w.pattern.sparsity in (0.0, 0.5, 0.9)
                record["points"].append(curve(w, tiles, dense, flex))
                print(show(record["points"][-1]), flush=True)
    in_time()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

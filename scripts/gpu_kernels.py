"""Check, then time the fused and merge kernels on one GPU: ``python scripts/gpu_kernels.py [--sweep] [--out FILE]``.

Every workload is first compared with float64 on sampled query rows (out, lse, dq) and keys (dk, dv), then timed: CUDA
events, candidates interleaved round by round, median. Rates are effective TFLOP/s: FLOPs of the multiset of pairs
over time, whatever deduplication saves; the issue's targets stand beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dilabench.kernels.fused.backward import fused_backward
from dilabench.kernels.fused.branch_group import head_offset
from dilabench.kernels.fused.forward import fused_forward
from dilabench.kernels.fused.residue_plan import ResiduePlan, residue_plan
from dilabench.kernels.merge import merge_rows_, merge_rows_torch_
from dilabench.kernels.tuning import TileConfig

Cut = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    length: int
    heads: int
    dim: int
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    causal: bool
    target_forward: str = ""
    target_backward: str = ""

    def pairs(self) -> int:
        """Visible pairs of the multiset, all heads and batch elements, from the definition of the pattern."""
        total = 0
        for w, r in zip(self.segments, self.rates, strict=True):
            w = min(w, self.length)
            for head in range(self.heads):
                s = head_offset(head, r, self.heads, self.heads, "modulo", "head")
                for start in range(0, self.length, w):
                    rows = max(0, -(-(min(w, self.length - start) - s) // r))
                    total += rows * (rows + 1) // 2 if self.causal else rows * rows
        return total * self.batch

    def plan(self, tile: int = 64, cut: Cut | None = None) -> ResiduePlan:
        return residue_plan(
            self.segments, self.rates, self.length, self.heads, self.heads, self.causal, "modulo", "head", tile, cut
        )


GEO_SEGMENTS, GEO_RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
SHAPES = [
    Shape("longnet_128k D128", 1, 131072, 16, 128, GEO_SEGMENTS, GEO_RATES, False, "600/800 TF", "480/600 TF"),
    Shape("longnet_128k D128", 1, 131072, 16, 128, GEO_SEGMENTS, GEO_RATES, True, "450/600 TF", "360/480 TF"),
    Shape("longnet_128k D64", 1, 131072, 16, 64, GEO_SEGMENTS, GEO_RATES, False, "520/640 TF", "400/520 TF"),
    Shape("longnet_128k D64", 1, 131072, 16, 64, GEO_SEGMENTS, GEO_RATES, True, "380/480 TF", "280/400 TF"),
    # Lengths that cut a segment, and a tile.
    Shape("cut 50000 D64", 1, 50000, 16, 64, GEO_SEGMENTS, GEO_RATES, False),
    Shape("cut 50000 D64", 1, 50000, 16, 64, GEO_SEGMENTS, GEO_RATES, True),
    Shape("cut 50000 D128", 1, 50000, 16, 128, GEO_SEGMENTS, GEO_RATES, False),
    Shape("cut 50000 D128", 1, 50000, 16, 128, GEO_SEGMENTS, GEO_RATES, True),
    Shape("seed_like 2x8192", 2, 8192, 8, 64, (2048, 4096, 8192), (1, 2, 4), False, "0.30/0.20 ms"),
    Shape("seed_like 2x8192", 2, 8192, 8, 64, (2048, 4096, 8192), (1, 2, 4), True, "0.22/0.14 ms"),
]


def tensors(shape: Shape, seed: int = 0) -> list[Tensor]:
    """q, k, v, dout: random bf16 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    size = (shape.batch, shape.length, shape.heads, shape.dim)
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)]


def multiplicity(shape: Shape, head: int, i: Tensor, j: Tensor) -> Tensor:
    """C[i, j] of one head as float64."""
    count = torch.zeros(i.numel(), j.numel(), dtype=torch.float64, device=i.device)
    for w, r in zip(shape.segments, shape.rates, strict=True):
        w = min(w, shape.length)
        s = head_offset(head, r, shape.heads, shape.heads, "modulo", "head")
        count += (i[:, None] // w == j[None] // w) & ((i % w % r == s)[:, None] & (j % w % r == s)[None])
    return count * (j[None] <= i[:, None]) if shape.causal else count


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def check(
    shape: Shape, config: dict[str, TileConfig | None] | None = None, plan: ResiduePlan | None = None
) -> dict[str, float]:
    """Relative errors against float64 on sampled rows; NaN anywhere in the full outputs raises."""
    q, k, v, dout = tensors(shape, seed=1)
    config = config or {}
    plan = plan or shape.plan()
    out, lse = fused_forward(q, k, v, plan, config=config.get("forward"))
    dq, dk, dv = fused_backward(
        dout, q, k, v, out, lse, plan, query_config=config.get("query"), key_config=config.get("key")
    )
    for name, x in (("out", out), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)):
        if not torch.isfinite(x).all():
            raise AssertionError(
                f"{shape.name} causal={shape.causal}: {name} holds {(~torch.isfinite(x)).sum()} values not finite"
            )
    generator = torch.Generator().manual_seed(2)
    edges = [0, shape.length - 1, *(e for w in shape.segments for e in (w - 1, w) if e < shape.length)]
    rows = torch.tensor(
        sorted({*edges, *torch.randint(shape.length, (48,), generator=generator).tolist()}), device="cuda"
    )
    everything = torch.arange(shape.length, device="cuda")
    scale = shape.dim**-0.5
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in ("out", "lse", "dq", "dk", "dv")}
    for b, head in ((0, 0), (shape.batch - 1, 1), (0, shape.heads - 1)):
        qh, kh, vh, doh, oh = (x[b, :, head].double() for x in (q, k, v, dout, out))
        delta = (oh * doh).sum(-1)
        count = multiplicity(shape, head, rows, everything)
        logits = qh[rows] @ kh.T * scale + count.log()
        exact_lse = torch.logsumexp(logits, -1)
        p = torch.exp(logits - exact_lse[:, None])
        exact = p @ vh
        pairs["out"].append((out[b, rows, head], exact))
        pairs["lse"].append((lse[b, head, rows], exact_lse))
        ds = p * (doh[rows] @ vh.T - (exact * doh[rows]).sum(-1)[:, None])
        pairs["dq"].append((dq[b, rows, head], ds @ kh * scale))
        count = multiplicity(shape, head, everything, rows)
        p = torch.exp(qh @ kh[rows].T * scale + count.log() - lse[b, head].double()[:, None])
        pairs["dv"].append((dv[b, rows, head], p.T @ doh))
        pairs["dk"].append((dk[b, rows, head], (p * (doh @ vh[rows].T - delta[:, None])).T @ qh * scale))
    return {
        name: relative(torch.cat([a.double() for a, _ in both]), torch.cat([w for _, w in both]))
        for name, both in pairs.items()
    }


def interleaved(candidates: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Median milliseconds of each candidate, one launch sequence per round and candidate."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    flush = torch.empty(96 << 20, dtype=torch.int8, device="cuda")
    for _ in range(rounds):
        for name, call in candidates.items():
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(samples) for name, samples in times.items()}


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """``call`` captured in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def cuts(shape: Shape) -> Iterator[Cut]:
    n = len(shape.rates)
    if n == 3:
        yield from (((0, 1, 2),), ((0, 1), (2,)))
    elif shape.causal:
        yield from (((0, 1, 2), (3, 4)), ((0, 1), (2, 3, 4)), ((0, 1), (2, 3), (4,)))
    else:
        yield ((0, 1, 2, 3, 4),)


FORWARD: dict[int, list[tuple[int, ...]]] = {
    64: [(64, 128, 4, 2), (64, 64, 4, 2), (128, 128, 4, 4, True)],
    128: [(128, 64, 4, 2), (64, 64, 4, 2), (128, 128, 4, 2, True)],
}
QUERY = {64: [(64, 64, 4, 2), (128, 64, 8, 2)], 128: [(64, 64, 4, 2), (128, 128, 8, 2)]}
KEY = {64: [(64, 64, 4, 2), (64, 64, 4, 3)], 128: [(64, 64, 4, 2), (64, 64, 4, 3)]}


def warm(calls: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Those that compile and run, run once; a configuration beyond the machine's resources is reported and dropped."""
    alive = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a sweep goes on past configurations that do not fit
            print(f"  dropped {name}: {type(error).__name__} {str(error)[:90]}")
            continue
        alive[name] = call
    return alive


def time_shape(shape: Shape, sweep: bool) -> list[dict[str, object]]:
    q, k, v, dout = tensors(shape)
    pairs = shape.pairs()
    plan = shape.plan()
    out, lse = fused_forward(q, k, v, plan)
    forward: dict[str, Callable[[], object]] = {"shipped": lambda: fused_forward(q, k, v, plan)}
    backward: dict[str, Callable[[], object]] = {"shipped": lambda: fused_backward(dout, q, k, v, out, lse, plan)}
    if sweep:
        for cut in cuts(shape):
            cut_plan = shape.plan(cut=cut)
            for c in FORWARD[shape.dim]:
                forward[f"{cut} {c}"] = lambda p=cut_plan, c=c: fused_forward(q, k, v, p, config=TileConfig(*c))
        for i in range(2):
            query, key = TileConfig(*QUERY[shape.dim][i]), TileConfig(*KEY[shape.dim][i])
            backward[f"{query} {key}"] = lambda a=query, b=key: fused_backward(
                dout, q, k, v, out, lse, plan, query_config=a, key_config=b
            )
    if shape.name.startswith("seed"):
        forward["shipped, graph"] = graphed(forward["shipped"])
        backward["shipped, graph"] = graphed(backward["shipped"])
    rows = []
    for direction, calls, flops, target in (
        ("forward", forward, 4 * shape.dim * pairs, shape.target_forward),
        ("backward", backward, 10 * shape.dim * pairs, shape.target_backward),
    ):
        for name, ms in interleaved(warm(calls)).items():
            row = {"shape": shape.name, "causal": shape.causal, "direction": direction, "candidate": name, "ms": ms}
            rows.append(row | {"effective_tflops": flops / ms * 1e-9, "target": target})
    return rows


def time_merge() -> list[dict[str, object]]:
    """The merge of one r = 4 branch of 128k tokens: bytes moved over time, beside the plain PyTorch merge."""
    n, heads, dim, r = 131072, 16, 128, 4
    out = torch.randn(1, n, heads, dim, device="cuda", dtype=torch.bfloat16)
    lse = torch.randn(1, heads, n, device="cuda")
    a = heads // r
    view = torch.as_strided(
        out, (r, 1, n // r, a, dim), (heads * dim + dim, n * heads * dim, r * heads * dim, r * dim, 1)
    )
    lse_view = torch.as_strided(lse, (r, 1, a, n // r), (n + 1, heads * n, r * n, r))
    part, part_lse = (
        torch.randn(view.shape, device="cuda", dtype=torch.bfloat16),
        torch.randn(lse_view.shape, device="cuda"),
    )
    want, want_lse = view.clone(), lse_view.clone()
    merge_rows_torch_(want, want_lse, part, part_lse)
    merge_rows_(view, lse_view, part, part_lse)
    error = (relative(view, want.double()), relative(lse_view, want_lse.double()))
    calls = {
        "triton": lambda: merge_rows_(view, lse_view, part, part_lse),
        "torch": lambda: merge_rows_torch_(view, lse_view, part, part_lse),
    }
    moved = 3 * part.numel() * 2 + 3 * part_lse.numel() * 4
    return [
        {"shape": "merge r=4", "candidate": name, "ms": ms, "terabytes_per_s": moved / ms * 1e-9, "error": error}
        for name, ms in interleaved(warm(calls)).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tile shapes and branch groups too")
    parser.add_argument("--only", default="", help="substring of the workloads to run")
    parser.add_argument("--out", type=Path, help="write all rows as JSON")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        if args.only not in shape.name:
            continue
        begin = time.perf_counter()
        errors = check(shape)
        print(
            f"{shape.name} causal={shape.causal} errors " + " ".join(f"{n} {e:.1e}" for n, e in errors.items()),
            flush=True,
        )
        rows.append({"shape": asdict(shape), "errors": errors})
        for row in time_shape(shape, args.sweep):
            rows.append(row)
            print(
                f"  {row['direction']:8} {row['ms']:8.3f} ms {row['effective_tflops']:6.0f} TF"
                f"  target {row['target']:12} {row['candidate']}",
                flush=True,
            )
        print(f"  ({time.perf_counter() - begin:.0f} s)", flush=True)
        torch.cuda.empty_cache()
    merged = time_merge()
    rows += merged
    for row in merged:
        print(
            f"{row['shape']} {row['candidate']}: {row['ms']:.3f} ms, {row['terabytes_per_s']:.2f} TB/s,"
            f" error {row['error']}"
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

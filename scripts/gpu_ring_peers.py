"""The public projects that `gpu_ring.py --peers` measures beside ours: which, why not, how built, and whether right."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from gpu_ring_trial import (
    DENSE,
    Row,
    backend_of,
    catalogue,
    errors_of,
    gradients_of,
    late,
    random_inputs,
    say,
    share,
    small_workload,
    timed,
    together,
    workload_of,
)
from torch import Tensor

from dilabench.contracts import Build, BuildContext
from dilabench.distributed.whole import Sharded, Whole
from dilabench.distributed.world import World
from dilabench.engine.verify import summary, verify
from dilabench.impls import strided
from dilabench.machine import detect
from dilabench.plugins.catalogue import load_target
from dilabench.record import Case
from dilabench.workload.spec import Workload

TARGET, AIM = 1.3, 1.6
# Largest mean difference of two right bfloat16 computations, relative to the mean; a quarter of it is usual.
SAME = 0.02


@dataclass(frozen=True, slots=True)
class Peer:
    """A public project over a kernel that it can call."""

    name: str
    backend: str


def available(options: argparse.Namespace) -> Iterator[Peer]:
    """Each over the kernels that its users have: torch's fastest is cuDNN's, the package has only flash-attn 2."""
    real = options.device == "cuda" and _has_flash_attn()
    package_backend = "flash2" if real else "sdpa-flash"
    yield Peer("torch-context-parallel", "sdpa-cudnn")
    yield Peer("torch-context-parallel-alltoall", "sdpa-cudnn")
    yield Peer("ring-flash-attn-zigzag", package_backend)
    if options.slow_peers:
        yield Peer("torch-context-parallel", "sdpa-flash")
        yield Peer("ring-flash-attn-ring", package_backend)


_against: dict[Peer, tuple[str | None, Row]] = {}


def reasons_against(peer: Peer, workload: Workload, world: World) -> str:
    """Why it cannot be measured here; empty when it can."""
    case = Case(implementation=peer.name, backend=peer.backend, workload=workload, world_size=world.size)
    return "; ".join(catalogue().reasons_against(case, detect(world.device.type)))


def build(peer: Peer, workload: Workload, world: World) -> Sharded:
    """Its function of this rank's shards."""
    return target_of(peer)(workload, BuildContext(device=world.device, backend=backend_of(peer.backend), world=world))


def target_of(peer: Peer) -> Build:
    """Its `build`."""
    target: Build = load_target(catalogue().implementations.get(peer.name).target)
    return target


def wrong(peer: Peer, workload: Workload, world: World) -> str | None:
    """What `dilabench verify` says against it on a workload, of the first rank that says something."""
    verification = verify(Whole(build(peer, workload, world)), workload, device=world.device)
    told = share(world, None if verification.passed else summary(verification))
    return next((f"rank {rank}: {why}" for rank, why in enumerate(told) if why), None)


def differences(world: World, function: Sharded, shards: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    """Mean difference of a call's out, dq, dk and dv from whole tensors, relative to their mean; the worst rank's."""
    found = gradients_of(function, shards)
    parts = ("out", "dq", "dk", "dv")
    own = [_difference(a, function.shards.take(b, world.rank)) for a, b in zip(found, wanted, strict=True)]
    return dict(zip(parts, map(max, zip(*share(world, own), strict=True)), strict=True))


def _difference(found: Tensor, wanted: Tensor) -> float:
    # NaN is as far as can be.
    value = float((found.float() - wanted.float()).abs().mean() / wanted.float().abs().mean())
    return value if value == value else float("inf")


def _has_flash_attn() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    except ImportError:
        return False


def verify_all(world: World, options: argparse.Namespace, report: Row) -> None:
    """Hold every peer to the oracle on a small workload."""
    small = small_workload(options, **DENSE, seq_len=2048)
    for peer in available(options):
        row, why = together(world, partial(_held, world, peer, small))
        report["verified_peers"].append({"peer": peer.name, "backend": peer.backend, **(row or failed(why))})
        tell(world, "small", report["verified_peers"][-1])


def _held(world: World, peer: Peer, small: Workload) -> Row:
    reasons = reasons_against(peer, small, world)
    if reasons:
        return {"status": "skipped", "why": reasons}
    if peer not in _against:
        # The same on every preset.
        _against[peer] = wrong(peer, small, world), errors_of(world, target_of(peer), small, backend_of(peer.backend))
    against, row = _against[peer][0], dict(_against[peer][1])
    return row | ({"status": "wrong", "why": against} if against else {"status": "right"})


def rows(world: World, options: argparse.Namespace, report: Row, preset: str, single_ms: float | None) -> Iterator[Row]:
    """Every peer on a preset, held to one device with our kernel, which takes `single_ms` where that is known."""
    workload = workload_of(preset, options)
    inputs = random_inputs(workload, world.device, seed=2)
    one = strided.build(workload, BuildContext(device=world.device, backend=backend_of(options.backend)))
    wanted, why = together(world, partial(gradients_of, one, inputs))
    for verified in report["verified_peers"]:
        peer = Peer(verified["peer"], verified["backend"])
        row = {"preset": preset, **verified}
        if verified["status"] == "right" and wanted is None:
            row |= failed(f"one device: {why}")
        elif verified["status"] == "right":
            if late(world, options, f"{preset} {peer.name}"):
                continue
            found, why_not = together(world, partial(timed_row, world, peer, workload, inputs, wanted))
            row |= found or failed(why_not)
        if row["status"] == "measured" and single_ms is not None:
            row["efficiency"] = single_ms / (world.size * row["total_ms"])
        yield row


def timed_row(world: World, peer: Peer, workload: Workload, inputs: list[Tensor], wanted: list[Tensor]) -> Row:
    """A peer's time on a workload, or why it has none."""
    reasons = reasons_against(peer, workload, world)
    if reasons:
        return {"status": "skipped", "why": reasons}
    function = build(peer, workload, world)
    shards = [function.shards.take(x, world.rank) for x in inputs]
    row: Row = {"differences": differences(world, function, shards, wanted)}
    far = {part: value for part, value in row["differences"].items() if not value <= SAME}
    if far:
        return row | {"status": "wrong", "why": f"mean differences from one device: {far}"}
    found = timed(world, function, shards)
    found.pop("calls")
    return row | {
        "status": "measured",
        **found,
        "tokens_per_s": round(workload.tokens / found["total_ms"] * 1e3),
    }


def failed(why: str | None) -> Row:
    """A row that came to nothing."""
    return {"status": "failed", "why": why}


def compare(world: World, row: Row, rows: list[Row]) -> None:
    """Our tokens/s over those of the fastest peer; rows with a target must reach this one, too."""
    measured = [one for one in rows if one["status"] == "measured"]
    if not measured or "failed" in row:
        return
    best = max(measured, key=lambda one: float(one["tokens_per_s"]))
    ratio = row["tokens_per_s"] / best["tokens_per_s"]
    row |= {
        "best_peer": f"{best['peer']} ({best['backend']})",
        "over_best_peer": ratio,
        "target_over_peer": TARGET,
    }
    reached = ratio >= TARGET or not row["target_efficiency"]
    row["meets"] = row["meets"] and reached
    say(
        world,
        f"{row['preset']:<13} {row['algorithm']:<14} {ratio:.2f} times the tokens/s of {row['best_peer']} "
        f"(target {TARGET}, aim {AIM}){'' if reached else '  BELOW TARGET'}",
    )


def tell(world: World, what: str, row: Row) -> None:
    """A peer's line."""
    name = f"{what:<13} peer {row['peer']} ({row['backend']})"
    if row["status"] == "right":
        say(world, f"{name} right, error {row['ratio']:.2f} times one device's")
    elif row["status"] != "measured":
        say(world, f"{name} {row['status'].upper()} {row['why']}")
    else:
        efficiency = f"efficiency {row['efficiency']:.1%}, " if "efficiency" in row else ""
        say(
            world,
            f"{name} {world.size} ranks {row['forward_ms']:.2f} + {row['backward_ms']:.2f} = {row['total_ms']:.2f} ms, "
            f"{efficiency}differs by {max(row['differences'].values()):.2%} from one device",
        )

"""Public projects as peers of our implementations, registered like a third party's plug-in."""

from dataclasses import replace

from dilabench.plugins import Capabilities, Implementation, hookimpl
from dilabench.workload.equal_parts import against_equal_pairs, against_equal_parts

HALF = frozenset({"float16", "bfloat16"})
# Over flash-attn itself, or over FlashAttention 2 as built into torch where that is not installed.
FLASH_ATTN_2 = ("flash2", "sdpa-flash")
STAND_IN = (
    "over -b flash2 it calls flash-attn itself, over -b sdpa-flash torch's own FlashAttention 2, whose gradients are "
    "copied into the buffers that flash-attn would write to"
)
CONTEXT_PARALLEL = (
    "shards are given cut, as after torch's own sharding of buffers: cutting is outside the timed call, DTensor's "
    "dispatch inside",
    "k and v are copied into [B, H, N, D] by torch, inside the timed call",
    "enables DTensor's context-parallel dispatch for the rest of the process",
)
NOT_COUNTED = "what it sends goes past our counters: its bytes are not known"

_IN_ORDER = Capabilities(
    patterns=frozenset({"dense"}),
    dtypes=HALF,
    window=False,
    head_dim_multiple=8,
    max_head_dim=256,
    max_world_size=None,
    check_ranks=against_equal_parts,
)
_ZIGZAG = replace(_IN_ORDER, causal=frozenset({True}), check_ranks=against_equal_pairs)


def _context_parallel(name: str, summary: str, rotation: str) -> Implementation:
    return Implementation(
        name,
        f"torch's context_parallel around scaled_dot_product_attention, {summary}",
        f"dilabench.impls.peers.torch_context_parallel:build_{rotation}",
        supports=replace(_ZIGZAG, devices=frozenset({"cuda"})),
        requires=("torch>=2.10",),
        uses_backend=True,
        backends=("sdpa-cudnn", "sdpa-flash"),
        quirks=(*CONTEXT_PARALLEL, NOT_COUNTED),
    )


def _ring_flash_attn(name: str, function: str, build: str, supports: Capabilities, quirk: str) -> Implementation:
    return Implementation(
        name,
        f"{function} of the package ring_flash_attn",
        f"dilabench.impls.peers.ring_flash_attn:{build}",
        supports=supports,
        requires=("ring_flash_attn",),
        uses_backend=True,
        backends=FLASH_ATTN_2,
        quirks=(quirk, STAND_IN, NOT_COUNTED),
    )


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    """Attention over ranks: torch's own, and the package that most others took theirs from."""
    return [
        _context_parallel("torch-context-parallel", "K and V gathered (its default)", "allgather"),
        _context_parallel("torch-context-parallel-alltoall", "K and V from rank to rank", "alltoall"),
        _ring_flash_attn(
            "ring-flash-attn-zigzag",
            "zigzag_ring_flash_attn_func",
            "build_zigzag",
            _ZIGZAG,
            "gives a wrong dq in float32, where it adds to the buffer that it reads",
        ),
        _ring_flash_attn(
            "ring-flash-attn-ring",
            "ring_flash_attn_func",
            "build_ring",
            replace(_IN_ORDER, dtypes=frozenset({"bfloat16"})),
            "gives dq in bfloat16 whatever q is",
        ),
    ]

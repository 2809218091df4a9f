"""The shipped configurations compile for sm_90a without a GPU: tensor-core and bulk-copy instructions, no spills in
any loop.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile with")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float32

from dilabench.kernels import combine, merge
from dilabench.kernels.block_sparse import forward as block_sparse_forward
from dilabench.kernels.block_sparse import plan as block_plan
from dilabench.kernels.dq_accumulate import _convert_kernel
from dilabench.kernels.fused import backward as fused_backward
from dilabench.kernels.fused import forward as fused_forward
from dilabench.kernels.fused.branch_group import SPAN_COLUMNS, VISIT_COLUMNS
from dilabench.kernels.fused.document_lists import AT_ONCE, BLOCK_TOKENS, REQUEST_COLUMNS, lists_kernel
from dilabench.kernels.fused.partials import _REGISTERS, _merge_kernel
from dilabench.kernels.fused.residue_plan import residue_plan
from dilabench.kernels.fused.row_layout import PER_LENGTH, Results
from dilabench.kernels.fused.sm90 import backward as sm90_backward
from dilabench.kernels.fused.sm90 import forward as sm90_forward
from dilabench.kernels.fused.sm90 import narrow_forward as sm90_narrow_forward
from dilabench.kernels.fused.zero_keys import _zero_keys_kernel
from dilabench.kernels.launch_cache import LaunchCache
from dilabench.kernels.tuning import (
    Direction,
    TileConfig,
    is_persistent,
    padded_dim,
    product_columns,
    select_kernel,
    tile_columns,
)
from tests.conftest import slow

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="needs compiled kernels: TRITON_INTERPRET=1"
)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KERNELS = {
    "forward": fused_forward._forward_kernel,
    "backward_query": fused_backward._query_kernel,
    "backward_key": fused_backward._key_kernel,
}
QUERY_ROWS = {"q_desc", "out_desc", "dout_desc", "dq_desc"}
FLOATS = {"lse_ptr", "lses_ptr", "mass_ptr", "stats_ptr", "slots_ptr"}
OF_DOCUMENTS: dict[str, object] = {"visits_ptr": None}
RESULTS = {"out_ptr", "outs_ptr", "dq_ptr", "dk_ptr", "dv_ptr"}
NOT_ALIGNED = {
    *PER_LENGTH,
    "n_kinds",
    "n_heads",
    "n_kv_heads",
    "heads_per_kv",
    "heads_per_mask",
    "n_tiles",
    "rows",
    "key_rows",
    "left",
    "right",
    "step",
    "width",
}
# Bytes of values parked in local memory while loops run: none that the loop over whole tiles writes, so nearly free.
# The forward's shape is 15 % faster than the best one without (see tuning.py), and so is the causal backward of D64
# held to the registers that let three programs be resident (4.18 ms against 4.81 when last measured both ways).
PARKED_BYTES = {
    (128, False, "forward", False): 32,
    (64, True, "backward_key", False): 24,
    (128, True, "backward_key", False): 8,
    # In the loop over tiles that the causal edge cuts: few of a list.
    (192, True, "backward_key", False): 260,
    (256, True, "backward_key", False): 280,
    (192, False, "backward_key", False): 60,
    (64, False, "backward_key", True): 12,
    (64, True, "backward_key", True): 48,
    (128, True, "backward_key", True): 12,
    (192, False, "backward_key", True): 68,
    (192, True, "backward_key", True): 148,
    (256, True, "backward_key", True): 240,
}
# Some of them in the loop over whole tiles, and yet 10.5 ms against 12.5 of the best shape without.
PARKED_IN_LOOP = {(192, False, "backward_key")}
# The same over block masks, where single tiles have several shares and where none has: (128, True, False) is D128,
# causal, of whole lists.
BLOCK_PARKED_BYTES = {(128, True, False): 16, (128, False, True): 36, (128, True, True): 20}


def assembled(source: ASTSource, options: dict[str, int | None], capability: int = 90):
    """A kernel for sm_90a or another GPU, and what the assembler said of its registers and spills."""
    said = io.StringIO()
    # A kernel from Triton's cache would not be assembled.
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "spill stores" in said.getvalue()
    return kernel, said.getvalue()


def compiled(kernel, constants: dict[str, object], tiles: dict[str, str], config: TileConfig):
    """`assembled`, with the argument types and alignment that the launchers pass; ``tiles`` by descriptor."""
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name in tiles:
            signature[name] = f"tensordesc<bf16[{tiles[name]}]>"
        elif name in ("scale", "scale_log2", "cap"):
            signature[name] = "fp32"
        else:
            pointer = "*bf16" if name in RESULTS else "*fp32" if name in FLOATS else "*i32"
            signature[name] = pointer if name.endswith("_ptr") else "i32"
            if name not in NOT_ALIGNED:
                attributes[(place,)] = [["tt.divisibility", 16]]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}
    return assembled(ASTSource(kernel, signature, values, attributes), options)


def fused(
    dim: int,
    causal: bool,
    direction: str,
    config: TileConfig,
    again: bool,
    cut: bool,
    hard: bool = False,
    blocks: bool = False,
    shares: bool = False,
    documents: bool = False,
    capped: bool = False,
):
    """A fused kernel as the first group of branches runs it, with a null mass, or ``again`` as later groups do, adding
    to the result; ``cut``: for a sequence that ends inside a tile; ``hard``: for a window, in segments that the
    rate does not divide; ``blocks``: over a block mask, where tiles may have
    several ``shares``; ``documents``: over several sequences, one behind the other; ``capped``: with a softcap.
    """
    kernel = KERNELS[direction]
    head, tail = tile_columns(dim, 2)
    constants = {
        "HEAD_DIM": dim,
        "HEAD": head,
        "TAIL": tail,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": causal,
        "SHIFTED": hard or documents,
        "WINDOWED": hard,
        "MERGE": again,
        "COMPACT": False,
        "ADD": again,
        "GROUP": 1,
        "RAGGED": cut,
        "CUT": cut,
        "PRECISION": "tf32",
        "STAGES": config.num_stages,
        "OVERLAPS": not blocks,
        "RANGES": 0,
        "ONE_CLASS": blocks,
        "PER_HEAD": False,
        "SLOT_DIM": padded_dim(dim),
        "bounds_ptr": None,
    }
    if not capped:
        constants["cap"] = None
    if again or blocks:
        constants["mass_ptr"] = None
    if blocks:
        constants["heads_ptr"] = None
    if not documents:
        constants |= OF_DOCUMENTS
    if not shares:
        constants["slots_ptr"] = None
    tiles = {name: f"1,1,1,{tile}" for name, tile in tiles_of(kernel, head, config, tail).items()}
    if not tail:
        constants |= {name: None for name in kernel.arg_names if name.endswith("_tail_desc")}
    return compiled(kernel, constants, tiles, config)


def tiles_of(kernel, dim: int, config: TileConfig, tail: int = 0) -> dict[str, str]:
    """Rows and columns of each descriptor's tiles."""
    names = [name for name in kernel.arg_names if name.endswith("_desc")]
    rows = {name: config.block_m if name.replace("_tail", "") in QUERY_ROWS else config.block_n for name in names}
    return {name: f"{rows[name]},{tail if '_tail' in name else dim}" for name in names}


def loops_with_products(cubin: bytes, folder: Path) -> list[str]:
    """Machine code of every backward branch's body that holds matrix instructions."""
    (folder / "kernel.cubin").write_bytes(cubin)
    command = [str(TOOLS / "cuobjdump"), "-sass", str(folder / "kernel.cubin")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), code) for at, code in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?;)", listing)]
    # Behind the last exit lie the slow paths of barrier waits, which jump back into the loops they serve.
    end = max(at for at, code in lines if code.startswith("EXIT"))
    bodies = []
    for at, code in lines:
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", code)
        if jump and int(jump[1], 16) < at < end:
            body = "\n".join(c for a, c in lines if int(jump[1], 16) <= a <= at)
            if "HGMMA" in body:
                bodies.append(body)
    return bodies


MASKS = [(False, False), (False, True), (True, False)]


def plain_tiles(direction: Direction, dim: int, causal: bool, cut: bool = False, blocks: bool = False) -> TileConfig:
    kernel, tiles = select_kernel(direction, dim, causal=causal, largest_tile=128, cut=cut, blocks=blocks)
    assert kernel == "plain"
    return tiles


SHAPES = tuple(product((64, 128, 192, 256), (False, True), KERNELS))
# These have code of their own for a sequence that ends inside a tile.
CUT = [(*shape, True) for shape in SHAPES if not shape[1] or shape[2] == "backward_key"]
QUICK = [(128, True, "forward", False), (128, True, "backward_query", False), (128, True, "backward_key", True)]
# Again: as later groups of branches run them, which need the most registers; as the first group, one head dim under a
# mask. A causal mask adds code to each; the others are slow.
SHIPPED = [
    pytest.param(*shape, again, marks=() if again and shape in QUICK else pytest.mark.slow)
    for shape in [*((*shape, False) for shape in SHAPES), *CUT]
    for again in (False, True)
    if again or shape[:2] == (128, True)
]


@pytest.mark.parametrize(("dim", "causal", "direction", "cut", "again"), SHIPPED, ids=str)
def test_shipped_configurations(
    dim: int, causal: bool, direction: Direction, cut: bool, again: bool, tmp_path: Path
) -> None:
    config = plain_tiles(direction, dim, causal, cut)
    kernel, report = fused(dim, causal, direction, config, again, cut)
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert not re.search(r"\batom\b|\bred\.", ptx), "atomics would make the result depend on timing"
    if direction == "forward" and again:
        assert all_have_read_what_the_last_write_changes(ptx), "lse is written before it has been read for the merge"
    spilled = int(re.search(r"(\d+) bytes spill stores", report)[1])
    assert spilled <= PARKED_BYTES.get((dim, causal, direction, cut), 0), report
    assert "serialized" not in report, report
    assert kernel.metadata.shared <= 227 * 1024
    if config.max_registers is not None:
        assert int(re.search(r"Used (\d+) registers", report)[1]) <= config.max_registers
    if "0 bytes stack frame" in report:
        # Nothing lies in local memory: no loop can read or write it there.
        return
    loops = loops_with_products(kernel.asm["cubin"], tmp_path)
    assert loops
    parked = (dim, causal, direction, cut) in PARKED_BYTES
    if (dim, causal, direction) in PARKED_IN_LOOP:
        return
    assert not re.search(r"\bSTL\b" if parked else r"\b(STL|LDL)\b", loops[0]), (
        "a spill inside the loop over whole tiles"
    )
    assert parked or not any(re.search(r"\bSTL\b", body) for body in loops), "a spill inside a loop"


@pytest.mark.parametrize("dim", [80, *(slow(dim) for dim in (96, 128))])
def test_the_forward_of_few_keys(dim: int) -> None:
    name, config = select_kernel("forward", dim, causal=True, largest_tile=128, hopper=True, windowed=True, keys=100)
    assert name == "plain"
    kernel, report = fused(dim, True, "forward", config, False, cut=True, hard=True)
    assert "0 bytes spill stores" in report
    # Programs wait for what they copy, so several share a multiprocessor.
    assert 65536 // (128 * int(re.search(r"Used (\d+) registers", report)[1])) >= 3
    assert 3 * (kernel.metadata.shared + 1024) <= 228 * 1024


# Both masks where bytes are parked, else one of them. Without shares the backward pass of keys has less code.
QUICK_BLOCKS = [(128, True, "forward", False), (128, True, "backward_key", True)]
BLOCK_SHAPES = [
    *QUICK_BLOCKS,
    *(
        slow(*shape)
        for shape in (
            *((128, causal, "backward_key", False) for causal in (False, True)),
            (128, False, "backward_key", True),
            (128, True, "backward_query", False),
            *((64, False, direction, False) for direction in KERNELS),
            (64, True, "backward_key", True),
        )
    ),
]


@pytest.mark.parametrize(("dim", "causal", "direction", "shares"), BLOCK_SHAPES, ids=str)
def test_block_sparse_configurations(
    dim: int, causal: bool, direction: Direction, shares: bool, tmp_path: Path
) -> None:
    config = plain_tiles(direction, dim, causal, blocks=True)
    cut = direction != "backward_key" and not causal
    kernel, report = fused(dim, causal, direction, config, False, cut, blocks=True, shares=shares)
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert not re.search(r"\batom\b|\bred\.", ptx), "atomics would make the result depend on timing"
    assert "serialized" not in report
    parked = BLOCK_PARKED_BYTES.get((dim, causal, shares), 0) if direction == "backward_key" else 0
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= parked
    assert kernel.metadata.shared <= 227 * 1024
    if not parked and "0 bytes stack frame" not in report:
        # The first loop is over wholly visible tiles; causal edge and window cut about one tile of a list.
        over_visible_tiles = loops_with_products(kernel.asm["cubin"], tmp_path)[0]
        assert not re.search(r"\b(STL|LDL)\b", over_visible_tiles), "a spill inside the main loop"


def specialised(
    dim: int,
    causal: bool,
    cut: bool,
    null_mass: bool,
    ranges: int,
    merge: bool,
    hard: bool = False,
    compact: bool = False,
    documents: bool = False,
):
    """The Hopper kernel as its launchers ask for it; ``hard``: as of `fused`, in several batch elements; ``documents``:
    as of `fused`.
    """
    name, config = select_kernel("forward", dim, causal=causal, largest_tile=128, hopper=True)
    assert name == "specialized"
    kernel, (_, tail) = sm90_forward._forward_kernel, tile_columns(dim, 2)
    constants = {"DIM": dim, "TAIL": tail, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "CAUSAL": causal}
    constants |= {
        "STAGES": config.num_stages,
        "RAGGED": cut,
        "RANGES": ranges,
        "MERGE": merge,
        "COMPACT": compact,
        "BATCHED": hard,
        "SHIFTED": hard or documents,
        "WINDOWED": hard,
    } | ({} if documents else OF_DOCUMENTS)
    constants["PERSISTENT"] = is_persistent(dim, causal, cut or ranges or merge)
    constants["HALVES"] = causal and dim == 128 and not hard and not ranges
    constants |= {"TAKE_TURNS": dim < 128, "LARGEST": 2.0**64 if dim < 128 else 0.0}
    missing = [("mass_ptr", null_mass), ("bounds_ptr", ranges), *((f"{x}_tail_desc", tail) for x in "qkv")]
    constants |= {name: None for name, there in missing if not there}
    rows = {"q": config.block_m // 2, "k": config.block_n, "v": config.block_n}
    side = [1] * hard
    tiles = {f"{x}_desc": [*side, rows[x], dim - tail] for x in "qkv"}
    tiles |= {f"{x}_tail_desc": [*side, rows[x], tail] for x in "qkv"}
    return gluon_compiled(kernel, constants, tiles, {"num_warps": config.num_warps})


def gluon_compiled(kernel, constants: dict[str, object], tiles: dict[str, list[int]], options: dict[str, int | None]):
    """A kernel in Gluon with the argument types and alignment that its launchers pass; ``tiles`` by descriptor."""
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name in tiles:
            layout = NVMMASharedLayout.get_default_for(tiles[name], bfloat16)
            signature[name] = f"tensordesc<bf16[{','.join(map(str, tiles[name]))}],{layout!r}>"
        elif name.endswith("_ptr"):
            signature[name] = {"out_ptr": "*bf16", "lse_ptr": "*fp32", "mass_ptr": "*fp32"}.get(name, "*i32")
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
            if name not in NOT_ALIGNED:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return assembled(GluonASTSource(kernel, signature, values, attributes), options)


# Null mass and merging are of dilated attention, ranges of rows that keys are hidden from of block-sparse attention.
SPECIALISED = [
    (128, False, False, False, 0),
    *(
        slow(*shape)
        for shape in (
            (96, False, True, False, 0),
            (128, False, True, True, 0),
            *((128, *mask, False, 0) for mask in MASKS[1:]),
            (128, False, True, False, 2),
            (128, True, False, False, 2),
            # Of one range the mask that parks most with two.
            (128, True, False, False, 1),
            (80, True, False, False, 0),
            (192, False, True, False, 0),
            (192, True, False, False, 2),
            (256, True, False, False, 0),
        )
    ),
]
# Bytes parked while ranges of rows hide keys (besides the causal edge 6.3 against 7.8 ms of the kernel without roles),
# while results are merged, behind the last product, and where a program may begin again: what one consumer reads back
# in every step costs less than renewing the maximum would (2.12 against 2.22 ms, D96).
SPECIALISED_PARKED = {
    (80, True, 0): 12,
    (96, False, 0): 20,
    (128, False, 2): 8,
    (128, True, 1): 8,
    (128, True, 2): 20,
    (192, True, 2): 8,
    "merging": 16,
}


@pytest.mark.parametrize(("dim", "causal", "cut", "null_mass", "ranges"), SPECIALISED)
def test_specialised_forward(dim: int, causal: bool, cut: bool, null_mass: bool, ranges: int) -> None:
    built, report = specialised(dim, causal, cut, null_mass, ranges, merge=False)
    ptx = built.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "setmaxnreg" in ptx, "the producer warp must give its registers to the consumers"
    parked = SPECIALISED_PARKED.get((dim, causal, ranges), 0)
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= parked, report
    assert "serialized" not in report, report
    assert built.metadata.shared <= 227 * 1024


def narrow(
    dim: int,
    causal: bool,
    cut: bool,
    merge: bool,
    config: TileConfig,
    hard: bool = False,
    compact: bool = False,
    documents: bool = False,
):
    """The Hopper kernel for narrow heads."""
    kernel = sm90_narrow_forward._narrow_kernel
    head, (_, rest) = padded_dim(dim), product_columns(dim)
    constants = {"HEAD_DIM": dim, "HEAD": head, "REST": rest, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    constants |= {
        "CAUSAL": causal,
        "SHIFTED": hard or documents,
        "WINDOWED": hard,
        "RAGGED": cut,
        "MERGE": merge,
        "COMPACT": compact,
        "LARGEST": 2.0**64,
    } | ({} if documents else OF_DOCUMENTS)
    constants |= {"mass_ptr": None} if merge else {}
    rows = {"q": config.block_m, "k": config.block_n, "v": config.block_n}
    tiles = {f"{x}_desc": [1, 1, 1, rows[x], head] for x in "qkv"}
    return gluon_compiled(kernel, constants, tiles, {"num_warps": 4, "maxnreg": config.max_registers})


# Every form of one head dim, and two of the others.
NARROW_FORMS = [
    (True, False, False, False),
    (False, True, False, True),
    (True, False, True, False),
    (False, True, False, False),
    *((False, False, merge, False) for merge in (False, True)),
]


@pytest.mark.parametrize(
    ("dim", "causal", "cut", "merge", "compact"),
    [
        (64, False, True, True, False),
        *(
            slow(*shape)
            for shape in (
                *((64, *form) for form in NARROW_FORMS),
                *((dim, *form) for dim in (48, 32) for form in [(False, True, True, False), *NARROW_FORMS[:1]]),
            )
        ),
    ],
)
def test_narrow_forward(dim: int, causal: bool, cut: bool, merge: bool, compact: bool) -> None:
    name, config = select_kernel("forward", dim, causal=causal, largest_tile=128, hopper=True)
    assert name == "narrow"
    built, report = narrow(dim, causal, cut, merge, config, compact=compact)
    assert "wgmma.mma_async" in built.asm["ptx"]
    assert "cp.async.bulk.tensor" in built.asm["ptx"]
    assert "0 bytes spill stores" in report
    assert "serialized" not in report
    resident = 65536 // (128 * config.max_registers)
    assert resident == (4 if causal else 3)
    assert resident * (built.metadata.shared + 1024) <= 228 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("dim", [128, 192])
def test_specialised_forward_of_several_branches(dim: int, merge: bool) -> None:
    built, report = specialised(dim, False, cut=True, null_mass=False, ranges=0, merge=merge, compact=not merge)
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= SPECIALISED_PARKED["merging"], report
    assert "serialized" not in report, report
    assert built.metadata.shared <= 227 * 1024


def test_the_specialised_forward_is_given_all_its_arguments_by_both_that_call_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are launched by name only on Hopper, where a missing argument would show."""
    wanted, given = set(sm90_forward._forward_kernel.arg_names), []

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda **arguments: given.append(set(arguments) - {"num_warps", "launch_pdl"})

        def warmup(self, grid: tuple[int], **arguments: object) -> None:
            self[grid](**arguments)

    monkeypatch.setattr(sm90_forward, "_forward_kernel", Recorder())
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(block_sparse_forward, "on_hopper", lambda _: True)
    q = torch.zeros(1, 256, 2, 128, dtype=torch.bfloat16)
    plan = residue_plan((256,), (1,), 256, 2, 2, False)
    _, config = select_kernel("forward", 128, causal=False, largest_tile=128, hopper=True)
    lse = torch.zeros(1, 2, 256)
    launch = sm90_forward.group_launch(
        dict.fromkeys("qkv", q), Results(q.clone(), lse), plan.groups[0], False, 0.1, config
    )
    LaunchCache().launch("forward", [{"q": q}], lambda: [launch])
    mask = block_plan.BlockPlan(np.ones((1, 2, 2), bool), 128, 256, causal=False)
    monkeypatch.setattr(block_sparse_forward, "on_hopper", lambda _: True)
    block_sparse_forward.block_sparse_forward(q, q, q, mask, scale=0.1)
    # Two forms of the first are compiled.
    assert given == [wanted] * 4


def test_merge_kernel_reads_and_writes_sixteen_bytes_at_a_time() -> None:
    kernel = merge._merge_rows_kernel
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in ("DIM", "ROWS", "COLUMNS"):
            signature[name], values[(place,)] = "constexpr", {"DIM": 128, "ROWS": 32, "COLUMNS": 128}[name]
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if "lse" in name else "*bf16"
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if name.startswith(("out_", "part_")) and "lse" not in name:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    built, report = assembled(source, {"num_warps": 4})
    ptx = built.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "0 bytes spill stores" in report
    assert all_have_read_what_the_last_write_changes(ptx)
    assert ptx.index("bar.sync") < ptx.index("st.global"), "rows of out are weighed by lse, too"


# Bytes of values parked in local memory, in a pass that a softcap makes longer.
CAPPED_PARKED_BYTES = {(128, "backward_key"): 116, (256, "backward_query"): 16, (256, "backward_key"): 336}


@pytest.mark.parametrize(
    ("dim", "direction"),
    [
        pytest.param(dim, kernel, marks=() if (dim, kernel) == (128, "forward") else pytest.mark.slow)
        for dim in (64, 128, 256)
        for kernel in KERNELS
    ],
)
def test_with_a_softcap(dim: int, direction: Direction) -> None:
    config = replace(plain_tiles(direction, dim, causal=True), max_registers=None)
    kernel, report = fused(dim, True, direction, config, again=False, cut=False, hard=True, capped=True)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 227 * 1024
    spilled = int(re.search(r"(\d+) bytes spill stores", report)[1])
    assert spilled <= CAPPED_PARKED_BYTES.get((dim, direction), 0), report


def all_have_read_what_the_last_write_changes(ptx: str) -> bool:
    """Whether a program's threads wait for each other between its last read of memory and its last write.

    Triton lets several threads read an element that one of them writes afterwards, and says nothing of the order.
    """
    return ptx.rindex("ld.global") < ptx.rindex("bar.sync") < ptx.rindex("st.global")


@pytest.mark.parametrize(
    ("parts", "result"),
    [
        ("*bf16", "*bf16"),
        *(slow(*types) for types in (("*bf16", "*fp32"), ("*fp32", "*bf16"))),
    ],
)
@pytest.mark.parametrize("has_lse", [False, True], ids=["sum", "softmax"])
def test_the_kernel_of_four_parts_reads_and_writes_sixteen_bytes_at_a_time(
    has_lse: bool, parts: str, result: str
) -> None:
    kernel = combine._combine_kernel
    # Strides are counted in units of 16 bytes.
    tile: dict[str, object] = {"DIM": 128, "ROWS": 16, "COLUMNS": 128, "PARTS": 4, "UNIT": 8, "ONTO": False}
    of_lse = ("lse_ptr", *(f"lse{i}_ptr" for i in range(4)))
    pointers = {"total_ptr": result} | {f"part{i}_ptr": parts for i in range(4)}
    if has_lse:
        pointers |= dict.fromkeys(of_lse, "*fp32")
    else:
        tile |= dict.fromkeys(of_lse)
    types = {name: pointers.get(name, "constexpr" if name in tile else "i32") for name in kernel.arg_names}
    values = {(place,): tile[name] for place, name in enumerate(kernel.arg_names) if name in tile}
    aligned = [["tt.divisibility", 16]]
    attributes = {(place,): aligned for place, name in enumerate(kernel.arg_names) if name in pointers}
    source = ASTSource(kernel, types, values, attributes)
    built, report = assembled(source, {"num_warps": 4})
    ptx = built.asm["ptx"]
    # A tile is 16 * 128 elements for 128 threads.
    for access, kind, tiles in (("ld", parts, 4), ("st", result, 1)):
        vectors = len(re.findall(rf"\b{access}\.global\.\S*v4\.b32", ptx))
        assert vectors == tiles * (2 if kind == "*bf16" else 4)
    assert "0 bytes spill stores" in report


# Bytes parked outside of the loops, by head dim.
BACKWARD_PARKED = {48: 0, 64: 8, 96: 24, 128: 12}


def specialised_backward(
    dim: int,
    causal: bool,
    ragged: bool,
    heads_per_kv: int | None,
    shared: bool,
    hard: bool = False,
    documents: bool = False,
):
    """The Hopper kernel of the backward pass: of later groups of branches, or of block masks (``shared``); ``hard``: as
    of `fused`, in several batch elements.
    """
    name, config = select_kernel("backward_key", dim, causal=causal, largest_tile=128, hopper=True)
    assert name == "at_once"
    kernel, head, (first, rest) = sm90_backward._backward_kernel, padded_dim(dim), product_columns(dim)
    held = head <= 64
    constants = {"DIM": dim, "FIRST": first, "REST": rest, "HEAD": head, "HELD": held, "STAGES": config.num_stages}
    constants |= {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": causal,
        "BATCHED": hard and dim == head,
        "SHIFTED": hard or documents,
        "WINDOWED": hard,
        "RAGGED": ragged,
        "ADD": not shared,
        "SHARED": shared,
        "PER_HEAD": False,
        "COUNTED": not shared,
        "SKIPS": causal and not (hard or shared or documents),
    } | ({} if documents else OF_DOCUMENTS)
    if not shared:
        constants["slots_ptr"] = None
    if heads_per_kv is not None:
        constants["heads_per_kv"] = heads_per_kv
    # Shape and kind of each tile that is no 64 rows of queries.
    sides = (1,) * hard if dim == head else (1, 1, 1)
    tiles = dict.fromkeys(("k_desc", "v_desc"), (*sides, config.block_n, head))
    share = (config.block_m // 2, head) if held else (config.block_m, head // 2)
    sums = {"stats_desc": (2 * config.block_m,), "sums_desc": (*sides, *share)}
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name.endswith("_desc"):
            element = float32 if name in sums else bfloat16
            shape = list((tiles | sums).get(name, (*sides, config.block_m, head)))
            layout = NVMMASharedLayout.get_default_for(shape, element)
            signature[name] = f"tensordesc<{element}[{','.join(map(str, shape))}],{layout!r}>"
        elif name.endswith("_ptr"):
            signature[name] = {"dk_ptr": "*bf16", "dv_ptr": "*bf16", "slots_ptr": "*fp32"}.get(name, "*i32")
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
            if name not in NOT_ALIGNED:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return assembled(GluonASTSource(kernel, signature, values, attributes), {"num_warps": config.num_warps})


@pytest.mark.parametrize(
    ("dim", "causal", "ragged", "heads_per_kv", "shared"),
    [
        (128, False, True, None, False),
        (128, True, False, 1, True),
        (48, False, True, None, False),
        (64, True, False, 1, False),
        (128, True, False, 1, False),
        (96, False, True, None, False),
        (64, False, True, None, False),
    ],
)
@pytest.mark.slow
def test_specialised_backward(dim: int, causal: bool, ragged: bool, heads_per_kv: int | None, shared: bool) -> None:
    built, report = specialised_backward(dim, causal, ragged, heads_per_kv, shared)
    ptx = built.asm["ptx"]
    assert "cp.reduce.async.bulk.tensor" in ptx, "dQ is added by the copy engine"
    assert "setmaxnreg" in ptx, "the producer warp must give its registers to the consumers"
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= BACKWARD_PARKED[dim], report
    assert "serialized" not in report, report
    assert built.metadata.shared <= 227 * 1024


# Bytes parked over documents, by direction, head dim and mask. 48 columns are padded to 64, and park no more.
DOCUMENTS_PARKED = {
    ("backward_key", 64, True): 44,
    ("backward_key", 64, False): 36,
    ("backward_key", 128, True): 28,
    ("at once", 64, True): 32,
    ("at once", 64, False): 8,
    ("at once", 128, True): 16,
    ("at once", 128, False): 8,
}


# Where nothing is parked, one head dim under each mask.
NOT_PARKED = ("forward", "backward_query", "specialised")


# The kernels themselves are quick, and documents in them go through the interpreter.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "dim", "causal"),
    [
        *DOCUMENTS_PARKED,
        *((direction, *shape) for direction in NOT_PARKED for shape in ((128, True), (48, False))),
    ],
)
def test_documents(direction: str, dim: int, causal: bool) -> None:
    name, config = select_kernel("forward", dim, causal=causal, largest_tile=128, hopper=True)
    if direction == "at once":
        built, report = specialised_backward(dim, causal, not causal, None, shared=False, documents=True)
    elif direction == "specialised" and name == "narrow":
        built, report = narrow(dim, causal, not causal, False, config, documents=True)
    elif direction == "specialised":
        built, report = specialised(dim, causal, not causal, null_mass=False, ranges=0, merge=False, documents=True)
    else:
        config = plain_tiles(direction, dim, causal, cut=True)
        built, report = fused(dim, causal, direction, config, True, cut=True, documents=True)
    assert "wgmma.mma_async" in built.asm["ptx"]
    parked = DOCUMENTS_PARKED.get((direction, dim, causal), 0)
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= parked, report
    assert "serialized" not in report, report


# Bytes parked for windows and where the rate does not divide the segment, by direction, head dim and mask.
HARD_PARKED = {
    ("backward_key", 64, False): 124,
    ("backward_key", 64, True): 124,
    ("backward_key", 128, False): 16,
    ("backward_key", 128, True): 20,
    ("specialised", 64, False): 104,
    ("at once", 64, False): 52,
    ("at once", 64, True): 28,
    ("at once", 128, False): 36,
    ("at once", 128, True): 36,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "dim", "causal"),
    [
        *HARD_PARKED,
        *((direction, 128, True) for direction in NOT_PARKED),
        *((direction, 64, False) for direction in NOT_PARKED[:2]),
    ],
)
def test_windows_in_segments_that_no_rate_divides(direction: str, dim: int, causal: bool) -> None:
    name, config = select_kernel("forward", dim, causal=causal, largest_tile=128, hopper=True)
    if direction == "at once":
        built, report = specialised_backward(dim, causal, not causal, None, shared=False, hard=True)
    elif direction == "specialised" and name == "narrow":
        built, report = narrow(dim, causal, not causal, True, config, hard=True)
    elif direction == "specialised":
        built, report = specialised(dim, causal, not causal, null_mass=False, ranges=0, merge=True, hard=True)
    else:
        config = plain_tiles(direction, dim, causal, cut=True)
        built, report = fused(dim, causal, direction, config, True, cut=True, hard=True)
    assert "wgmma.mma_async" in built.asm["ptx"]
    parked = HARD_PARKED.get((direction, dim, causal), 0)
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= parked, report
    assert "serialized" not in report, report


OF_LISTS = {
    "BLOCK": AT_ONCE,
    "SPAN": SPAN_COLUMNS,
    "VISIT": VISIT_COLUMNS,
    "REQUEST": REQUEST_COLUMNS,
    "TOKENS": BLOCK_TOKENS,
}
OF_ZERO_KEYS = {"HEADS": 16, "ROWS": 128}


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (lists_kernel, OF_LISTS),
        (_zero_keys_kernel, OF_ZERO_KEYS | {"APART": False}),
        slow(_zero_keys_kernel, OF_ZERO_KEYS | {"APART": True}),
    ],
    ids=["lists", "zero keys of all branches", "zero keys of each"],
)
def test_kernels_of_packings(kernel, constants: dict[str, object]) -> None:
    _, report = compiled(kernel, constants, {}, TileConfig(64, 64, 4, 1))
    assert "0 bytes spill stores" in report


@pytest.mark.parametrize(
    ("documents", "uniform"),
    [
        (True, True),
        *(slow(*form) for form in ((True, False), (False, True), (False, False))),
    ],
)
def test_merge_of_five_branches(documents: bool, uniform: bool) -> None:
    """Of a single sequence as many threads are resident as of documents that it goes through."""
    constants = {"GROUPS": 5, "BEFORE_CLASSES": 8, "UNIFORM": uniform, "UNIT": 8}
    constants |= {"HEAD_DIM": 48, "COLUMNS": 64, "ROWS": 32}
    if not documents:
        constants |= dict.fromkeys(("documents_ptr", "blocks_ptr"))
    kernel, report = compiled(_merge_kernel, constants, {}, TileConfig(64, 64, 4, 3, _REGISTERS if uniform else None))
    assert "0 bytes spill stores" in report
    assert "ld.global.v4.b32" in kernel.asm["ptx"]


def test_sums_of_dq_are_read_in_whole_vectors() -> None:
    pointers = {"sums_ptr": "*fp32", "dq_ptr": "*bf16", "scale": "fp32"}
    names = _convert_kernel.arg_names
    constants = {"COLUMNS": 512, "ROWS": 8}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = ("sums_ptr", "dq_ptr", "width", "step")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(_convert_kernel, signature, values, attributes)
    kernel, report = assembled(source, {"num_warps": 4, "num_stages": 1, "maxnreg": None})
    ptx = kernel.asm["ptx"]
    assert "0 bytes spill stores" in report
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx

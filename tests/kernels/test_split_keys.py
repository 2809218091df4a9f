"""The kernels of split keys through Triton's interpreter, against the formula in float64."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

from triton.compiler import ASTSource, CompiledKernel

from dilabench.kernels.key_segments import KeyBranches, Processors, columns_for, split_for, tile_for
from dilabench.kernels.split_keys import _split_kernel
from dilabench.patterns.answers import StridedSegments
from tests.conftest import slow
from tests.kernels.test_sm90_compile import assembled

# What Triton reads as integers lies anywhere, what it is given as tensors at a multiple of 16 bytes.
ALIGNED = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "branches_ptr")
# Bytes of shared memory of a program.
HOPPER, AMPERE, ADA = 227 * 1024, 163 * 1024, 99 * 1024
CAPABILITIES = {HOPPER: 90, AMPERE: 80, ADA: 89}
NEEDS_COMPILER = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="needs compiled kernels: TRITON_INTERPRET=1"
)
KINDS = ("dense", "causal", "window", "band", "dilated", "dilated causal", "dilated window")


@pytest.fixture(scope="module", params=["float32 1", *map(slow, ("float32 2", "float16 2", "bfloat16 2"))])
def errors(
    request: pytest.FixtureRequest, interpreted: Callable[..., dict[str, list[float]]]
) -> dict[str, list[float]]:
    return interpreted("kernels/interpreted_split_keys.py", request.param.split())


@pytest.mark.parametrize("held", ["batch", "lengths", "spans", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_formula(errors: dict[str, list[float]], kind: str, held: str) -> None:
    """The interpreter cuts bfloat16 off where a GPU rounds."""
    found = errors[f"{kind}, {held}"]
    assert found
    assert max(found) <= 1, found


def test_attention_gives_kernels_the_numbers_unread(errors: dict[str, list[float]]) -> None:
    """Of a cache and of packed sequences, in tensors or on the host."""
    assert max(errors["attention"]) < 16


def segments(*branches: tuple[int, int, tuple[int, ...]]) -> list[list[StridedSegments]]:
    """Of each head, by length, rate and the residue of each head."""
    heads = len(branches[0][2])
    return [[StridedSegments(length, rate, of[head]) for length, rate, of in branches] for head in range(heads)]


def test_heads_of_a_group_are_one_tile_only_with_the_same_keys() -> None:
    cpu = torch.device("cpu")
    assert KeyBranches.of(segments((64, 1, (0, 0, 0, 0))), 2, cpu).heads == 2
    assert KeyBranches.of(segments((64, 2, (0, 0, 1, 1))), 2, cpu).heads == 2
    assert KeyBranches.of(segments((64, 1, (0,) * 4), (64, 2, (0, 1, 0, 1))), 2, cpu).heads == 1


def test_keys_that_a_row_reads_at_most() -> None:
    branches = KeyBranches.of(segments((64, 1, (0, 0)), (512, 4, (0, 1))), 1, torch.device("cpu"))
    assert branches.most_keys(4096, None) == 128
    assert branches.most_keys(40, None) == 40
    assert branches.most_keys(4096, 16) == 16


@pytest.mark.parametrize("programs", [1, 8, 512, 10_000])
def test_keys_are_split_until_the_gpu_is_full(programs: int) -> None:
    _, splits, items = split_for(programs, 4, 2**17, (128, 128), 2, Processors(132, HOPPER))
    assert items == 1
    assert splits == 1 or programs * (splits - 1) < 4 * 264
    assert programs * splits >= 132


@pytest.mark.parametrize(
    ("dims", "columns"),
    [
        ((576, 512), (512, 64, 512)),
        ((192, 128), (128, 64, 128)),
        ((72, 64), (64, 16, 64)),
        ((48, 40), (32, 16, 64)),
        # Two parts would have as many columns as one.
        ((24, 16), (32, 0, 16)),
        ((256, 128), (256, 0, 128)),
        ((8, 24), (16, 0, 32)),
        # Values of the same width are padded, too.
        ((192, 192), (256, 0, 256)),
    ],
)
def test_keys_of_two_powers_of_two_are_not_padded(dims: tuple[int, int], columns: tuple[int, int, int]) -> None:
    assert columns_for(*dims) == columns


def assembled_for(dims: tuple[int, int], rows: int, dtype: str, memory: int) -> tuple[CompiledKernel, str]:
    """The kernel of this tile for the GPU with this much shared memory, and what the assembler says of it."""
    tile = tile_for(rows, dims, 4 if dtype == "fp32" else 2, memory)
    columns, rest, value_columns = columns_for(*dims)
    constants = {
        "HEADS": 1,
        "LEFT": False,
        "RIGHT": True,
        "WHOLE": False,
        "UNIT": 4 if dtype == "fp32" else 8,
        "PRECISION": "tf32",
        "DIM": dims[0],
        "VALUE_DIM": dims[1],
        "COLUMNS": columns,
        "REST": rest,
        "VALUE_COLUMNS": value_columns,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "spans_ptr": None,
        "bounds_ptr": None,
        "key_bounds_ptr": None,
    }
    of_pointers = {**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{dtype}"), "out_ptr": "*fp32", "lse_ptr": "*fp32"}
    types = {
        name: "constexpr"
        if name in constants
        else of_pointers.get(name, "*i32" if name.endswith("_ptr") else "fp32" if name == "scale" else "i32")
        for name in _split_kernel.arg_names
    }
    places = {name: (at,) for at, name in enumerate(_split_kernel.arg_names)}
    values = {places[name]: value for name, value in constants.items()}
    attributes = {places[name]: [["tt.divisibility", 16]] for name in ALIGNED}
    source = ASTSource(_split_kernel, types, values, attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return assembled(source, options, CAPABILITIES[memory])


@NEEDS_COMPILER
@pytest.mark.parametrize(("dim", "rows"), [slow(64, 32), (128, 1), slow(64, 1), slow(128, 32)])
def test_tiles_spill_nothing_and_copy_sixteen_bytes_at_a_time(dim: int, rows: int) -> None:
    built, report = assembled_for((dim, dim), rows, "bf16", HOPPER)
    assert "0 bytes spill stores" in report
    assert "cp.async.cg.shared.global" in built.asm["ptx"]


@NEEDS_COMPILER
@pytest.mark.parametrize("memory", [HOPPER, slow(AMPERE), ADA])
@pytest.mark.parametrize("dtype", ["bf16", slow("fp32")])
@pytest.mark.parametrize(("dims", "rows"), [((576, 512), 128), slow((576, 512), 1), slow((512, 512), 8)])
def test_wide_tiles_fit_into_shared_memory(dims: tuple[int, int], rows: int, dtype: str, memory: int) -> None:
    built, _ = assembled_for(dims, rows, dtype, memory)
    assert built.metadata.shared <= memory

"""The kernels over blocks selected per token compile for sm_90a without a GPU: with tensor cores, asynchronous copies
and no atomics, and with few spills.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile with")

from triton.compiler import ASTSource

from dilabench.kernels.launch_cache import Launch, LaunchCache
from dilabench.kernels.selected import tiles
from dilabench.kernels.selected.attention import selected_backward, selected_forward
from tests.conftest import slow
from tests.kernels.test_sm90_compile import assembled, pytestmark  # noqa: F401 - not under the interpreter

TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int16: "i16"}

# name: (H, K, D, block, S, form, causal)
SHAPES = {
    "nsa by query": (64, 4, 128, 64, 16, "query", True),
    "nsa gathered": (64, 4, 128, 64, 16, "gathered", True),
    "msa": (64, 8, 128, 128, 16, "gathered", True),
    "moba": (32, 32, 128, 512, 8, "gathered", True),
    "D64": (32, 2, 64, 64, 16, "gathered", False),
    "single tokens": (128, 1, 128, 1, 64, "query", True),
}
KERNELS = {
    "nsa by query": ("by_query._forward_kernel", "by_query._gradient_kernel"),
    "nsa gathered": (
        "gathered._gathered_kernel",
        "gathered._merge_kernel",
        "by_key._key_kernel",
        "by_key._sum_kernel",
        "lists._shares_kernel",
    ),
    "msa": ("gathered._gathered_kernel", "by_key._key_kernel"),
    "moba": ("gathered._gathered_kernel", "by_key._key_kernel"),
    "D64": ("gathered._gathered_kernel", "by_key._key_kernel"),
    "single tokens": ("by_query._forward_kernel", "by_query._gradient_kernel", "by_token._sum_kernel"),
}
WITHOUT_PRODUCTS = {"gathered._merge_kernel", "by_key._sum_kernel", "by_token._sum_kernel", "lists._shares_kernel"}
# One tile of keys stays, and none is read while another is multiplied.
WITHOUT_STAGES = {("nsa gathered", "gathered._gathered_kernel"), ("D64", "gathered._gathered_kernel")}
# Bytes that the assembler spills: mostly of dK and dV, whose sums take half of the registers.
SPILLED = {
    ("nsa gathered", "gathered._merge_kernel"): 8,
    ("nsa gathered", "by_key._key_kernel"): 116,
    ("msa", "by_key._key_kernel"): 64,
    ("moba", "by_key._key_kernel"): 112,
    ("D64", "by_key._key_kernel"): 16,
}
QUICK = ("nsa by query", "by_query._forward_kernel")
CASES = [
    pytest.param(shape, kernel, marks=() if (shape, kernel) == QUICK else pytest.mark.slow, id=f"{shape}, {kernel}")
    for shape, kernels in KERNELS.items()
    for kernel in kernels
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would be launched."""
    recorded: list[Launch] = []
    monkeypatch.setattr(LaunchCache, "launch", lambda _self, _name, _tensors, prepare: recorded.extend(prepare()))
    return recorded


def launched(launches: list[Launch], shape: str, rows: int) -> list[Launch]:
    """What a forward and a backward pass over so many tokens launch."""
    heads, kv_heads, dim, block, slots, form, causal = SHAPES[shape]
    q = torch.zeros(1, rows, heads, dim, dtype=torch.bfloat16)
    k = torch.zeros(1, rows, kv_heads, dim, dtype=torch.bfloat16)
    given = (torch.full((1, rows, kv_heads, slots), -1, dtype=torch.int32), block, causal, 0.1)
    out, lse = selected_forward(q, k, k, *given, form=form)
    selected_backward(q, q, k, k, out, lse, *given, form=form)
    made = launches.copy()
    launches.clear()
    return made


def compiled_for(launch: Launch) -> tuple[Any, ...]:
    """A kernel and all values that it is compiled for."""
    _, arguments = launch.arguments(False)
    own = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    specialized = {parameter.name for parameter in launch.kernel.params if not parameter.do_not_specialize}
    values = {name: arguments[name] for name in own}
    values |= {
        name: arguments[name]
        for name in specialized - own
        if isinstance(arguments[name], int) or arguments[name] is None
    }
    return launch.kernel.fn.__name__, tuple(sorted(values.items()))


def compiled(launch: Launch) -> tuple[Any, str]:
    """With the types and the alignment of the arguments on a GPU."""
    kernel, (_, arguments) = launch.kernel, launch.arguments(False)
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in constants or value is None:
            signature[name], values[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], attributes[(place,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    options = {name: arguments.get(name) for name in ("num_warps", "num_stages", "maxnreg")}
    return assembled(ASTSource(kernel, signature, values, attributes), options)


@pytest.mark.parametrize(("shape", "kernel"), CASES)
def test_kernels_compile(launches: list[Launch], shape: str, kernel: str) -> None:
    module, _, name = kernel.partition(".")
    chosen = [
        launch
        for launch in launched(launches, shape, 2 * max(SHAPES[shape][3], 64))
        if launch.kernel.fn.__name__ == name and launch.kernel.fn.__module__.endswith(f"selected.{module}")
    ]
    assert chosen
    for launch in chosen:
        binary, report = compiled(launch)
        ptx = binary.asm["ptx"]
        assert not re.search(r"\b(atom|red)\.", ptx), "atomics would make the result depend on timing"
        if kernel not in WITHOUT_PRODUCTS:
            assert "wgmma.mma_async" in ptx or "mma.sync" in ptx
            assert "cp.async" in ptx or (shape, kernel) in WITHOUT_STAGES
        assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= SPILLED.get((shape, kernel), 0), report
        assert binary.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("shape", ["nsa by query", slow("nsa gathered"), "moba"])
def test_another_length_compiles_nothing(monkeypatch: pytest.MonkeyPatch, launches: list[Launch], shape: str) -> None:
    """All lengths have several parts, and lists enough for a sample: both limits are divided, to hold few bytes."""
    limits = {"LEAST_READ": tiles.LEAST_READ // 128, "PARTIAL_BYTES": tiles.PARTIAL_BYTES // 128}
    for name, value in {"ALIKE": 0.0, **limits}.items():
        monkeypatch.setattr(tiles, name, value)
    kernels = [set(map(compiled_for, launched(launches, shape, rows))) for rows in (525, 677, 736)]
    assert kernels[0] == kernels[1] == kernels[2]

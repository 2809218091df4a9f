"""What torch and Triton do not promise: one list, held to the sources and to what is installed; and without it."""

import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import dilabench
from dilabench.attention import dilated_attention
from dilabench.choice import computation
from dilabench.choice.descriptors import unmet
from dilabench.choice.implementations import IMPLEMENTATIONS
from dilabench.choice.rings import RINGS
from dilabench.choice.rules import Choice
from dilabench.kernels import lse
from dilabench.kernels.fused import row_layout
from dilabench.kernels.gluon_names import GLUON, gone
from dilabench.kernels.tuning import select_kernel
from dilabench.machine import GpuInfo, Machine
from tests.kernels.private_names import ON_CUDA, PRIVATE, UNDOCUMENTED

LISTED = {*PRIVATE, *GLUON}
# What Triton documents.
DOCUMENTED = ("triton.jit", "triton.cdiv", "triton.next_power_of_2", "triton.language", "triton.__version__")
# Of named tuples, and of other packages; and what `torch.compiler.assume_constant_result` sets of a function of ours:
# without it, tests of compiled calls would fail.
NOT_TORCHS = {
    "_dynamo_marked_constant",
    *("_asdict", "_make", "_replace", "_fields", "_forkserver", "_forkserver_alive_fd"),
    # Of threads and their pools.
    *("_current_frames", "_threads_queues", "_worker", "_WorkItem"),
    *("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    # Of transformers.
    *("_attn_implementation", "_supports_sdpa", "_can_set_experts_implementation"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Full names of what a module takes of torch and Triton, and '?._name' of attributes of what it does not tell."""
    known: dict[str, str] = {}
    for node in nodes:
        found: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            for each in node.names:
                yield each.name
                found.append((each.asname, each.name) if each.asname else (each.name.partition(".")[0],) * 2)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [(each.asname or each.name, f"{node.module}.{each.name}") for each in node.names]
            yield from (name for _, name in found)
        known |= {local: name for local, name in found if name.partition(".")[0] in ("torch", "triton")}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            inner, names = node.value, [node.attr]
            while isinstance(inner, ast.Attribute):
                inner, names = inner.value, [inner.attr, *names]
            first = known.get(inner.id) if isinstance(inner, ast.Name) else None
            yield ".".join((first, *names)) if first else f"?.{node.attr}"


def test_every_private_name_is_listed() -> None:
    paths = [*Path(dilabench.__file__).parent.rglob("*.py")]
    trees = {path: [*ast.walk(ast.parse(path.read_text()))] for path in paths}
    ours: set[str] = set()
    for nodes in trees.values():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                ours.add(node.attr)
    last = {part for name in LISTED for part in name.split(".") if is_private(part)}
    used: set[str] = set()
    unlisted: list[str] = []
    for path, nodes in trees.items():
        for name in {*names_of(nodes)}:
            parts = name.split(".")
            if parts[0] not in ("?", "torch", "triton"):
                continue
            if parts[0] == "?":
                if is_private(parts[1]) and parts[1] not in ours | NOT_TORCHS:
                    unlisted += [] if parts[1] in last else [f"{path}: {parts[1]}"]
                    used.add(parts[1])
            elif any(map(is_private, parts)) or (
                parts[0] == "triton" and len(parts) > 1 and not name.startswith(DOCUMENTED)
            ):
                of_list = {each for each in LISTED if f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.")}
                unlisted += [] if of_list else [f"{path}: {name}"]
                used |= of_list
    assert not unlisted, "\n".join(unlisted)
    assert [name for name in LISTED if name not in used and name.rpartition(".")[2] not in used] == []


def test_no_listed_name_is_gone() -> None:
    there = LISTED if torch.cuda.is_available() else LISTED - ON_CUDA
    assert gone([*there, *UNDOCUMENTED]) == []


def test_what_is_gone_is_told() -> None:
    assert gone(["torch._C._no_such_name", "torch._C._is_tracing", "no_such_package.x"]) == [
        "torch._C._no_such_name",
        "no_such_package.x",
    ]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    for function in (row_layout.on_hopper,):
        function.cache_clear()
    yield torch.device("cuda", 0)
    for function in (row_layout.on_hopper,):
        function.cache_clear()


def selects(hopper: bool) -> str:
    return select_kernel("forward", 64, causal=False, largest_tile=1024, itemsize=2, hopper=hopper).kernel


def test_plain_kernels_serve_without_gluon(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("triton.experimental.gluon")]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.delattr(sys.modules["triton.experimental"], "gluon", raising=False)
    assert not row_layout.on_hopper(hopper)
    assert "the plain kernels serve" in caplog.text
    assert selects(hopper=False) == "plain"


@pytest.mark.parametrize("name", ["warpgroup_mma", "fence_async_shared"])
def test_plain_kernels_serve_where_gluon_has_changed(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert row_layout.on_hopper(hopper)
    assert selects(hopper=True) != "plain"
    for function in (row_layout.on_hopper,):
        function.cache_clear()
    monkeypatch.delattr(importlib.import_module("triton.experimental.gluon.language.nvidia.hopper"), name)
    assert not row_layout.on_hopper(hopper)


def test_an_older_triton_is_refused_by_name_and_merges_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    gpu = Machine(device="cuda", gpus=(GpuInfo(name="NVIDIA H200", compute_capability="9.0"),))
    ours = [one for one in (*IMPLEMENTATIONS, *RINGS) if any("triton>=" in each for each in one.requires)]
    assert {"fused", "fused-sharded", "block-sparse", "native-sparse", "block-sparse-ring"} <= {
        one.name for one in ours
    }
    monkeypatch.setattr("dilabench.choice.descriptors.installed_version", lambda _name: "3.4.0")
    for one in ours:
        assert unmet(one.requires, gpu)[0].startswith(f"needs triton {lse.LEAST_TRITON} or newer, have 3.4.0"), one.name
    monkeypatch.setattr(triton, "__version__", "3.4.0")
    lse.has_kernel.cache_clear()
    assert not lse.has_kernel(torch.device("cuda", 0), torch.bfloat16)
    lse.has_kernel.cache_clear()


def test_dense_kernels_serve_where_descriptors_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(computation, "choose", lambda *_: Choice("fused", None, "rule"))
    monkeypatch.setitem(sys.modules, "triton.tools.tensor_descriptor", None)  # type: ignore[arg-type]
    hidden: dict[str, ModuleType] = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith(("dilabench.kernels.fused.", "dilabench.impls.fused"))
    }
    for name in hidden:
        monkeypatch.delitem(sys.modules, name)
    q, k, v = (torch.randn(1, 71, 2, 16) for _ in range(3))
    branches = {"segment_lengths": (24,), "dilation_rates": (2,)}
    out: Tensor = dilated_attention(q, k, v, **branches)  # type: ignore[arg-type]
    assert "fused cannot be loaded, and dense kernels serve" in caplog.text
    torch.testing.assert_close(out, dilated_attention(q, k, v, **branches, backend="math"))  # type: ignore[arg-type]

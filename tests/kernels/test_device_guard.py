"""Kernels run on the device and on a stream of their tensors, whichever device is the current one: on a faked second
GPU, and on two.
"""

import ast
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dilabench
from dilabench.attention import MultiheadDilatedAttention, attention, block_sparse_attention, dilated_attention
from dilabench.backends.adapt import CUDA_KERNEL, adapted
from dilabench.compat.torchscale import DilatedAttention as FromTorchscale
from dilabench.kernels import bwd_preprocess, combine, gates, launch_cache, lse, merge
from dilabench.kernels.block_sparse import key_lists, selected_lists
from dilabench.kernels.block_sparse.lists import Selection, Visibility
from dilabench.kernels.fused import wider_rows
from dilabench.kernels.launch_cache import Launch, LaunchCache
from dilabench.kernels.selected import by_key, by_query, by_token, gathered
from dilabench.kernels.selected import lists as lists_of_tokens
from dilabench.kernels.selected.attention import selected_backward, selected_forward
from dilabench.patterns.window_sink import WindowSinkPattern
from tests.kernels.gated_sums import gated_sum

SECOND = 1


class Gpus:
    """Two GPUs: which is current, and which was for each launch."""

    def __init__(self) -> None:
        self.current, self.stream = 0, 7
        self.launched_on: list[int] = []
        self.streams: list[int] = []

    def exchange(self, device: int) -> int:
        before = self.current
        if device >= 0:
            self.current = device
        return before

    def __getitem__(self, _grid: Any) -> Any:
        return self.run

    def run(self, *_arguments: Any, stream: int | None = None, **_options: Any) -> Any:
        self.launched_on.append(self.current)
        self.streams += [stream] if stream is not None else []
        return self


class Kernel:
    """In the place of a kernel, compiled to what tells on which GPU it runs."""

    def __init__(self, gpus: Gpus, arg_names: Sequence[str]) -> None:
        self.gpus, self.arg_names = gpus, arg_names

    def __getitem__(self, _grid: Any) -> Any:
        return self.gpus.run

    def warmup(self, **_options: Any) -> None:
        self.gpus.run()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    """The first is current, and tensors say that they are on the second."""
    faked = Gpus()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: faked.current)
    monkeypatch.setattr(torch.cuda, "_exchange_device", faked.exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", faked.exchange)
    monkeypatch.setattr(launch_cache, "CompiledKernel", Gpus)
    active = SimpleNamespace(get_current_stream=lambda device: 100 * device + faked.stream)
    monkeypatch.setattr(launch_cache, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch_cache, "record", lambda values: None)
    for module, names in (
        (gates, ("_gated_sum_kernel", "_gated_kernel")),
        (combine, ("_combine_kernel",)),
        (selected_lists, ("_by_query_kernel", "_mark_kernel", "_by_key_kernel")),
        (key_lists, ("_add_slots_kernel",)),
        (merge, ("_merge_rows_kernel",)),
        (wider_rows, ("_widen_kernel",)),
        (bwd_preprocess, ("_bwd_preprocess_kernel",)),
        (lists_of_tokens, ("_lists_kernel", "_shares_kernel")),
        (by_query, ("_forward_kernel", "_gradient_kernel")),
        (gathered, ("_gathered_kernel", "_merge_kernel")),
        (by_key, ("_key_kernel", "_sum_kernel")),
        (by_token, ("_sum_kernel",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Kernel(faked, getattr(module, name).arg_names))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(Tensor, "get_device", lambda _: SECOND)
    for module in (lse, combine):
        monkeypatch.setattr(module, "has_kernel", lambda _device, _dtype: True)
    for module in (merge, combine):
        module._cache.cache_clear()
    yield faked
    for module in (merge, combine):
        module._cache.cache_clear()


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape or (1, 32, 2, 16))


def row_sums() -> Tensor:
    return rows(1, 2, 32)


def selection() -> Selection:
    indices = torch.zeros(2, 2, 1, dtype=torch.int32)
    return Selection(indices, 16, Visibility(32, True))


def lists() -> key_lists.KeyLists:
    numbers = torch.zeros(1, 2, 3, dtype=torch.int32)
    return key_lists.KeyLists(numbers, numbers, 4, numbers, numbers)


def attend_by_another_package() -> None:
    current = torch.cuda.current_device

    def forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        assert current() == SECOND
        return q, q[..., 0].mT

    def backward(_dout: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        assert current() == SECOND
        return tensors[:3]

    kernel, kernel_backward = adapted(forward, backward, CUDA_KERNEL)  # type: ignore[arg-type]
    q = rows()
    kernel(q, q, q, causal=True, scale=1.0)
    kernel_backward(q, q, q, q, q, row_sums(), causal=True, scale=1.0)


def attend_to_selected_blocks(block: int, form: Any) -> None:
    q, sums = rows(), row_sums()
    given = (torch.zeros(1, 32, 2, 1, dtype=torch.int32), block, True, 1.0)
    selected_forward(q, q, q, *given, form=form)
    selected_backward(q, q, q, q, q, sums, *given, form=form)


LAUNCHES: dict[str, Callable[[], object]] = {
    "merge": lambda: lse.merge_rows_(rows(), row_sums(), rows(), row_sums()),
    "sink": lambda: lse.add_null_mass_(rows(), row_sums(), row_sums()),
    "sum of gates": lambda: gates.gated_sum([rows()], row_sums().mT),
    "gates": lambda: gates.gated(rows(), rows(1, 32, 2)),
    "sum": lambda: combine.sum_parts_(rows(), [(rows(), 0)]),
    "combine": lambda: combine.combine_(rows(), row_sums(), [(rows(), row_sums(), 0)]),
    "lists by query": lambda: selected_lists.lists_by_query(selection(), 16, 16),
    "lists by key": lambda: selected_lists.lists_by_key(selection(), 16, 16),
    "slots": lambda: key_lists.add_slots(rows(2, 4, 2, 16, 16), lists(), rows(), rows(), 1.0, LaunchCache()),
    "selected by query": lambda: attend_to_selected_blocks(16, "query"),
    "selected and gathered": lambda: attend_to_selected_blocks(16, "gathered"),
    "selected tokens": lambda: attend_to_selected_blocks(1, "query"),
    "columns": lambda: wider_rows.with_columns(rows(), 8, LaunchCache(), "columns"),
    "columns ahead": lambda: wider_rows.make_ready(24, 8, torch.float32, torch.device("cpu")),
}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_a_kernel_runs_on_the_device_of_its_tensors(gpus: Gpus, launch: Callable[[], object]) -> None:
    # A merge of one layout is repeated from the third time on.
    for _ in range(4):
        launch()
    assert {*gpus.launched_on} == {1}
    assert gpus.current == 0


def test_a_kernel_of_another_package_runs_on_the_device_of_its_tensors(gpus: Gpus) -> None:
    attend_by_another_package()
    assert gpus.current == 0


def test_a_repeated_launch_is_made_on_the_current_stream_of_its_device_which_tables_are_recorded_on(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[int, list[Any]]] = []
    monkeypatch.setattr(launch_cache, "record", lambda values: recorded.append((gpus.stream, [*values])))
    kernel = Kernel(gpus, ("x_ptr", "table_ptr"))
    cache, x, table = LaunchCache(), rows(), torch.empty(3)

    def launch(stream: int) -> list[int]:
        gpus.stream = stream
        recorded.clear()
        launches = lambda: [Launch(kernel, lambda _: ((1,), {"x_ptr": x, "table_ptr": table}))]  # noqa: E731
        cache.launch("pass", [{"x": x}], launches)
        return [at for at, values in recorded if any(value is table for value in values)]

    # When it is made, each time; then once on each stream.
    assert [launch(stream) for stream in (7, 7, 7, 7, 8, 8, 7)] == [[7], [7], [7], [], [8], [], []]
    assert gpus.streams == [107, 107, 108, 108, 107]
    assert {*gpus.launched_on} == {1}


def test_kernels_are_launched_in_one_place() -> None:
    found = []
    for path in Path(dilabench.__file__).parent.rglob("*.py"):
        source = path.read_text()
        # Few files call what they have selected.
        for node in ast.walk(ast.parse(source)) if "kernel" in source and re.search(r"\]\s*\(", source) else ():
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Subscript) and "kernel" in ast.unparse(called.value):
                found.append(path.name)
    assert {*found} == {"launch_cache.py"}


BRANCHES: dict[str, Any] = {"segment_lengths": (64, 256), "dilation_rates": (1, 2)}
HEADS, LENGTH = 4, 256


# What makes random numbers is made by one thread.
@cache
def modules(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[MultiheadDilatedAttention, FromTorchscale]:
    torch.manual_seed(0)
    args = SimpleNamespace(
        segment_length=[64, 256], dilated_ratio=[1, 2], multiway=False, layernorm_eps=1e-5, xpos_rel_pos=False
    )
    ours = MultiheadDilatedAttention(HEADS * dim, HEADS, **BRANCHES)
    return ours.to(device, dtype), FromTorchscale(args, HEADS * dim, HEADS, self_attention=True).to(device, dtype)


def module(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    made, _ = modules(q.shape[-1], q.dtype, q.device)
    return made((q + k + v).flatten(2)).unflatten(2, (HEADS, -1))


def torchscale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    _, made = modules(q.shape[-1], q.dtype, q.device)
    return made(q.flatten(2), k.flatten(2), v.flatten(2))[0].unflatten(2, (HEADS, -1))


def selected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    indices = torch.arange(LENGTH // 64, device=q.device)[:, None]
    return block_sparse_attention(q, k, v, block_size=64, indices=indices, causal=True)


Entry = Callable[[Tensor, Tensor, Tensor], Tensor]
ENTRIES: dict[str, Entry] = {
    "dense": lambda q, k, v: attention(q, k, v, causal=True),
    "dilated": lambda q, k, v: dilated_attention(q, k, v, causal=True, **BRANCHES),
    "detached": lambda q, k, v: dilated_attention(q, k, v, merge_grad="detached", **BRANCHES),
    "over a backend": lambda q, k, v: dilated_attention(q, k, v, backend="math", **BRANCHES),
    "sink": lambda q, k, v: dilated_attention(q, k, v, sink=q.new_ones(HEADS), **BRANCHES),
    "packed": lambda q, k, v: dilated_attention(q[0], k[0], v[0], cu_seqlens=(0, 100, LENGTH), **BRANCHES)[None],
    "packed dense": lambda q, k, v: attention(q[0], k[0], v[0], cu_seqlens=(0, 100, LENGTH), causal=True)[None],
    "blocks": lambda q, k, v: block_sparse_attention(q, k, v, block_size=64, density=0.5, causal=True),
    "selected": selected,
    "window and sinks": lambda q, k, v: attention(
        q, k, v, pattern=WindowSinkPattern(sinks=4, window_size=64), causal=True
    ),
    "sum": gated_sum,
    "module": module,
    "torchscale": torchscale,
}
entries = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


def results(entry: Entry, dim: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """out and the gradients of a third call: of one that repeats, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, LENGTH, HEADS, dim, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)
    )
    for _ in range(3):
        out = entry(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return [x.detach().cpu() for x in (out, *gradients)]


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same kernels, which add in one order."""
    monkeypatch.setenv("DILABENCH_FIRST_USE", "0")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize(("dim", "dtype"), [(24, "bfloat16"), (48, "float16"), (64, "bfloat16"), (128, "float32")])
@entries
def test_another_gpu_gives_the_bits_of_the_first(entry: Entry, dim: int, dtype: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    first, second = (results(entry, dim, getattr(torch, dtype), torch.device("cuda", at)) for at in (0, 1))
    assert torch.cuda.current_device() == 0
    if dtype == "float32":
        # torch's memory-efficient kernel, by which some entries go, adds dq in any order where torch only warns of it.
        torch.testing.assert_close(first.pop(1), second.pop(1))
    assert [*map(torch.equal, first, second)] == [True] * len(first)


@pytest.mark.gpu
@pytest.mark.usefixtures("repeatable")
@entries
def test_streams_and_threads_give_the_same_bits(entry: Entry) -> None:
    """Two threads with streams of their own, with what the first one keeps."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    expected = results(entry, 64, torch.bfloat16, device)
    found: list[list[Tensor]] = []

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            found.append(results(entry, 64, torch.bfloat16, device))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[*map(torch.equal, each, expected)] for each in found] == [[True] * 4] * 2

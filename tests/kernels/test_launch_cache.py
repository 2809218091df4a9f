"""Launches that repeat exchange their tensors and nothing else; what is new is compiled ahead."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.knobs import HookChain
from triton.runtime import _allocation, driver

from dilabench.attention import dilated_attention
from dilabench.kernels import launch_cache as module
from dilabench.kernels.launch_cache import Launch, LaunchCache, compile_ahead, layout, stride_unit


class Compiled:
    """What a kernel becomes; keeps what it was run with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *values, stream: self.calls.append((grid, *values))


class Kernel:
    arg_names = ("q_desc", "out_ptr", "table_ptr", "scale")

    def __init__(self) -> None:
        self.compiled = Compiled()

    def __getitem__(self, _grid: Any) -> Any:
        return lambda **_arguments: self.compiled


class Descriptor:
    def __init__(self, base: Tensor, shape: list[int]) -> None:
        self.base, self.shape = base, shape


def preparing(
    kernel: Any, tensors: dict[str, Tensor], table: Tensor, log: list[str] | None = None
) -> Callable[[], Iterator[Launch]]:
    """The launch of `Kernel` on these tensors."""

    def prepare() -> Iterator[Launch]:
        if log is not None:
            log.append("prepare")
        descriptor = Descriptor(tensors["q"], [2, 2])
        arguments = {"q_desc": descriptor, "out_ptr": tensors["out"], "table_ptr": table, "scale": 0.5}
        yield Launch(kernel, lambda _: ((7,), arguments))

    return prepare


def test_a_launch_repeats_for_other_tensors_and_holds_on_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CompiledKernel", Compiled)
    kernel, cache, table = Kernel(), LaunchCache(), torch.zeros(3)
    log: list[str] = []
    # One tensor may be two operands of a call and not of the next.
    both = torch.zeros(2, 2)
    for _ in range(2):
        cache.launch("forward", [{"q": both, "out": both}], preparing(kernel, {"q": both, "out": both}, table, log))
    assert log == ["prepare"] * 2, "most layouts of changing lengths never come again"
    q, out = torch.ones(2, 2), torch.ones(2, 2)
    cache.launch("forward", [{"q": q, "out": out}], preparing(kernel, {"q": both, "out": both}, table, log))
    assert log == ["prepare"] * 2
    ((grid, descriptor, result, kept, scale),) = kernel.compiled.calls
    assert (grid, scale) == ((7, 1, 1), 0.5)
    assert descriptor.base is q
    assert descriptor.shape == [2, 2]
    assert result is out
    assert kept is table
    assert cache._known["forward"][0].values[:2] == [None, None]


class OnNvidia(CompiledKernel):
    """A kernel of one descriptor, as Triton compiles it; logs what its launcher in C is given."""

    def __init__(self) -> None:
        self.module, self.function, self.packed_metadata, self.name, self.src = 1, 2, (4, 1, 0), "kernel", None
        self.given: list[tuple[Any, ...]] = []
        signature = {0: "tensordesc<fp32[2, 2]>", 1: "*fp32", 2: "*fp32", 3: "fp32"}
        encoding = {"swizzle": 0, "elem_size": 4, "elem_type": 7, "block_size": [2, 2], "fp4_padded": False}
        self._run = object.__new__(nvidia.CudaLauncher)
        vars(self._run).update(
            num_ctas=1,
            launch=nvidia.wrap_handle_tensordesc(lambda *given: self.given.append(given), signature, [encoding]),
            **{f"{kind}_scratch_{of}": 0 for kind in ("global", "profile") for of in ("size", "align")},
            launch_cooperative_grid=False,
            launch_pdl=True,
        )


class NvidiaDriver:
    """An active driver of Triton that encodes descriptors as (number of the encoding, address)."""

    def __init__(self) -> None:
        self.utils = self
        self.encoded = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 70 + device

    def fill_tma_descriptor(self, address: int, *_: Any) -> tuple[str, int]:
        self.encoded += 1
        return "encoded", address


def repeated_on_nvidia(
    monkeypatch: pytest.MonkeyPatch, compiled: OnNvidia
) -> tuple[NvidiaDriver, Callable[[Tensor, Tensor], tuple[Any, ...]]]:
    """The driver, and what launches `Kernel` once more: the third time and on. It gives what the launcher is given."""
    active = NvidiaDriver()
    monkeypatch.setattr(driver, "_active", active)
    # As if the tensors were on the first GPU.
    monkeypatch.setattr(Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_of", nullcontext)
    monkeypatch.setattr(module, "record", lambda _: None)
    kernel, cache, table = Kernel(), LaunchCache(), torch.zeros(3)
    kernel.compiled = compiled

    def launched(q: Tensor, out: Tensor) -> tuple[Any, ...]:
        cache.launch("forward", [{"q": q, "out": out}], preparing(kernel, {"q": q, "out": out}, table))
        return compiled.given[-1]

    first = torch.zeros(2, 2)
    monkeypatch.setattr(Descriptor, "strides", [2, 1], raising=False)
    monkeypatch.setattr(Descriptor, "padding", "zero", raising=False)
    compiled.given.append(())
    assert [launched(first, first) for _ in range(2)] == [(), ()], "the kernel itself launches what is new"
    return active, launched


def chain_of_hooks() -> Any:
    chain = HookChain()
    chain.add(print)
    return chain


@pytest.mark.parametrize("hook", [chain_of_hooks(), print], ids=["chain", "function"])
def test_a_repeated_launch_gives_tritons_launcher_what_triton_does(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    active, launched = repeated_on_nvidia(monkeypatch, OnNvidia())
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", None)
    for q, out in ((torch.zeros(2, 2), torch.zeros(2, 2)), (torch.ones(2, 2), torch.ones(2, 2))):
        recorded = [launched(q, out) for _ in range(3)]
        encoded = active.encoded
        with monkeypatch.context() as hooked:
            hooked.setattr(knobs.runtime, "launch_enter_hook", hook)
            by_triton = launched(q, out)
        assert active.encoded == encoded + 1
        assert by_triton[11] is hook
        assert recorded[0][:10] == by_triton[:10]
        assert 70 in recorded[0][:10], "the current stream"
        assert recorded[0][10:13] == (None, None, None)
        wanted = [x.data_ptr() if isinstance(x, Tensor) else x for x in by_triton[13:]]
        assert wanted[:2] == [("encoded", q.data_ptr()), 2]
        assert [[*given[13:]] for given in recorded] == [wanted] * 3
        assert recorded[1] == recorded[2] == recorded[0]
    assert active.encoded == 4, "addresses of an earlier launch are encoded once"


def test_descriptors_are_encoded_once_beside_other_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    active, launched = repeated_on_nvidia(monkeypatch, OnNvidia())
    q, results = torch.zeros(2, 2), [torch.zeros(2, 2) for _ in range(3)]
    first = launched(q, q)
    (place,) = (at for at, value in enumerate(first) if value == q.data_ptr())
    for out in (*results, q):
        assert launched(q, out) == (*first[:place], out.data_ptr(), *first[place + 1 :])
    assert active.encoded == 1


def test_no_more_than_so_many_launches_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_RECORDED", 2)
    active, launched = repeated_on_nvidia(monkeypatch, OnNvidia())
    tensors = [torch.zeros(2, 2) for _ in range(3)]
    given = [launched(q, q)[13] for q in (*tensors, *tensors)]
    assert given == [("encoded", q.data_ptr()) for q in (*tensors, *tensors)]
    assert active.encoded == 6


@pytest.mark.parametrize("other", ["memory for each launch", "another function above the launcher"])
def test_tritons_python_launches_where_its_launcher_is_not_known(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = OnNvidia()
    if other == "memory for each launch":
        monkeypatch.setattr(_allocation, "_allocator", SimpleNamespace(get=lambda: lambda *_: "scratch"))
        compiled._run.global_scratch_size = 8
    else:
        compiled._run.launch = lambda *given: compiled.given.append(given)
    _, launched = repeated_on_nvidia(monkeypatch, compiled)
    q = torch.zeros(2, 2)
    assert any(x is q for x in launched(q, q))


@pytest.mark.parametrize("copied", ["q", "out"])
def test_a_launch_that_reads_copies_is_not_repeated(copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CompiledKernel", Compiled)
    kernel, cache, table = Kernel(), LaunchCache(), torch.zeros(3)
    log: list[str] = []
    tensors = {"q": torch.zeros(2, 2), "out": torch.zeros(2, 2)}
    for _ in range(4):
        read = tensors | {copied: tensors[copied].clone()}
        cache.launch("forward", [tensors], preparing(kernel, read, table, log))
    assert log == ["prepare"] * 4


def test_a_launch_that_ran_nothing_is_not_repeated() -> None:
    """Under the interpreter, and where memory is traced."""
    log: list[str] = []
    cache, tensors = LaunchCache(), {"q": torch.zeros(2, 2), "out": torch.zeros(2, 2)}
    for _ in range(3):
        cache.launch("forward", [tensors], preparing(Kernel(), tensors, torch.zeros(3), log))
    assert log == ["prepare"] * 3


def test_what_depends_on_the_layout_alone_is_found_once() -> None:
    cache = LaunchCache.of("a pass", 1)
    assert cache is LaunchCache.of("a pass", 1)
    assert cache is not LaunchCache.of("a pass", 2)
    assert [cache.once("scale", lambda value=value: value) for value in (0.5, 0.25)] == [0.5, 0.5]


class Logged:
    """A kernel that tells what is done with it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __getitem__(self, _grid: Any) -> Any:
        return lambda form: self.log.append(f"run {form}")

    def warmup(self, grid: Any, form: str) -> None:
        assert grid == (1,)
        self.log.append(f"compile {form}")


def launch(
    prepare: Callable[[], Iterator[Launch]] | list[Launch], beside: Callable[[], list[Launch]] | None = None
) -> None:
    """Launches of a layout that is new."""
    launches = prepare if callable(prepare) else prepare.copy
    LaunchCache().launch("some", [{"x": torch.zeros(1)}], launches, beside)


def test_what_is_new_is_compiled_in_both_forms_with_all_that_follow_and_nothing_twice() -> None:
    log: list[str] = []
    kernel = Logged(log)

    def prepare(*kinds: str) -> Callable[[], Iterator[Launch]]:
        def launches() -> Iterator[Launch]:
            for kind in kinds:
                log.append(f"prepare {kind}")
                yield Launch(
                    kernel, lambda ragged, kind=kind: ((1,), {"form": kind + " cut" * ragged}), kind > "a", (kind,)
                )

        return launches

    launch(prepare("a"))
    assert log == ["prepare a", "compile a", "compile a cut", "run a"]
    log.clear()
    launch(prepare("a", "b", "b", "c"))
    ahead = ["prepare b", "prepare b", "prepare c", "compile b", "compile b cut", "compile c", "compile c cut"]
    assert log == ["prepare a", "run a", *ahead, "run b cut", "run b cut", "run c cut"]
    log.clear()
    launch(prepare("a", "c"))
    assert log == ["prepare a", "run a", "prepare c", "run c cut"], "a GPU works while the next one is prepared"


def test_what_has_no_kind_is_compiled_when_it_runs() -> None:
    log: list[str] = []
    launch([Launch(Logged(log), lambda _: ((1,), {"form": "a"}))] * 2)
    assert log == ["run a"] * 2


def test_launches_beside_those_that_are_new_are_compiled_with_them_and_not_made() -> None:
    log: list[str] = []
    kernel = Logged(log)

    def one(form: str) -> Launch:
        return Launch(kernel, lambda ragged: ((1,), {"form": form + " cut" * ragged}), False, (form,))

    def beside() -> list[Launch]:
        log.append("beside")
        noted: list[Launch] = []
        LaunchCache(noted).launch("backward", [{"x": torch.zeros(1)}], lambda: [one("c")])
        return noted

    launch([one("a"), one("b")], beside)
    compiled = [f"compile {form}{cut}" for form in "abc" for cut in ("", " cut")]
    assert log == ["beside", *compiled, "run a", "run b"]
    log.clear()
    launch([one("b"), one("a")], beside)
    launch([one("c")])
    assert log == ["run b", "run a", "run c"], "there was nothing to compile"


@pytest.mark.parametrize("compiles", [False, True])
def test_what_fails_beside_does_not_keep_a_launch_from_running(compiles: bool) -> None:
    log: list[str] = []
    kernel = Logged(log)

    def fails(**_: Any) -> None:
        raise NotImplementedError("no such instruction")

    def beside() -> list[Launch]:
        if not compiles:
            raise torch.OutOfMemoryError("no room")
        return [Launch(SimpleNamespace(warmup=fails), lambda _: ((1,), {}), False, ())]

    launch([Launch(kernel, lambda _: ((1,), {"form": "a"}), False, ("a",))], beside)
    assert log[-1] == "run a"


def test_a_kernel_that_cannot_be_compiled_says_so_each_time_and_leaves_triton_as_it_was() -> None:
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("needs a newer Triton: this one compiles one kernel after the other")
    from triton.runtime import _async_compile

    def fails() -> None:
        raise NotImplementedError("no such instruction")

    def interrupted() -> None:
        raise KeyboardInterrupt

    def warmup(kind: str, form: Any) -> Any:
        return _async_compile.active_mode.get().submit(kind, form, print)

    kernel = SimpleNamespace(warmup=lambda grid, form: warmup(form.__name__, form))
    for form, error in ((fails, NotImplementedError), (fails, NotImplementedError), (interrupted, KeyboardInterrupt)):
        with pytest.raises(error):
            compile_ahead([Launch(kernel, lambda _, form=form: ((1,), {"form": form}), False, (form.__name__,))])
        assert _async_compile.active_mode.get() is None


def test_a_kernel_that_is_compiled_ahead_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []

    class Loaded(CompiledKernel):
        def __init__(self) -> None:
            pass

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            loaded.append(grid)

    kernel = SimpleNamespace(warmup=lambda grid: Loaded())
    compile_ahead([Launch(kernel, lambda _: ((1,), {}), False, ("a",))])
    assert loaded == [(1, 1, 1)] * 2


def test_layouts_differ_by_what_kernels_are_compiled_for() -> None:
    x = torch.zeros(64, 64)
    assert layout(x) == layout(torch.ones(64, 64))
    others = (x.T, x[1:], x[:, 1:], x.double(), x.to("meta"))
    assert all(layout(x) != layout(other) for other in others)


@pytest.mark.slow
def test_a_kernel_has_one_name_on_disk_whatever_ran_before_it() -> None:
    def names(seed: int) -> dict[str, str]:
        program = [sys.executable, str(Path(__file__).with_name("named_kernels.py")), str(seed)]
        compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        said = subprocess.run(program, capture_output=True, text=True, check=True, env=compiling).stdout
        found: dict[str, str] = json.loads(said)
        return found

    first, second = names(1), names(2)
    assert len(first) > 50
    assert [name for name in first if second[name] != first[name]] == []


@pytest.mark.parametrize(
    ("tensors", "unit"),
    [
        ([torch.zeros(2, 3, 4, 24, dtype=torch.float16)] * 2, 8),
        ([torch.zeros(2, 3, 4, 20)], 4),
        ([torch.zeros(2, 3, 4, 20, dtype=torch.float16), torch.zeros(2, 3, 4, 16, dtype=torch.float16)], 4),
        ([torch.zeros(3, 4, 5)], 1),
        ([torch.zeros(1, 1, 5)], 4),
        ([torch.zeros(8).expand(3, 8)], 4),
    ],
)
def test_strides_are_counted_in_the_largest_unit_that_divides_all(tensors: list[Tensor], unit: int) -> None:
    assert stride_unit(*tensors) == unit


@pytest.mark.gpu
def test_calls_with_other_tensors_of_one_layout_are_right() -> None:
    """One tensor for all three, then three; a contiguous one, then views of one more; gradients too."""
    options = {"segment_lengths": (256, 1024), "dilation_rates": (1, 2)}
    generator = torch.Generator("cuda").manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    one = new(1, 1500, 4, 64)
    packed = new(1, 1500, 12, 64)
    for q, k, v in ((one, one, one), (new(1, 1500, 4, 64), one, new(1, 1500, 4, 64)), packed.split(4, 2)):
        for _ in range(2):
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            out = dilated_attention(*inputs, **options)
            gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
            exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
            expected = dilated_attention(*exact, **options, backend="math")
            wanted = torch.autograd.grad(expected, exact, torch.ones_like(expected))
            for found, right in zip((out, *gradients), (expected, *wanted), strict=True):
                right = right.detach()
                allowed = 0.02 * float(right.abs().max())
                torch.testing.assert_close(found.detach().double(), right, atol=allowed, rtol=0.0)

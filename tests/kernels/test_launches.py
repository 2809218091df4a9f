"""Launches that repeat: the tensors are exchanged, all else stays."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
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
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from dilabench.attention import dilated_attention
from dilabench.kernels import direct_launch
from dilabench.kernels import launches as module
from dilabench.kernels.launches import Launch, Launched, Launches, followed_by, launch, layout, run, stride_unit


class Compiled:
    """What a kernel becomes; keeps what it was run with. Not by any launcher of Triton's."""

    run = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *values: self.calls.append((grid, *values))


class Kernel:
    arg_names = ("q_desc", "out_ptr", "table_ptr", "scale")

    def __init__(self) -> None:
        self.compiled = Compiled()

    def __getitem__(self, _grid: Any) -> Any:
        return lambda **_arguments: self.compiled


class Descriptor:
    def __init__(self, base: Tensor, shape: list[int]) -> None:
        self.base, self.shape = base, shape


def test_a_launch_repeats_for_other_tensors_and_holds_on_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CompiledKernel", Compiled)
    kernel, known, table = Kernel(), Launches(), torch.zeros(3)
    # One tensor may be two operands of a call and not of the next.
    both = torch.zeros(2, 2)
    tensors = {"q": both, "out": both}
    assert not known.repeat("forward", tensors)
    arguments = {"q_desc": Descriptor(both, [2, 2]), "out_ptr": both, "table_ptr": table, "scale": 0.5}
    known.keep("forward", run(kernel, (7,), arguments), tensors)
    assert not known.repeat("forward", tensors), "most layouts of changing lengths never come again"
    known.keep("forward", run(kernel, (7,), arguments), tensors)
    q, out = torch.ones(2, 2), torch.ones(2, 2)
    assert known.repeat("forward", {"q": q, "out": out})
    ((grid, descriptor, result, kept, scale),) = kernel.compiled.calls
    assert (grid, scale) == ((7, 1, 1), 0.5)
    assert descriptor.base is q
    assert descriptor.shape == [2, 2]
    assert result is out
    assert kept is table
    assert known._known["forward"]._values[:2] == [None, None]


def test_a_launch_that_ran_nothing_is_not_repeated() -> None:
    """Under the interpreter, and where memory is traced."""
    known = Launches()
    for _ in range(2):
        known.keep("forward", run(Kernel(), (1,), {}), {})
    assert not known.repeat("forward", {})


class Logged:
    """A kernel that tells what is done with it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __getitem__(self, _grid: Any) -> Any:
        return lambda form: self.log.append(f"run {form}")

    def warmup(self, grid: Any, form: str) -> None:
        assert grid == (1,)
        self.log.append(f"compile {form}")


def test_what_is_new_is_compiled_in_both_forms_with_all_that_follow_and_nothing_twice() -> None:
    log: list[str] = []
    kernel = Logged(log)

    def prepare(*kinds: str) -> Iterator[Launch]:
        for kind in kinds:
            log.append(f"prepare {kind}")
            yield Launch(
                kernel, lambda ragged, kind=kind: ((1,), {"form": kind + " cut" * ragged}), kind > "a", (kind,)
            )

    assert [one.arguments for one in launch(prepare("a"))] == [{"form": "a"}]
    assert log == ["prepare a", "compile a", "compile a cut", "run a"]
    log.clear()
    launch(prepare("a", "b", "b", "c"))
    ahead = ["prepare b", "prepare b", "prepare c", "compile b", "compile b cut", "compile c", "compile c cut"]
    assert log == ["prepare a", "run a", *ahead, "run b cut", "run b cut", "run c cut"]
    log.clear()
    launch(prepare("a", "c"))
    assert log == ["prepare a", "run a", "prepare c", "run c cut"], "a GPU works while the next one is prepared"


def test_a_pass_that_follows_is_compiled_beside_what_is_new_and_not_made() -> None:
    log: list[str] = []
    kernel = Logged(log)

    def one(form: str) -> Launch:
        return Launch(kernel, lambda ragged: ((1,), {"form": form + " cut" * ragged}), False, (form,))

    def behind() -> None:
        log.append("behind")
        assert launch([one("c")])[0].arguments == {"form": "c"}

    with followed_by(behind):
        launch([one("a"), one("b")])
    compiled = [f"compile {form}{cut}" for form in "abc" for cut in ("", " cut")]
    assert log == ["behind", *compiled, "run a", "run b"]
    log.clear()
    with followed_by(behind):
        launch([one("b"), one("a")])
    launch([one("c")])
    assert log == ["run b", "run a", "run c"], "there was nothing to compile"
    log.clear()
    launch([one("d")])
    assert log == ["compile d", "compile d cut", "run d"], "nothing follows any more"


@pytest.mark.parametrize("compiles", [False, True])
def test_a_pass_that_follows_and_fails_does_not_keep_the_first_from_running(compiles: bool) -> None:
    log: list[str] = []
    kernel = Logged(log)

    def fails(**_: Any) -> None:
        raise NotImplementedError("no such instruction")

    def behind() -> None:
        if not compiles:
            raise torch.OutOfMemoryError("no room")
        launch([Launch(SimpleNamespace(warmup=fails), lambda _: ((1,), {}), False, ())])

    with followed_by(behind):
        launch([Launch(kernel, lambda _: ((1,), {"form": "a"}), False, ("a",))])
    assert log[-1] == "run a"


def test_a_kernel_that_cannot_be_compiled_says_so_each_time_and_leaves_triton_as_it_was() -> None:
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles one kernel after the other, and so do we")
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
            launch([Launch(kernel, lambda _, form=form: ((1,), {"form": form}), False, (form.__name__,))])
        assert _async_compile.active_mode.get() is None


# How the launcher of a kernel is told to encode a descriptor: for the copy engine of a Hopper, or not at all.
ENCODED = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("encoding", [ENCODED, None])
def test_a_direct_launch_gives_the_function_in_c_what_triton_gives_it(
    encoding: dict[str, Any] | None, hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if getattr(nvidia, "_BASE_ARGS_FORMAT", None) != direct_launch._TAKES:
        pytest.skip("this Triton launches in another way, and so do we through it")
    utils = SimpleNamespace(fill_tma_descriptor=lambda *given: given)
    active = SimpleNamespace(utils=utils, get_current_device=lambda: 1, get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(driver, "_active", active)
    calls: list[tuple[Any, ...]] = []
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        monkeypatch.setattr(hook, "calls", [print] if hooked else [])

    names = ("q_desc", "scale", "k_desc", "out_ptr", "table_ptr")
    signature = dict(enumerate(("tensordesc<bf16[1,64]>", "fp32", "tensordesc<bf16[1,64]>", "*bf16", "*i32")))
    launcher = object.__new__(nvidia.CudaLauncher)
    function = nvidia.wrap_handle_tensordesc(lambda *given: calls.append(given), signature, [encoding] * 2)
    none = dict.fromkeys((f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align")), 0)
    vars(launcher).update(none, launch=function, launch_cooperative_grid=False, launch_pdl=True)
    compiled = object.__new__(CompiledKernel)
    vars(compiled).update(module=5, function=6, packed_metadata=(4, 1, 0), _run=launcher, src=None, name="kernel")

    q, k, out, table = (torch.zeros(8, 64) for _ in range(4))
    descriptors = (TensorDescriptor(x, [8, 64], [64, 1], [1, 64]) for x in (q, k))
    values = (next(descriptors), 0.5, next(descriptors), out, table)
    known, tensors = Launches(), {"q": q, "k": k, "out": out}
    kernel = SimpleNamespace(arg_names=names)
    for _ in range(2):
        known.keep("forward", Launched(kernel, compiled, (7,), dict(zip(names, values, strict=True))), tensors)
    assert known.repeat("forward", tensors)
    compiled[7, 1, 1](*values)

    ours, theirs = calls
    facts = direct_launch._FACTS
    assert len(ours) == len(theirs)
    assert [a for a, b in zip(ours, theirs, strict=True) if isinstance(b, Tensor) and a is not b] == []
    different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a is not b and a != b]
    assert different == ([facts] if hooked else [facts, facts + 1, facts + 2])
    assert not hooked or ours[facts].get() == theirs[facts].get()


def test_layouts_differ_by_what_kernels_are_compiled_for() -> None:
    x = torch.zeros(64, 64)
    assert layout(x) == layout(torch.ones(64, 64))
    others = (x.T, x[1:], x[:, 1:], x.double(), x.to("meta"))
    assert all(layout(x) != layout(other) for other in others)


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

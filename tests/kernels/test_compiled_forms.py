"""Forms are told apart as Triton tells them apart."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there is nothing to compile")

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from dilabench.kernels import compiled_forms
from dilabench.kernels.compiled_forms import CompiledForms
from dilabench.kernels.launches import run


def some_kernel(x_desc, y_ptr, anywhere_ptr, gone_ptr, scale, step, length, DIM: tl.constexpr):
    pass


KERNEL = JITFunction(some_kernel, do_not_specialize=["length"], do_not_specialize_on_alignment=["anywhere_ptr"])
DATA = torch.zeros(4096, dtype=torch.bfloat16)


def descriptor(rows: int, columns: int, base: torch.Tensor = DATA) -> TensorDescriptor:
    return TensorDescriptor(base, [4096 // columns, columns], [columns, 1], [rows, columns])


CHOICES: dict[str, list[Any]] = {
    "x_desc": [descriptor(8, 64), descriptor(16, 64), descriptor(8, 64, DATA.half())],
    "y_ptr": [DATA, DATA[8:], DATA[1:], DATA.float(), None],
    "anywhere_ptr": [DATA, DATA[1:]],
    "gone_ptr": [None, DATA],
    "scale": [0.5, 1.0, 1],
    "step": [1, 2, 16, 48, 17, 2**31, -16],
    "length": [1, 2, 16, 2**31 - 1, 2**31],
    "DIM": [64, 128],
    "num_warps": [4, 8],
}


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Active:
        @staticmethod
        def get_current_device() -> int:
            return 0

    monkeypatch.setattr(driver, "_active", Active)


def as_triton_tells(arguments: dict[str, Any]) -> str:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(KERNEL.signature, KERNEL.params, backend)
    _, specialization, options = binder(**arguments)
    return repr((specialization, options))


def test_forms_are_equal_where_triton_takes_the_same_kernel() -> None:
    first = {name: values[0] for name, values in CHOICES.items()}
    cases = [first | {name: value} for name, values in CHOICES.items() for value in values]
    forms, told = CompiledForms(KERNEL), [as_triton_tells(case) for case in cases]
    ours = [forms.form(case) for case in cases]
    different = [(a, b) for a in range(len(cases)) for b in range(a) if (ours[a] == ours[b]) != (told[a] == told[b])]
    assert different == []
    assert len(set(told)) > 12


def test_a_known_form_is_launched_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    class Direct:
        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []

        def launch(self, grid: tuple[int, ...], arguments: list[Any]) -> None:
            self.calls.append((grid, *arguments))

    direct = Direct()
    monkeypatch.setattr(compiled_forms.DirectLaunch, "of", lambda _compiled: direct)
    forms = CompiledForms(KERNEL)
    first = {name: values[0] for name, values in CHOICES.items()}
    assert forms.launch((3,), first) is None
    forms.keep(first, "compiled")
    longer = first | {"length": 4711}
    assert forms.launch((5,), longer) == "compiled"
    assert direct.calls == [((5, 1, 1), *(longer[name] for name in KERNEL.arg_names))]
    assert forms.launch((5,), longer | {"step": 16}) is None, "another kernel"


def test_what_is_no_kernel_of_triton_is_launched_as_it_is() -> None:
    class Interpreted:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda **arguments: (grid, arguments)

    kernel = Interpreted()
    for _ in range(2):
        assert run(kernel, (2,), {"a": 1}).compiled == ((2,), {"a": 1})

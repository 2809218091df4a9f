"""Launches that repeat: the tensors are exchanged, all else stays."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import dilated_attention
from dilabench.kernels import launches as module
from dilabench.kernels.launches import Launches, layout, run


class Compiled:
    """What a kernel becomes; keeps what it was run with."""

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
    q, out = torch.ones(2, 2), torch.ones(2, 2)
    assert known.repeat("forward", {"q": q, "out": out})
    ((grid, descriptor, result, kept, scale),) = kernel.compiled.calls
    assert grid == (7, 1, 1) and descriptor.base is q and descriptor.shape == [2, 2]
    assert result is out and kept is table and scale == 0.5
    held = known._known["forward"]._values
    assert held[0] is None and held[1] is None


def test_a_launch_that_ran_nothing_is_not_repeated() -> None:
    """Under the interpreter, and where memory is traced."""
    known = Launches()
    known.keep("forward", run(Kernel(), (1,), {}), {})
    assert not known.repeat("forward", {})


def test_layouts_differ_by_what_kernels_are_compiled_for() -> None:
    x = torch.zeros(64, 64)
    assert layout(x) == layout(torch.ones(64, 64))
    others = (x.T, x[1:], x[:, 1:], x.double(), x.to("meta"))
    assert all(layout(x) != layout(other) for other in others)


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
                torch.testing.assert_close(found.double(), right, atol=0.02 * float(right.abs().max()), rtol=0.0)

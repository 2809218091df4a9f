"""What kernels in Gluon may not do shows on a CPU: the stand-in for the hardware notices."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there is no Gluon to stand in for")


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    module = importlib.import_module("gluon_on_cpu")
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    return module


@pytest.fixture
def run(gluon: Any) -> Any:
    """Runs functions as partitions of one program."""
    return lambda *partitions: gluon._specialize([(partition, ()) for partition in partitions])


@pytest.fixture
def operands(gluon: Any) -> tuple[Any, Any]:
    return tuple(gluon.Shared(torch.randn(4, 4, dtype=gluon.EXACT)) for _ in range(2))


def test_waiting_for_what_nobody_does(gluon: Any, run: Any) -> None:
    barrier = gluon.Barrier(2)
    barrier.change(arrivals=1)
    with pytest.raises(AssertionError, match="waited for what nobody does"):
        run(lambda: barrier.wait(0))


def test_a_phase_is_over_when_all_arrived_and_all_bytes_are_there(gluon: Any, run: Any) -> None:
    barrier = gluon.Barrier(1)
    barrier.change(arrivals=1, expected=64)
    assert barrier.phases == 0
    barrier.change(copied=64)
    assert barrier.phases == 1
    run(lambda: barrier.wait(0))


def test_partitions_wait_for_each_other(gluon: Any, run: Any) -> None:
    there, back = gluon.Barrier(1), gluon.Barrier(1)

    def one() -> None:
        there.change(arrivals=1)
        back.wait(0)

    def other() -> None:
        there.wait(0)
        back.change(arrivals=1)

    run(one, other)


def test_a_product_that_is_used_before_it_is_waited_for(gluon: Any, run: Any, operands: Any) -> None:
    a, b = operands

    def early() -> None:
        first = gluon._multiply(a, b, torch.zeros(4, 4), is_async=True)
        second = gluon._multiply(a, b, first, is_async=True)
        gluon._multiply_wait(1, deps=[second])

    with pytest.raises(AssertionError, match="used before it is waited for"):
        run(early)


def test_a_product_that_is_never_waited_for(gluon: Any, run: Any, operands: Any) -> None:
    with pytest.raises(AssertionError, match="not waited for"):
        run(lambda: gluon._multiply(*operands, None, use_acc=False, is_async=True))


def test_shared_memory_that_is_written_under_a_product(gluon: Any, run: Any, operands: Any) -> None:
    a, b = operands

    def overwritten() -> None:
        product = gluon._multiply(a, b, None, use_acc=False, is_async=True)
        b.store(torch.ones(4, 4))
        gluon._multiply_wait(0, deps=[product])

    with pytest.raises(AssertionError, match="written under a product"):
        run(overwritten)


def test_shared_memory_that_is_written_before_it_is_copied(gluon: Any, run: Any, operands: Any) -> None:
    source, target = operands[0], gluon.Descriptor(torch.zeros(4, 4), [4, 4], [4, 1], [4, 4], None)

    def overwritten() -> None:
        gluon._Builder.create_async_tma_reduce(None, target, [0, 0], source)
        source.store(torch.ones(4, 4))
        gluon._store_wait(0)

    with pytest.raises(AssertionError, match="before it had been copied"):
        run(overwritten)


def test_addresses_beyond_a_tensor(gluon: Any) -> None:
    inside = gluon.Pointer(torch.arange(4.0))
    places = torch.arange(6)
    assert gluon.load(inside + places, places < 4, 0.0).tolist() == [0, 1, 2, 3, 0, 0]
    with pytest.raises(AssertionError, match="beyond a tensor"):
        gluon.load(inside + places)


def test_boxes_hold_zeros_beyond_a_tensor_and_are_aligned(gluon: Any) -> None:
    base = torch.ones(6, 4)
    there, places = gluon.Descriptor(base, [6, 4], [4, 1], [4, 4], None).window([4, 0])
    assert there.shape == (2, 4)
    assert places == (slice(0, 2), slice(0, 4))
    with pytest.raises(AssertionError, match="multiples of 16 bytes"):
        gluon.Descriptor(base.view(-1)[1:], [5, 4], [4, 1], [4, 4], None)


def test_a_launch_that_lacks_an_argument(gluon: Any) -> None:
    def function(q_ptr: object, n: object, SIZE: "gl.constexpr") -> None:  # noqa: F821, UP037
        """Do nothing."""

    with pytest.raises(AssertionError, match="SIZE"):
        gluon.Kernel(function)[(1,)](q_ptr=torch.ones(1), n=1)


@pytest.mark.parametrize(("waits", "beside"), [(True, True), (False, True), (False, False)])
def test_writing_before_the_launch_before_has_ended(gluon: Any, waits: bool, beside: bool) -> None:
    def kernel(out_ptr: Any) -> None:
        if waits:
            gluon._wait_for_launch_before()
        gluon.store(out_ptr + torch.arange(4), torch.ones(4))

    out = torch.zeros(4)
    run = gluon.Kernel(kernel)[(2,)]
    if beside and not waits:
        with pytest.raises(AssertionError, match="before the launch before has ended"):
            run(out_ptr=out, launch_pdl=beside)
    else:
        run(out_ptr=out, launch_pdl=beside)
        assert out.sum() == 4

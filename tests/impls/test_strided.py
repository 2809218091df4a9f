"""`strided` reads in place, needs little memory, and takes tensors of other layouts as well."""

import weakref
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dilabench.backends import math
from dilabench.backends.sdpa import flash as sdpa_flash
from dilabench.choice.computation import load_backend
from dilabench.contracts import BuildContext, LoadedBackend, MergingKernel
from dilabench.impls import strided
from dilabench.impls.union import strided_rows
from dilabench.impls.union.rectangle_union import rectangle_union
from dilabench.kernels.lse import merge_rows_
from dilabench.machine import cxx_compiler
from dilabench.plugins.manager import discover
from dilabench.workload.spec import Workload
from tests.conftest import half_are_slow

CPU = torch.device("cpu")


def workload(**fields: object) -> Workload:
    """The three branches of the seed, scaled down."""
    defaults = {
        "pattern": {"kind": "dilated", "segment_lengths": (128, 256, 512), "dilation_rates": (1, 2, 4)},
        "batch_size": 1,
        "seq_len": 512,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 64,
        "dtype": "float32",
    }
    return Workload.model_validate({**defaults, **fields})


def tensors(asked: Workload) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (asked.batch_size, asked.seq_len)
    return tuple(  # type: ignore[return-value]
        torch.randn(*shape, heads, asked.head_dim, generator=generator).to(getattr(torch, asked.dtype))
        for heads in (asked.num_heads, asked.num_kv_heads, asked.num_kv_heads)
    )


def context(attend: Any = math.attend, attend_backward: Any = math.attend_backward) -> BuildContext:
    return BuildContext(device=torch.device("cpu"), backend=LoadedBackend("test", attend, attend_backward))


class PeakMemory(TorchDispatchMode):
    """The most bytes that results of operators held at once, while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(_storage(x)) for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, Tensor) and id(_storage(x)) not in given | self._seen:
                self._hold(_storage(x))
        return results

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        self._seen.add(key)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= nbytes


def _storage(x: Tensor) -> torch.UntypedStorage:
    return x.untyped_storage()


def attend_without_memory(q: Tensor, k: Tensor, v: Tensor, **_mask: Any) -> tuple[Tensor, Tensor]:
    """A kernel's results without the temporaries that a computation in PyTorch would add to the count."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=q.dtype).zero_()
    return out, torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide).zero_()


def test_the_memory_count_sees_what_lives_at_once() -> None:
    with PeakMemory() as memory:
        for _ in range(3):
            first = torch.empty(1000)
            second = first + 1
            view = second.view(10, 100)
            del first, second, view
    assert memory.peak_bytes == 8000
    assert memory.live_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("seq_len", "batch_size", "segment_lengths", "dilation_rates"),
    [
        (2048, 1, (512, 1024, 2048), (1, 2, 4)),
        (2048, 2, (128, 256, 512), (1, 2, 4)),
        (1900, 2, (128, 256, 512), (1, 2, 4)),
        (2000, 1, (1500, 2000), (1, 2)),
        (2048, 1, (128, 256, 512), (1, 1, 1)),
        (2048, 1, (128, 256, 512), (2, 4, 8)),
    ],
    ids=["seed", "batch", "short-tail", "long-tail", "all-rows", "no-full-branch"],
)
def test_forward_needs_at_most_1_6_times_the_output(
    seq_len: int, batch_size: int, segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...], dtype: str
) -> None:
    pattern = {"kind": "dilated", "segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    asked = workload(seq_len=seq_len, batch_size=batch_size, pattern=pattern, dtype=dtype)
    q, k, v = tensors(asked)
    attention = strided.build(asked, context(attend_without_memory))
    with PeakMemory() as memory, torch.no_grad():
        attention(q, k, v)
    assert q.nbytes <= memory.peak_bytes <= 1.6 * q.nbytes


def test_kernels_get_views_of_the_tensors() -> None:
    asked = workload(batch_size=2, num_kv_heads=4)
    q, k, v = tensors(asked)
    given: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> tuple[Tensor, Tensor]:
        given.extend((q, k, v))
        return math.attend(q, k, v, **mask)

    strided.build(asked, context(attend))(q, k, v)
    owners = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    assert len(given) >= 9
    assert {x.untyped_storage().data_ptr() for x in given} == owners
    assert all(x.stride(-1) == 1 for x in given)


@pytest.mark.parametrize("layout", ["packed projection", "heads first", "last dim apart", "expanded batch"])
def test_other_layouts_give_the_same(layout: str) -> None:
    asked = workload(batch_size=2, seq_len=300, head_dim=8, num_heads=5, num_kv_heads=5)
    attention = strided.build(asked, context())
    plain = [x[:1].expand(2, -1, -1, -1).contiguous() for x in tensors(asked)]
    other = {
        "packed projection": lambda: torch.stack(plain, 2).unbind(2),
        "heads first": lambda: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain],
        "last dim apart": lambda: [x.transpose(1, 3).contiguous().transpose(1, 3) for x in plain],
        "expanded batch": lambda: [x[:1].expand(2, -1, -1, -1) for x in plain],
    }[layout]()
    assert all(not x.is_contiguous() for x in other)
    dout = torch.randn(plain[0].shape, generator=torch.Generator().manual_seed(1))
    expected = outcome(attention, plain, dout)
    for actual, value in zip(outcome(attention, other, dout), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (40, 0)])
def test_batch_items_in_one_call_give_the_same(window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where to copy few rows takes less time than further calls."""
    pattern = {"kind": "dilated", "segment_lengths": (32, 64), "dilation_rates": (1, 2)}
    shape = {"batch_size": 4, "seq_len": 331, "head_dim": 8, "num_heads": 4, "num_kv_heads": 2}
    asked = workload(**shape, pattern=pattern, window=window, causal=True)
    inputs, calls = tensors(asked), []

    def attend(*operands: Tensor, **mask: Any) -> tuple[Tensor, Tensor]:
        calls.append(operands[0].shape)
        return math.attend(*operands, **mask)

    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    apart = outcome(strided.build(asked, context(attend)), inputs, dout)
    several, calls = len(calls), []
    monkeypatch.setattr(strided_rows, "copied_rows", lambda *_: 1 << 30)
    together = outcome(strided.build(asked, context(attend)), inputs, dout)
    assert len(calls) <= several / 2
    for actual, value in zip(together, apart, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-5)


def outcome(attention: Any, inputs: Any, dout: Tensor) -> tuple[Tensor, ...]:
    """out, dq, dk, dv; autograd may give `dout` in the layout of out."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return (out, *torch.autograd.grad(out, leaves, dout))


def test_an_output_gradient_without_strides_of_its_own() -> None:
    asked = workload(seq_len=300, head_dim=8)
    leaves = [x.requires_grad_() for x in tensors(asked)]
    attention = strided.build(asked, context())
    expanded = torch.autograd.grad(attention(*leaves).sum(), leaves)
    written_out = torch.autograd.grad(attention(*leaves), leaves, torch.ones_like(leaves[0]))
    for actual, value in zip(expanded, written_out, strict=True):
        assert torch.equal(actual, value)


@pytest.mark.gpu
def test_a_call_can_be_captured_in_a_cuda_graph() -> None:
    """After a first call nothing synchronises and nothing is copied from the host."""
    asked = workload(batch_size=2, dtype="bfloat16")
    device = torch.device("cuda")
    backend = LoadedBackend("sdpa-flash", sdpa_flash.attend, sdpa_flash.attend_backward)
    attention = strided.build(asked, BuildContext(device=device, backend=backend))
    q, k, v = (x.to(device) for x in tensors(asked))
    with torch.no_grad():
        attention(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attention(q, k, v)
        q.copy_(torch.randn_like(q))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, attention(q, k, v))


class InPlace:
    """A kernel that merges in place, by plain ones, and counts its calls."""

    def __init__(self) -> None:
        self.merged = self.added = 0

    def merge(self, q: Any, k: Any, v: Any, out: Tensor, lse: Tensor, *, fresh: bool, count: int, **mask: Any) -> None:
        self.merged += 1
        part_out, part_lse = math.attend(q, k, v, **mask)
        lse_rows = lse.flatten(0, 1).clone()
        if fresh:
            out.copy_(part_out)
            lse_rows = part_lse + log(count)
        else:
            merge_rows_(out, lse_rows, part_out, part_lse + log(count))
        lse.copy_(lse_rows.unflatten(0, lse.shape[:2]))

    def add_gradients(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Tensor, *places: Tensor, count: int, **mask: Any
    ) -> None:
        self.added += 1
        shares = math.attend_backward(dout, q, k, v, out, lse.flatten(0, 1) - log(count), **mask)
        for place, share in zip(places, shares, strict=True):
            place += share

    def backend(self, dtype: torch.dtype = torch.float32) -> LoadedBackend:
        kernel = MergingKernel(self.merge, self.add_gradients, frozenset({dtype}), dtype)
        return LoadedBackend("test", math.attend, math.attend_backward, merging=kernel)


@pytest.mark.parametrize(
    ("batch", "fields", "merge_grad", "in_rectangles"),
    half_are_slow(
        [1, 2], [{}, {"causal": True, "num_kv_heads": 2}, {"seq_len": 500}], ["exact", "detached"], [False, True]
    ),
)
def test_a_kernel_that_merges_writes_where_results_belong(
    batch: int, fields: dict[str, Any], merge_grad: str, in_rectangles: bool
) -> None:
    pattern = {
        "kind": "dilated",
        "segment_lengths": (128, 256, 512),
        "dilation_rates": (1, 2, 4),
        "merge_grad": merge_grad,
    }
    asked = workload(batch_size=batch, head_dim=16, pattern=pattern, mode="both", **fields)
    kernel = InPlace()
    build = rectangle_union if in_rectangles else strided.padded
    unions = [build(asked, BuildContext(device=CPU, backend=one)) for one in (kernel.backend(), context().backend)]
    q, k, v = tensors(asked)
    dout = torch.randn(q.shape)
    (out, lse, *_), (plain_out, plain_lse, *_) = (one.forward(q, k, v) for one in unions)
    torch.testing.assert_close((out, lse), (plain_out, plain_lse))
    shares = [one.backward(dout, q, k, v, out, lse) for one in unions]
    torch.testing.assert_close(*shares, rtol=1e-4, atol=1e-5)
    calls = len(unions[0].rows(CPU))
    # The first call of all rows gives gradients themselves, and detached weights need every result for itself.
    assert kernel.added == calls - sum(one.whole for one in unions[0].rows(CPU))
    assert kernel.merged == (0 if merge_grad == "detached" else calls)


@pytest.mark.skipif(cxx_compiler() is None, reason="needs a C++ compiler, none works here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype: str) -> None:
    """Of rectangles, whose sums are float32: the same bits as float32 gives from the same numbers."""
    asked = workload(head_dim=16, mode="both", causal=True, dtype=dtype)
    backend = load_backend(discover().catalogue.backends.get("flash-cpu"))
    half, wide = (
        rectangle_union(one, BuildContext(device=CPU, backend=backend))
        for one in (asked, asked.replace(dtype="float32"))
    )
    q, k, v = tensors(asked)
    dout = torch.randn(q.shape).to(q.dtype)
    out, lse, _ = half.forward(q, k, v)
    expected, expected_lse, _ = wide.forward(*(x.float() for x in (q, k, v)))
    assert torch.equal(out, expected.to(q.dtype))
    assert torch.equal(lse, expected_lse)
    shares = half.backward(dout, q, k, v, out, lse)
    others = wide.backward(*(x.float() for x in (dout, q, k, v, out)), lse)
    assert all(torch.equal(share, other.to(q.dtype)) for share, other in zip(shares, others, strict=True))


def test_other_dtypes_are_left_alone() -> None:
    kernel = InPlace()
    asked = workload(dtype="float64")
    q, k, v = tensors(asked)
    strided.build(asked, BuildContext(device=CPU, backend=kernel.backend()))(q, k, v)
    assert kernel.merged == 0


@pytest.mark.parametrize("build", [strided.padded, rectangle_union])
def test_a_kernel_that_merges_gets_rows_without_gaps(build: Any) -> None:
    def contiguous(*tensors: Tensor) -> None:
        assert all(x.stride(-1) == 1 for x in tensors)

    class Strict(InPlace):
        def merge(self, q: Any, k: Any, v: Any, out: Tensor, lse: Tensor, **told: Any) -> None:
            contiguous(q, k, v, out)
            super().merge(q, k, v, out, lse, **told)

        def add_gradients(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Tensor, *places: Any, **told: Any):
            contiguous(dout, q, k, v, out, *places)
            super().add_gradients(dout, q, k, v, out, lse, *places, **told)

    asked = workload(head_dim=16, mode="both")
    kernel = Strict()
    union = build(asked, BuildContext(device=CPU, backend=kernel.backend()))
    apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in tensors(asked)]
    out, lse, *_ = union.forward(*apart)
    apart_out = out.transpose(-1, -2).contiguous().transpose(-1, -2)
    union.backward(torch.randn(out.shape), *apart, apart_out, lse)
    assert kernel.merged
    assert kernel.added

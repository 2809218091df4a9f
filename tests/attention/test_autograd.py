"""Autograd's and torch's own tools over every entry of the library: batches of gradients, vmap, FLOPs, autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dilabench.attention import (
    DilatedAttention,
    MultiheadDilatedAttention,
    attention,
    block_sparse_attention,
    dilated_attention,
)
from dilabench.patterns.window_sink import WindowSinkPattern
from dilabench.workload.spec import Workload, attended_pairs

B, N, H, D, BLOCK = 1, 32, 2, 16, 16
BRANCHES: dict[str, Any] = {"segment_lengths": (8, 32), "dilation_rates": (1, 2)}
BOUNDS = (0, 11, N)
INDICES = torch.tensor([[0, -1], [1, 0]])
WINDOW = WindowSinkPattern(sinks=2, window_size=8)
SINK = torch.tensor([0.5, -1.0], dtype=torch.float64)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Attend] = {
    "dense": lambda q, k, v: attention(q, k, v, causal=True),
    "dilated": lambda q, k, v: dilated_attention(q, k, v, **BRANCHES),
    "dilated of torch": lambda q, k, v: dilated_attention(q, k, v, **BRANCHES, backend="math"),
    "detached": lambda q, k, v: dilated_attention(q, k, v, **BRANCHES, merge_grad="detached"),
    "sink": lambda q, k, v: attention(q, k, v, sink=SINK.to(q)),
    "packed": lambda q, k, v: dilated_attention(q[0], k[0], v[0], **BRANCHES, cu_seqlens=BOUNDS)[None],
    "module": DilatedAttention(**BRANCHES),
    "blocks": lambda q, k, v: block_sparse_attention(q, k, v, block_size=BLOCK, density=0.5, causal=True),
    "indices": lambda q, k, v: block_sparse_attention(q, k, v, block_size=BLOCK, indices=INDICES, causal=True),
    "window and sinks": lambda q, k, v: attention(q, k, v, pattern=WINDOW, causal=True, sink=SINK.to(q)),
}
entries = pytest.mark.parametrize("attend", FUNCTIONS.values(), ids=FUNCTIONS)


def operands(*lead: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*lead, B, N, H, D, dtype=dtype, generator=generator).requires_grad_(not lead) for _ in range(3)]


@entries
def test_batches_of_gradients(attend: Attend) -> None:
    inputs = operands()
    (douts, *_) = operands(3)
    out = attend(*inputs)
    each = [torch.autograd.grad(out, inputs, dout, retain_graph=True) for dout in douts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.autograd.grad(out, inputs, douts, is_grads_batched=True)
    for gradients, expected in zip(found, zip(*each, strict=True), strict=True):
        assert torch.equal(gradients, torch.stack(expected))


@entries
def test_vectorized_jacobians(attend: Attend) -> None:
    q, k, v = operands()

    def last_row(q: Tensor) -> Tensor:
        return attend(q, k, v)[:, -1, :, :2]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.autograd.functional.jacobian(last_row, q, vectorize=True)
        by_transform = torch.func.jacrev(last_row)(q.detach())
    expected = torch.autograd.functional.jacobian(last_row, q)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(by_transform, expected, rtol=0, atol=1e-12)


def test_batches_of_gradients_are_not_differentiated() -> None:
    q, k, v = operands()
    out = attention(q, k, v)
    douts = torch.stack([out, out]).detach()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out, q, douts, is_grads_batched=True, create_graph=True)


@entries
def test_vmap(attend: Attend) -> None:
    inputs = operands(3)

    def loss(*x: Tensor) -> Tensor:
        return attend(*x).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = torch.func.vmap(attend, (0, 0, None))(inputs[0], inputs[1], inputs[2][0])
        gradients = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, 0, None))(*inputs[:2], inputs[2][0])
    for at in range(3):
        q, k, v = inputs[0][at], inputs[1][at], inputs[2][0]
        torch.testing.assert_close(out[at], attend(q, k, v), rtol=0, atol=1e-12)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        torch.testing.assert_close(tuple(x[at] for x in gradients), expected, rtol=0, atol=1e-11)


@entries
def test_autograd_through_vmap(attend: Attend) -> None:
    inputs = [x.requires_grad_() for x in operands(3)]
    dout = torch.randn(3, B, N, H, D, dtype=torch.float64)
    mapped = torch.autograd.grad(torch.func.vmap(attend)(*inputs), inputs, dout)
    expected = torch.autograd.grad(torch.stack([attend(*x) for x in zip(*inputs, strict=True)]), inputs, dout)
    torch.testing.assert_close(mapped, expected, rtol=0, atol=1e-12)


Losses = Callable[..., Tensor]
# Of a loss of one sample, the gradients for batches of q, k and v, the last for the first sample alone; the first of
# all is a loss, which autograd differentiates.
TRANSFORMS: dict[str, Callable[[Losses], Callable[..., Any]]] = {
    "autograd of vmap": lambda loss: lambda *x: torch.func.vmap(loss)(*x).sum(),
    "vmap of grad": lambda loss: torch.func.vmap(torch.func.grad(loss, (0, 1, 2))),
    "grad of vmap": lambda loss: torch.func.grad(lambda *x: torch.func.vmap(loss)(*x).sum(), (0, 1, 2)),
    "grad": lambda loss: lambda *x: torch.func.grad(lambda *y: loss(*y), (0, 1, 2))(*(y[0] for y in x)),
}


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize(
    ("name", "transform"),
    [
        pytest.param(name, transform, marks=() if (name, transform) == ("dense", "grad") else pytest.mark.slow)
        for name in FUNCTIONS
        for transform in TRANSFORMS
    ],
)
def test_compiled_transforms_drop_no_gradient(name: str, transform: str) -> None:
    """Dynamo takes an autograd function for its forward pass unless it knows that gradients are wanted."""
    torch._dynamo.reset()
    is_autograds = transform == "autograd of vmap"
    inputs = [x.requires_grad_(is_autograds) for x in operands(3)]

    def loss(*x: Tensor) -> Tensor:
        return FUNCTIONS[name](*x).square().sum()

    found = torch.compile(TRANSFORMS[transform](loss), backend="aot_eager")(*inputs)
    if is_autograds:
        found = torch.autograd.grad(found, inputs)
    leaves = [x.detach().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(torch.stack([loss(*x) for x in zip(*leaves, strict=True)]).sum(), leaves)
    if transform == "grad":
        expected = tuple(x[0] for x in expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_vmap_over_sinks() -> None:
    q, k, v = (x.detach() for x in operands())
    sinks = torch.randn(3, H, dtype=q.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.func.vmap(torch.func.grad(lambda sink: attention(q, k, v, sink=sink).square().sum()))(sinks)
    for at, sink in enumerate(sinks):
        leaf = sink.clone().requires_grad_()
        (expected,) = torch.autograd.grad(attention(q, k, v, sink=leaf).square().sum(), leaf)
        torch.testing.assert_close(found[at], expected, rtol=0, atol=1e-12)


@entries
def test_flops_are_counted(attend: Attend) -> None:
    """4·D of each pair forward, 10·D backward, in the first count of a process as well as in later ones."""
    inputs = operands(dtype=torch.float32)
    with FlopCounterMode(display=False) as forward:
        out = attend(*inputs)
    with FlopCounterMode(display=False) as backward:
        out = attend(*inputs)
        out.sum().backward()
    assert forward.get_total_flops() > 0
    assert forward.get_total_flops() % (4 * D) == 0
    assert backward.get_total_flops() * 2 == forward.get_total_flops() * 7


def test_flops_are_of_the_pairs_of_the_pattern() -> None:
    q, _, _ = operands(dtype=torch.float32)
    fields: Any = {"batch_size": B, "seq_len": N, "num_heads": H, "num_kv_heads": H, "head_dim": D}
    dense = Workload(pattern={"kind": "dense"}, causal=True, **fields)
    with FlopCounterMode(display=False) as counted:
        attention(q, q, q, causal=True)
    assert counted.get_total_flops() == 4 * D * attended_pairs(dense) == 4 * D * H * N * (N + 1) // 2
    dilated = Workload(pattern={"kind": "dilated", **BRANCHES}, causal=False, **fields)
    with FlopCounterMode(display=False) as counted:
        dilated_attention(q, q, q, **BRANCHES)
    assert counted.get_total_flops() == 4 * D * attended_pairs(dilated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("attend", "device"),
    [
        *(pytest.param(attend, "cpu", id=f"cpu-{name}") for name, attend in FUNCTIONS.items()),
        # INDICES is on the CPU.
        *(
            pytest.param(attend, "cuda", id=f"cuda-{name}", marks=pytest.mark.gpu)
            for name, attend in FUNCTIONS.items()
            if name != "indices"
        ),
    ],
)
def test_autocast_casts_as_torch_does(attend: Attend, dtype: torch.dtype, device: str) -> None:
    inputs = [x.detach().to(device).requires_grad_() for x in operands(dtype=dtype)]
    if device == "cuda" and dtype == torch.float64 and attend in (FUNCTIONS["blocks"], FUNCTIONS["window and sinks"]):
        with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(ValueError, match="float64"):
            attend(*inputs)
        return
    with torch.autocast(device, dtype=torch.bfloat16):
        wanted = torch.nn.functional.scaled_dot_product_attention(*inputs).dtype
        out = attend(*inputs)
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    assert out.dtype == wanted
    assert all(x.dtype == dtype for x in gradients)
    assert torch.equal(out, attend(*(x.to(wanted) for x in inputs)))


def test_autocast_of_modules() -> None:
    module = MultiheadDilatedAttention(H * D, H, **BRANCHES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(B, N, H * D)).dtype == torch.bfloat16


@pytest.mark.parametrize("pattern", [None, WindowSinkPattern(sinks=2, window_size=8)], ids=["dense", "window"])
def test_a_sink_of_inf_takes_everything(pattern: Any) -> None:
    """As in the limit: outputs and all gradients are 0, for that head alone."""
    q, k, v = operands()
    sink = torch.tensor([torch.inf, 0.5], dtype=q.dtype, requires_grad=True)
    out, lse = attention(q, k, v, pattern=pattern, causal=True, sink=sink, return_lse=True)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, sink))
    assert torch.isposinf(lse[:, 0]).all()
    assert not out[:, :, 0].any()
    assert out[:, :, 1].all()
    assert all(x.isfinite().all() for x in gradients)
    assert not any(x[:, :, 0].any() for x in gradients[:3])
    assert gradients[3][0] == 0


def test_empty_batches_and_sequences() -> None:
    """They are mapped and counted as others are."""
    with FlopCounterMode(display=False) as counted:
        assert attention(*(torch.ones(0, N, H, D) for _ in range(3))).shape == (0, N, H, D)
        assert block_sparse_attention(*(torch.ones(1, 0, H, D) for _ in range(3)), block_size=BLOCK).shape[1] == 0
        dilated_attention(*(torch.ones(N, H, D) for _ in range(3)), **BRANCHES, cu_seqlens=(0, 0))
    assert counted.get_total_flops() == 0
    mapped = torch.func.vmap(lambda x: attention(x, x, x))(torch.ones(3, 0, N, H, D))
    assert mapped.shape == (3, 0, N, H, D)

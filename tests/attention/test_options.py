"""Options are Python numbers and texts: all else is refused, with the rule and a way out, by every entry."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.attention import (
    DilatedAttention,
    MultiheadDilatedAttention,
    attention,
    block_sparse_attention,
    dilated_attention,
    operands,
)
from dilabench.compat.torchscale import DilatedAttention as FromTorchscale
from dilabench.patterns import DilatedPattern, SelectedBlocksPattern, WindowSinkPattern

BRANCHES: dict[str, Any] = {"segment_lengths": (16, 64), "dilation_rates": (1, 2)}


def tensors() -> list[Tensor]:
    return [torch.randn(1, 64, 4, 16) for _ in range(3)]


def multihead(**options: Any) -> Tensor:
    module = MultiheadDilatedAttention(64, 4, **{**BRANCHES, **options})
    out: Tensor = module(torch.randn(1, 64, 64))
    return out


def torchscale(segment_lengths: Any = (16,), dilation_rates: Any = (1,), causal: Any = False) -> Tensor:
    args = SimpleNamespace(
        segment_length=segment_lengths, dilated_ratio=dilation_rates, multiway=False, xpos_rel_pos=False
    )
    x = torch.randn(1, 64, 64)
    out: Tensor = FromTorchscale(args, 64, 4, self_attention=True)(x, x, x, is_causal=causal)[0]
    return out


ENTRIES: dict[str, Callable[..., Any]] = {
    "attention": lambda **options: attention(*tensors(), **options),
    "dilated": lambda **options: dilated_attention(*tensors(), **{**BRANCHES, **options}),
    "sink": lambda **options: dilated_attention(*tensors(), sink=torch.zeros(4), **{**BRANCHES, **options}),
    "block_sparse": lambda **options: block_sparse_attention(*tensors(), block_size=16, **options),
    "module": lambda **options: DilatedAttention(**{**BRANCHES, **options})(*tensors()),
    "multihead": multihead,
}
BRANCHED = {name: ENTRIES[name] for name in ("dilated", "sink", "module", "multihead")}
BRANCHED["torchscale"] = torchscale


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": torch.nn.Parameter(torch.tensor(0.5))}, r"scale is a tensor.*\n?.*query \* scale"),
        ({"causal": torch.tensor(True)}, r"causal is a tensor.*give causal\.item\(\)"),
        ({"scale": "0.5"}, "scale '0.5' is a text; give a number"),
        ({"causal": "yes"}, "causal 'yes' must be a bool; give True or False"),
        ({"scale": {}}, "scale {} has parts that can change; give numbers"),
        ({"window": None}, r"window None must be two integers, .*\(-1, -1\) is no window"),
        ({"window": 4}, "window 4 must be two integers"),
        ({"window": "3,0"}, "window '3,0' must be two integers"),
        ({"window": torch.tensor([3, 0])}, "window .* must be two integers"),
        ({"window": ([3], [0])}, "window .* must be two integers"),
    ],
    ids=str,
)
def test_refuses_what_is_no_number(entry: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    # Twice: nothing is kept of what is refused.
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            entry(**options)


@pytest.mark.parametrize("entry", BRANCHED.values(), ids=BRANCHED.keys())
@pytest.mark.parametrize("name", ["segment_lengths", "dilation_rates"])
@pytest.mark.parametrize("value", [4, None, "[16,32,64]", ["16", "1K"], torch.tensor([16, 32])], ids=str)
def test_refuses_branches_that_are_no_integers(entry: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)must be a sequence of integers, for example \("):
        entry(**{name: value})


@pytest.mark.parametrize("name", ["density", "block_size", "seed"])
def test_refuses_a_mask_drawn_by_tensors(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is a tensor"):
        block_sparse_attention(*tensors(), **{"block_size": 16, name: torch.tensor(1)})


@pytest.mark.parametrize("indices", [None, torch.zeros(4, 1, dtype=torch.int64)], ids=["drawn", "given"])
@pytest.mark.parametrize("name", ["mask", "density", "block_size", "seed"])
def test_refuses_a_mask_drawn_by_lists(name: str, indices: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} \[16\] has parts that can change"):
        block_sparse_attention(*tensors(), indices=indices, **{"block_size": 16, name: [16]})


@pytest.mark.parametrize("backend", [None, 5])
def test_refuses_a_backend_that_is_none(backend: Any) -> None:
    for function in (attention, ENTRIES["sink"], ENTRIES["dilated"]):
        with pytest.raises(ValueError, match="must be a name of `dilabench list backends`, a function, or 'auto'"):
            function(*(tensors() if function is attention else ()), backend=backend)


@pytest.mark.parametrize("shape", [(1, 64, 4, 16), (0, 64, 4, 16), (1, 0, 4, 16)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refuses_a_backend_that_nobody_knows(shape: tuple[int, ...], device: str) -> None:
    q = torch.empty(shape, device=device)
    tokens = q.flatten(0, 1)
    calls = [
        lambda: attention(q, q, q, backend="flash_cpu"),
        lambda: dilated_attention(q, q, q, **BRANCHES, backend="flash_cpu"),
        lambda: attention(tokens, tokens, tokens, cu_seqlens=(0, len(tokens)), backend="flash_cpu"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="flash_cpu"):
            call()


@pytest.mark.parametrize("sink", [[0.0] * 4, 0.0, "sink"], ids=str)
@pytest.mark.parametrize("entry", [attention, ENTRIES["dilated"], ENTRIES["block_sparse"]])
def test_refuses_a_sink_that_is_no_tensor(entry: Callable[..., Any], sink: Any) -> None:
    with pytest.raises(
        ValueError, match=r"sink .* must be a tensor \[H\], one logit per query head: give torch\.tensor"
    ):
        entry(*(tensors() if entry is attention else ()), sink=sink)


@pytest.mark.parametrize(
    "bounds", [4, "0,64", [torch.tensor(0), torch.tensor(64)], torch.tensor([0, 64], device="meta")], ids=str
)
def test_refuses_bounds_that_are_no_integers(bounds: Any) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens .*(must be integers that rise from 0|on meta.*give a list)"):
        attention(*(x[0] for x in tensors()), cu_seqlens=bounds)


@pytest.mark.parametrize("bounds", [torch.tensor(64), torch.tensor([[0, 64]])], ids=["number", "matrix"])
@pytest.mark.parametrize("longest", [None, 64])
@pytest.mark.parametrize("pattern", [None, WindowSinkPattern(sinks=1, window_size=8)], ids=["dense", "window_sink"])
def test_refuses_bounds_that_are_no_row(bounds: Tensor, longest: int | None, pattern: Any) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens .*must be one row of bounds that rise from 0 to 64"):
        attention(*(x[0] for x in tensors()), cu_seqlens=bounds, max_seqlen=longest, pattern=pattern)


def test_a_learned_scale_multiplies_the_query() -> None:
    q, k, v = tensors()
    scale = torch.nn.Parameter(torch.tensor(0.5))
    out = attention(q * scale, k, v, scale=1)
    torch.testing.assert_close(out, attention(q, k, v, scale=0.5))
    assert torch.autograd.grad(out.sum(), scale)[0].abs() > 0


@pytest.mark.parametrize(
    "bounds", [[0, 32.5, 64], [0, None], torch.tensor([0.0, 64.0]), torch.tensor([False, True])], ids=str
)
def test_refuses_bounds_that_are_fractions_bools_or_none(bounds: Any) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens .* must be integers that rise from 0"):
        attention(*(x[0] for x in tensors()), cu_seqlens=bounds)


@pytest.mark.parametrize("longest", [-1, "64", 64.0], ids=repr)
def test_refuses_a_longest_sequence_that_is_no_number_of_tokens(longest: Any) -> None:
    q, k, v = (x[0] for x in tensors())
    with pytest.raises(ValueError, match=f"max_seqlen {longest!r} must be"):
        attention(q, k, v, cu_seqlens=[0, len(q)], max_seqlen=longest)


PATTERNS = [None, WindowSinkPattern(sinks=1, window_size=8)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=["dense", "window_sink"])
def test_refuses_a_longest_sequence_of_a_batch(pattern: Any) -> None:
    with pytest.raises(ValueError, match="max_seqlen 64 without cu_seqlens"):
        attention(*tensors(), pattern=pattern, max_seqlen=64)


PACKED: dict[str, Callable[..., Any]] = {
    "dense": attention,
    "dilated": partial(attention, pattern=DilatedPattern(**BRANCHES)),
    "window_sink": partial(attention, pattern=WindowSinkPattern(sinks=1, window_size=8)),
    "selected": partial(
        attention, pattern=SelectedBlocksPattern(block_size=16), indices=torch.zeros(64, 4, 1, dtype=torch.int64)
    ),
    "branches": partial(dilated_attention, **BRANCHES),
    "sink": partial(dilated_attention, sink=torch.zeros(4), **BRANCHES),
    "one_backend": partial(dilated_attention, backend="math", **BRANCHES),
    "module": DilatedAttention(**BRANCHES),
}


@pytest.mark.parametrize("bounds_as", [list, tuple, torch.tensor, torch.IntTensor], ids=["list", "tuple", "64", "32"])
@pytest.mark.parametrize("entry", PACKED.values(), ids=PACKED.keys())
def test_refuses_a_longest_sequence_that_is_too_short(entry: Callable[..., Any], bounds_as: Callable[..., Any]) -> None:
    q, k, v = (x[0] for x in tensors())
    bounds = bounds_as([0, 9, len(q)])
    with pytest.raises(ValueError, match=f"max_seqlen 9 is less than {len(q) - 9}, the tokens of the longest"):
        entry(q, k, v, cu_seqlens=bounds, max_seqlen=9)
    entry(q, k, v, cu_seqlens=bounds, max_seqlen=len(q) - 9)


@pytest.mark.parametrize("bounds_as", [list, torch.tensor], ids=["list", "tensor"])
def test_bounds_on_the_host_are_compared_for_tensors_on_a_device(bounds_as: Callable[..., Any]) -> None:
    q, k, v = (x[0].to("meta") for x in tensors())
    with pytest.raises(ValueError, match="max_seqlen 9 is less than 55"):
        attention(q, k, v, cu_seqlens=bounds_as([0, 9, 64]), max_seqlen=9)


def test_bounds_on_a_device_are_not_read_for_the_longest_sequence() -> None:
    """Reading bounds on "meta" fails."""
    assert operands.rounded_up(9, torch.empty(3, dtype=torch.int32, device="meta")) == 1024


@pytest.mark.parametrize("as_tensor", [False, True])
def test_lengths_instead_of_bounds_are_named(as_tensor: bool) -> None:
    q, k, v = (x[0] for x in tensors())
    lengths = [0, len(q) - 3, 3]
    for given in (lengths, lengths[1:]):
        with pytest.raises(ValueError, match=r"if these are lengths, their bounds are \[0, \*lengths.cumsum\(0\)\]"):
            attention(q, k, v, cu_seqlens=torch.tensor(given) if as_tensor else given)
    with pytest.raises(ValueError, match=r"equal bounds are empty sequences$"):
        attention(q, k, v, cu_seqlens=[0, 9, 3])


@pytest.mark.parametrize("pattern", ["dilated", DilatedPattern, {"kind": "dilated"}], ids=str)
def test_refuses_what_is_no_pattern(pattern: Any) -> None:
    with pytest.raises(ValueError, match=r"pattern .* must be an object of dilabench\.patterns"):
        attention(*tensors(), pattern=pattern)


@pytest.mark.parametrize(
    "indices", [torch.zeros(4, 2).numpy(), torch.zeros(4, 4, dtype=torch.bool)], ids=["array", "mask"]
)
def test_refuses_indices_of_blocks_that_are_no_integers(indices: Any) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"indices .*(torch\.as_tensor|must be integers)"):
        block_sparse_attention(q, k, v, indices=indices, block_size=q.shape[1] // 4)


@pytest.mark.parametrize(
    "result",
    [lambda q: q, lambda q: (q, q), lambda q: (q[:, 1:], q[..., 0].mT), lambda q: (q, None)],
    ids=["out", "lse of another shape", "out of another shape", "no lse"],
)
def test_refuses_a_function_that_returns_no_out_and_lse(result: Callable[[Tensor], Any]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return result(q)

    with pytest.raises(ValueError, match=r"backend .*attend.* must return \(out, lse\), of shapes"):
        attention(*tensors(), backend=attend)
